"""Training data: rows from files, rows to token ids with the trained part marked, batches in a reproducible order."""

from peftkit.data.audit import Audit, audit, check_overlap
from peftkit.data.collate import IGNORED, Batch, collate, collate_packed
from peftkit.data.dataset import Dataset, Stream, load_dataset, open_stream
from peftkit.data.encode import Sample, Turns, encode_row
from peftkit.data.formats import ChatRow, CompletionRow, Format, InstructionRow, Row, TextRow, read_rows
from peftkit.data.packing import block_mask
from peftkit.data.sampler import (
    Batches,
    Batching,
    Position,
    Sampler,
    Shape,
    StreamSampler,
    padding_share,
    plan_epoch,
    plan_evaluation,
)

__all__ = [
    "Audit",
    "Batch",
    "Batches",
    "Batching",
    "ChatRow",
    "CompletionRow",
    "Dataset",
    "Format",
    "IGNORED",
    "InstructionRow",
    "Position",
    "Row",
    "Sample",
    "Sampler",
    "Shape",
    "Stream",
    "StreamSampler",
    "TextRow",
    "Turns",
    "audit",
    "block_mask",
    "check_overlap",
    "collate",
    "collate_packed",
    "encode_row",
    "load_dataset",
    "open_stream",
    "padding_share",
    "plan_epoch",
    "plan_evaluation",
    "read_rows",
]
