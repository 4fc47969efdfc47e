"""Several processes of one run: each takes a share of every step's micro-batches, gradients are added up.

The recipe says what a step is, however many processes do it: a step's gradient, and so the run, is the same up to
rounding. Adapters are small, so their gradients travel once a step as one tensor, and nothing has to be wrapped. The
frozen base is whole in each process, or divided over them (`peftkit.base.divided`).
"""

import os
from collections.abc import Iterable, Sequence
from dataclasses import fields, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from peftkit.data import IGNORED, Batch
from peftkit.errors import InputError

_SHARDING = {
    "ACCELERATE_USE_FSDP": "FSDP",
    "ACCELERATE_USE_DEEPSPEED": "DeepSpeed",
    "ACCELERATE_USE_MEGATRON_LM": "Megatron-LM",
}
"""What `accelerate launch` sets for its ways to divide a model among processes."""


def check_launch() -> None:
    """Raises InputError where `accelerate launch` was told to divide the model among processes.

    Its other settings, a precision or a number of accumulated steps, change nothing: the recipe has its own.
    """
    for variable, name in _SHARDING.items():
        if os.environ.get(variable, "").lower() in ("1", "true"):
            raise InputError(
                f"accelerate was told to use {name}, but wraps no model here: launch with --multi_gpu, and without a "
                "config file that says otherwise (--config_file); train.shard_base divides the frozen base"
            )


def leave() -> None:
    """Ends what processes of one run talk over: left to the interpreter's end, its threads may abort the process."""
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


def share(batches: Sequence[Batch], index: int, count: int) -> list[Batch]:
    """The micro-batches that process `index` of `count` takes: whole ones, or rows of them where there are fewer."""
    parts = -(-count // len(batches))
    pieces = [piece for batch in batches for piece in _split(batch, parts)]
    return list(pieces[index::count])


def one_row(batch: Batch) -> Batch:
    """A micro-batch's first row."""
    return _rows(batch, slice(1))


def add_up_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Replaces each process's gradients by their sum over all processes, the same bits in each."""
    if not _several():
        return
    parameters = list(parameters)
    for parameter in parameters:
        if parameter.grad is None:  # this process had no rows
            parameter.grad = torch.zeros_like(parameter)
    grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
    flat = torch.cat([grad.flatten() for grad in grads])
    dist.all_reduce(flat)
    for grad, summed in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
        grad.copy_(summed.view_as(grad))


def add_up(value: float, device: torch.device) -> float:
    """Sum of a number over all processes."""
    if not _several():
        return value
    total = torch.tensor(value, dtype=torch.float64, device=device)
    dist.all_reduce(total)
    return total.item()


def gather(value: Any) -> list[Any]:
    """A value of each process, in their order."""
    if not _several():
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def is_main_process() -> bool:
    """Whether this is the one process that writes and prints."""
    return not _several() or dist.get_rank() == 0


def _several() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def _split(batch: Batch, parts: int) -> list[Batch]:
    if parts == 1:
        return [batch]
    rows = len(batch.input_ids_BT)
    return [_rows(batch, slice(part, rows, parts)) for part in range(min(parts, rows))]


def _rows(batch: Batch, chosen: slice) -> Batch:
    tensors = {
        each.name: value[chosen] for each in fields(batch) if isinstance(value := getattr(batch, each.name), Tensor)
    }
    return replace(
        batch,
        **tensors,
        num_tokens=int((tensors["attention_mask_BT"] != 0).sum()),
        num_target_tokens=int((tensors["labels_BT"] != IGNORED).sum()),
    )
