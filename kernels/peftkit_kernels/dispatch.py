"""Which implementation of an operation runs: Triton where one is registered for the device, else the reference.

An operation is registered by a row in `TRITON`: its name and the module of this package that has a function of the
same name and signature. The module is imported when the operation first meets such a device, so importing the package
never imports triton. The environment variable `PEFTKIT_KERNELS=reference` takes the reference everywhere.
"""

import functools
import importlib
import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from types import MappingProxyType
from typing import Any, ParamSpec, TypeVar, cast

import torch
from torch import Tensor
from torch._C import _len_torch_dispatch_stack
from torch.compiler import is_compiling

from peftkit_kernels.library import traced

P = ParamSpec("P")
R = TypeVar("R")

TRITON: Mapping[str, str] = MappingProxyType(
    {
        "copy_pages": "triton.pages",
        "embedding": "triton.embedding",
        "gelu_tanh_and_mul": "triton.activation",
        "grouped_bottleneck": "triton.bottleneck",
        "grouped_lora": "triton.lora",
        "linear": "triton.linear",
        "nf4_dequantize": "triton.nf4_dequantize",
        "nf4_dequantize_joined": "triton.training_weights",
        "nf4_linear": "triton.nf4",
        "rms_norm": "triton.norm",
        "sample": "triton.sampling",
        "seeded_dropout": "triton.dropout",
        "silu_and_mul": "triton.activation",
        "paged_attention": "triton.attention",
        "rope_write_kv": "triton.rope",
        "rms_norm_forward": "triton.training_norm",
        "add_rms_norm_forward": "triton.training_norm",
        "rms_norm_backward": "triton.training_norm",
        "rotate": "triton.training_rope",
        "rotate_": "triton.training_rope",
        "rotate_back": "triton.training_rope",
        "gated": "triton.training_gate",
        "gated_backward": "triton.training_gate",
        "gated_backward_": "triton.training_gate",
        "cross_entropy": "triton.training_loss",
        "cross_entropy_grad": "triton.training_loss",
    }
)
"""Operation → module that has its Triton kernel."""

_DEVICES = frozenset({"cuda"})  # where Triton kernels run

_UNCHECKED: dict[Callable[..., Any], Callable[..., Any]] = {}


def dispatched(check: Callable[P, None]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Makes a reference a public operation: checks its arguments, then runs what the first one's device has.

    The first argument is a tensor or begins with one; of float64, which only training's operations take, it is the
    reference's. Traced code, and a kernel under a mode that watches operations (FakeTensorMode, selective
    checkpointing), calls `torch.ops.peftkit` instead, which comes back here when it runs.
    """

    def decorate(reference: Callable[P, R]) -> Callable[P, R]:
        name = reference.__name__

        @functools.wraps(reference)
        def operation(*args: P.args, **kwargs: P.kwargs) -> R:
            if is_compiling():
                return in_graph(*args, **kwargs)
            check(*args, **kwargs)
            return run(*args, **kwargs)

        def run(*args: P.args, **kwargs: P.kwargs) -> R:
            if is_compiling():
                return in_graph(*args, **kwargs)
            first = args[0] if args else next(iter(kwargs.values()))
            if isinstance(first, tuple):
                first = first[0]
            assert isinstance(first, Tensor)
            kernel = _triton(name, first.device.type)
            if kernel is None or first.dtype == torch.float64:
                return reference(*args, **kwargs)
            return in_graph(*args, **kwargs) if _len_torch_dispatch_stack() else kernel(*args, **kwargs)

        in_graph = traced(operation, check)
        _UNCHECKED[operation] = run
        return operation

    return decorate


def unchecked(operation: Callable[P, R]) -> Callable[P, R]:
    """A dispatched operation that takes its arguments for right: those that a check has seen before, and gradients,
    which autograd has held against what they are of."""
    return cast(Callable[P, R], _UNCHECKED[operation])


def compiled_together(device: torch.device) -> AbstractContextManager[None]:
    """Inside, a Triton kernel that isn't compiled yet is compiled beside others instead of being run: what an operation
    on the device returns is uninitialised. Where operations are plain PyTorch, they run."""
    if not _has_triton(device.type):
        return nullcontext()
    return importlib.import_module("peftkit_kernels.triton.together").compiled_together()


@functools.cache
def _triton(name: str, device_type: str) -> Callable[..., Any] | None:
    """The operation's Triton implementation for a kind of device, if it is to be used."""
    if not _has_triton(device_type) or name not in TRITON:
        return None
    return getattr(importlib.import_module(f"peftkit_kernels.{TRITON[name]}"), name)


def _has_triton(device_type: str) -> bool:
    choice = os.environ.get("PEFTKIT_KERNELS", "auto")
    if choice not in ("auto", "reference"):
        raise ValueError(f"PEFTKIT_KERNELS={choice}: it must be auto or reference")
    return choice != "reference" and device_type in _DEVICES
