"""Training data: rows from files, rows to token ids with the trained part marked, batches in a reproducible order."""

from peftkit.data.collate import IGNORED, Batch, collate
from peftkit.data.dataset import Dataset, Sample, load_dataset
from peftkit.data.formats import ChatRow, CompletionRow, Row, read_rows
from peftkit.data.sampler import Sampler, plan_epoch, plan_evaluation

__all__ = [
    "Batch",
    "ChatRow",
    "CompletionRow",
    "Dataset",
    "IGNORED",
    "Row",
    "Sample",
    "Sampler",
    "collate",
    "load_dataset",
    "plan_epoch",
    "plan_evaluation",
    "read_rows",
]
