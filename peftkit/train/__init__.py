"""Training: the loop on accelerate, checkpoints with exact resumption, the dry run before it and the record after."""

from peftkit.train.deploy import check_deployment, deploy
from peftkit.train.dry_run import DryRun, dry_run, dry_runs
from peftkit.train.interrupt import Interrupted
from peftkit.train.memory import MemoryEstimate
from peftkit.train.processes import is_main_process, leave
from peftkit.train.run import OpenBar, RunSummary, train, train_runs

__all__ = [
    "DryRun",
    "Interrupted",
    "MemoryEstimate",
    "OpenBar",
    "RunSummary",
    "check_deployment",
    "deploy",
    "dry_run",
    "dry_runs",
    "is_main_process",
    "leave",
    "train",
    "train_runs",
]
