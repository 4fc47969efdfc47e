"""Training: the loop on accelerate, checkpoints with exact resumption, the dry run before it and the record after."""

from peftkit.train.dry_run import DryRun, dry_run
from peftkit.train.interrupt import Interrupted
from peftkit.train.memory import MemoryEstimate
from peftkit.train.run import OpenBar, RunSummary, train

__all__ = ["DryRun", "Interrupted", "MemoryEstimate", "OpenBar", "RunSummary", "dry_run", "train"]
