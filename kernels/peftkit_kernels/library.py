"""The operations as `torch.ops.peftkit.*`: opaque to torch.compile, with shapes, dtypes and written tensors known.

Only traced code takes this road; an eager call never does, because torch's dispatcher costs more than a small
operation's checks. An operation that returns a tensor it has written to returns nothing here, since torch's functional
graphs know no result that is an argument; `traced` gives that tensor back.
"""

import inspect
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, TypeVar, cast, get_type_hints

import torch
from torch import Tensor
from torch.library import Library

C = TypeVar("C", bound=Callable[..., Any])

_LIBRARY = Library("peftkit", "DEF")

_WRITTEN: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "rope_write_kv": ("kv_PZ2KD",),
        "grouped_lora": ("y_TO",),
        "grouped_bottleneck": ("y_TH",),
        "copy_pages": ("kv_PZ2KD",),
        "rotate_": ("q_NQD", "k_NKD"),
        "gated_backward_": ("gate_NF", "up_NF"),
        "cross_entropy_grad": ("logits_NV",),
    }
)
"""Operation → the arguments that it writes to."""

_RETURNS_WRITTEN = frozenset({"grouped_lora", "grouped_bottleneck", "copy_pages"})
"""Operations that return such an argument, their first."""

_TYPES: Mapping[Any, str] = MappingProxyType(
    {
        Tensor: "Tensor",
        Tensor | None: "Tensor?",
        bool: "bool",
        int: "SymInt",
        int | None: "SymInt?",
        float: "float",
        str: "str",
        torch.dtype: "ScalarType",
        tuple[int, ...]: "SymInt[]",
        tuple[Tensor, ...]: "Tensor[]",
        tuple[int, int]: "SymInt[]",
        tuple[Tensor, Tensor]: "(Tensor, Tensor)",
        tuple[Tensor, Tensor, Tensor]: "(Tensor, Tensor, Tensor)",
        type(None): "()",
    }
)


def _rope_write_kv(qkv_TCD: Tensor, *rest: Tensor) -> Tensor:
    num_rows, num_heads, head_size = qkv_TCD.shape
    return qkv_TCD.new_empty(num_rows, num_heads - 2 * rest[-1].shape[3], head_size)


def _gated(x_TO: Tensor, **_: Any) -> Tensor:
    return x_TO.new_empty(x_TO.shape[0], x_TO.shape[1] // 2)


def _row_of(x_NH: Tensor) -> Tensor:
    """A number of float32 or wider for each row."""
    return x_NH.new_empty(x_NH.shape[:-1], dtype=torch.promote_types(x_NH.dtype, torch.float32))


_FAKES: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {
        "embedding": lambda token_T, weight_VH: weight_VH.new_empty(token_T.shape[0], weight_VH.shape[1]),
        "linear": lambda x_TI, weight_OI, *_, **__: x_TI.new_empty(x_TI.shape[0], weight_OI.shape[0]),
        "rms_norm": lambda x_TH, *_: (x_TH.new_empty(x_TH.shape), x_TH.new_empty(x_TH.shape)),
        "rope_write_kv": _rope_write_kv,
        "paged_attention": lambda q_TQD, *_, **__: q_TQD.new_empty(q_TQD.shape),
        "silu_and_mul": _gated,
        "gelu_tanh_and_mul": _gated,
        "grouped_lora": lambda *_, **__: None,
        "grouped_bottleneck": lambda *_, **__: None,
        "copy_pages": lambda *_: None,
        "nf4_dequantize": lambda code_X, *rest: code_X.new_empty(rest[-2], dtype=rest[-1]),
        "nf4_dequantize_joined": lambda codes, *rest: codes[0].new_empty((sum(rest[4]), rest[5]), dtype=rest[6]),
        "nf4_linear": lambda x_TI, *rest, **__: x_TI.new_empty(x_TI.shape[0], rest[5]),
        "sample": lambda logits_NV, *_: logits_NV.new_empty(logits_NV.shape[0], dtype=torch.int64),
        "seeded_dropout": lambda x_NI, *_: x_NI.new_empty(x_NI.shape),
        "rms_norm_forward": lambda x_NH, *_, **__: (x_NH.new_empty(x_NH.shape), _row_of(x_NH)),
        "add_rms_norm_forward": lambda x_NH, *_, **__: (
            x_NH.new_empty(x_NH.shape),
            x_NH.new_empty(x_NH.shape),
            _row_of(x_NH),
        ),
        "rms_norm_backward": lambda dy_NH, *_, **__: dy_NH.new_empty(dy_NH.shape),
        "rotate": lambda q_NQD, k_NKD, *_, **__: (q_NQD.new_empty(q_NQD.shape), k_NKD.new_empty(k_NKD.shape)),
        "rotate_": lambda *_, **__: None,
        "rotate_back": lambda dq_NQD, dk_NKD, *_, **__: dq_NQD.new_empty(
            dq_NQD.shape[0], dq_NQD.shape[1] + 2 * dk_NKD.shape[1], dq_NQD.shape[2]
        ),
        "gated": lambda gate_NF, *_, **__: gate_NF.new_empty(gate_NF.shape),
        "gated_backward": lambda _, gate_NF, up_NF, *__, **___: (
            gate_NF.new_empty(gate_NF.shape),
            up_NF.new_empty(up_NF.shape),
        ),
        "gated_backward_": lambda *_, **__: None,
        "cross_entropy": lambda logits_NV, *_, **__: _row_of(logits_NV),
        "cross_entropy_grad": lambda logits_NV, *_, **__: _row_of(logits_NV),
    }
)
"""Operation → fresh results of the right shape and dtype, from its arguments."""


def traced(operation: C, check: Callable[..., None]) -> C:
    """Registers an operation by its name and returns what traced code is to call in its place.

    `check` raises ValueError when a graph is made, `operation` when it runs.
    """
    name = operation.__name__
    written = _WRITTEN[name][0] if name in _RETURNS_WRITTEN else None

    def run(*args: Any, **kwargs: Any) -> Any:
        result = operation(*(tuple(value) if isinstance(value, list) else value for value in args), **kwargs)
        if isinstance(result, tuple):
            return tuple(_own(tensor, args) for tensor in result)
        return None if written or result is None else _own(result, args)

    def fake(*args: Any, **kwargs: Any) -> Any:
        check(*args, **kwargs)
        return _FAKES[name](*args, **kwargs)

    _LIBRARY.define(name + _schema(operation))
    _LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"peftkit::{name}", fake, lib=_LIBRARY)
    registered = getattr(torch.ops.peftkit, name).default

    def call(*args: Any, **kwargs: Any) -> Any:
        result = registered(*args, **kwargs)
        if written is None:
            return result
        return args[0] if args else kwargs[written]

    return cast(C, call)


def _own(result: Tensor, args: tuple[Any, ...]) -> Tensor:
    """A contiguous tensor, as the fake one is, and none of the arguments."""
    return result.clone() if any(result is value for value in args) else result.contiguous()


def _schema(operation: Callable[..., Any]) -> str:
    """The signature in torch's notation."""
    name, hints, parts = operation.__name__, get_type_hints(operation), list[str]()
    for parameter in inspect.signature(operation).parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and "*" not in parts:
            parts.append("*")
        written = _WRITTEN.get(name, ())
        alias = f"Tensor({'ab'[written.index(parameter.name)]}!)" if parameter.name in written else None
        kind = alias or _TYPES[hints[parameter.name]]
        default = "" if parameter.default is parameter.empty else f"={parameter.default}"
        parts.append(f"{kind} {parameter.name}{default}")
    returned = "()" if name in _RETURNS_WRITTEN else _TYPES[hints["return"]]
    return f"({', '.join(parts)}) -> {returned}"
