"""A base's weights, straight from its safetensors: fused for the decoder, in NF4 if asked for, packed for the device.

The query, key and value projections become one matrix, and so do gate and up, so that a layer has four products.
In NF4 each keeps codes and scales of its own: on a GPU these are all that is held, and products decode them.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, fields
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, Self

import torch
from safetensors import safe_open
from torch import Tensor

from peftkit.base import Quant
from peftkit.base.folder import weight_files
from peftkit.errors import BaseModelError, did_you_mean
from peftkit_kernels import linear, nf4_dequantize, nf4_linear, pack_linear
from peftkit_serve.models.spec import HEAD, PROJECTIONS, ModelSpec

if TYPE_CHECKING:
    from bitsandbytes.functional import QuantState

_BLOCK, _NESTED_BLOCK = 64, 256  # weights that share a scale, and scales that share one


@dataclass(frozen=True, slots=True)
class Nf4Weight:
    """A linear layer's weight as bitsandbytes quantises it; see `peftkit_kernels.nf4_dequantize`."""

    code_X: Tensor
    absmax_B: Tensor
    absmax_code: Tensor
    absmax_scale: Tensor
    absmax_offset: Tensor

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """In the argument order of `nf4_linear` and `nf4_dequantize`."""
        return self.code_X, self.absmax_B, self.absmax_code, self.absmax_scale, self.absmax_offset

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales."""
        return sum(_nbytes(tensor) for tensor in self.tensors)


@dataclass(frozen=True, slots=True)
class Nf4Matrix:
    """The weights of linear layers that share an input, in NF4, side by side."""

    parts: tuple[Nf4Weight, ...]
    out_features: tuple[int, ...]
    in_features: int
    joined: Nf4Weight | None = None
    """The parts below one another, of which they then are views: one product for all; None where scales forbid it."""


Matrix = Tensor | Nf4Matrix
"""Weights of linear layers that share an input: as `pack_linear` returns it, or in NF4."""


def product(x_TI: Tensor, matrix: Matrix, bias_O: Tensor | None, *, deterministic: bool) -> Tensor:
    """y[t] = weight @ x[t] + bias. Returns y_TO."""
    if isinstance(matrix, Tensor):
        return linear(x_TI, matrix, bias_O, deterministic=deterministic)
    if matrix.joined is not None:
        out_features = sum(matrix.out_features)
        return nf4_linear(x_TI, *matrix.joined.tensors, out_features, bias_O, deterministic=deterministic)
    biases = [None] * len(matrix.parts) if bias_O is None else bias_O.split(matrix.out_features)
    y = [
        nf4_linear(x_TI, *part.tensors, out, bias, deterministic=deterministic)
        for part, out, bias in zip(matrix.parts, matrix.out_features, biases, strict=True)
    ]
    return torch.cat(y, dim=1)


def join_nf4(parts: tuple[Nf4Weight, ...]) -> tuple[tuple[Nf4Weight, ...], Nf4Weight | None]:
    """Weights of as many inputs as views of one that has them below one another, and that one.

    Its nested scales are those of the parts, each with the offset of its part: `nf4_linear` takes both. None for it,
    and the parts as they are, where a part ends within a nested scale or has other steps of scales than the first.
    """
    if len(parts) == 1:
        return parts, parts[0]
    first, *others = parts
    whole = all(2 * part.code_X.numel() % (_BLOCK * _NESTED_BLOCK) == 0 for part in parts)
    if not whole or not all(torch.equal(part.absmax_code, first.absmax_code) for part in others):
        return parts, None
    code_X, absmax_B, absmax_scale = (
        torch.cat([getattr(part, name) for part in parts]) for name in ("code_X", "absmax_B", "absmax_scale")
    )
    offsets = torch.cat([part.absmax_offset.expand(part.absmax_scale.shape) for part in parts])
    blocks = [part.absmax_B.numel() for part in parts]
    views = zip(
        code_X.split([_BLOCK // 2 * count for count in blocks]),
        absmax_B.split(blocks),
        absmax_scale.split([count // _NESTED_BLOCK for count in blocks]),
        parts,
        strict=True,
    )
    held = [Nf4Weight(code, absmax, part.absmax_code, scale, part.absmax_offset) for code, absmax, scale, part in views]
    return tuple(held), Nf4Weight(code_X, absmax_B, first.absmax_code, absmax_scale, offsets)


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One decoder layer. A bias is None where the family has none."""

    input_norm_H: Tensor
    post_norm_H: Tensor
    qkv_OI: Matrix
    o_OI: Matrix
    gate_up_OI: Matrix
    down_OI: Matrix
    qkv_bias_O: Tensor | None
    o_bias_O: Tensor | None
    gate_up_bias_O: Tensor | None
    down_bias_O: Tensor | None
    q_norm_D: Tensor | None
    k_norm_D: Tensor | None


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """All weights of a base on one device, in one compute dtype."""

    embedding_VH: Tensor
    layers: tuple[LayerWeights, ...]
    norm_H: Tensor
    head_VH: Tensor
    """As `pack_linear` returns it."""
    nf4: Mapping[str, Nf4Weight]
    """Path of each linear layer → its quantised weight; empty for quant "none". On a CPU the layers hold the same
    weights dequantised, so that a step never has to."""

    @property
    def nf4_bytes(self) -> int:
        """Bytes of quantised weights."""
        return sum(weight.nbytes for weight in self.nf4.values())

    @property
    def cached_bytes(self) -> int:
        """Bytes of dequantised copies of quantised weights; 0 for quant "none"."""
        matrices = ("qkv_OI", "o_OI", "gate_up_OI", "down_OI")
        held = [getattr(layer, name) for layer in self.layers for name in matrices] if self.nf4 else []
        return sum(_nbytes(matrix) for matrix in held if isinstance(matrix, Tensor))

    @property
    def nbytes(self) -> int:
        """Bytes of everything that is held."""
        tensors = {id(t): t for t in (self.embedding_VH, self.norm_H, self.head_VH)}
        for layer in self.layers:
            tensors |= {id(t): t for field in fields(layer) if isinstance(t := getattr(layer, field.name), Tensor)}
        return self.nf4_bytes + sum(_nbytes(tensor) for tensor in tensors.values())


class TensorSource(Protocol):
    """Where a base's tensors come from, by the names that safetensors files give them."""

    def take(self, name: str, *shape: int) -> Tensor:
        """A tensor of the given shape, on the device and in the compute dtype."""
        ...

    def __contains__(self, name: str) -> bool: ...

    def check_all_taken(self) -> None:
        """Raises BaseModelError when there are tensors that nobody took."""
        ...


OpenSource = Callable[[torch.dtype, torch.device], AbstractContextManager[TensorSource]]


def load_weights(
    path: Path,
    spec: ModelSpec,
    *,
    quant: Quant = "none",
    dtype: torch.dtype,
    device: torch.device,
    cached: bool | None = None,
    source: OpenSource | None = None,
) -> ModelWeights:
    """Reads the weights of the base in a HF folder.

    quant: "nf4" quantises every linear layer but the output embedding, as bitsandbytes does for a model loaded in
    `dtype`; a folder that holds NF4 weights keeps them as they are. dtype: compute dtype. cached: hold NF4 weights
    dequantised too; None does so on a CPU, where decoding costs more than a product. source: tensors from elsewhere
    than the folder. Tensors come one at a time, so that no more than a layer's is ever held twice. Raises
    BaseModelError that names a tensor which is missing, of the wrong shape, or belongs to no layer.
    """
    nf4: dict[str, Nf4Weight] = {}
    cached = device.type == "cpu" if cached is None else cached
    with _Reader(path, dtype, device) if source is None else source(dtype, device) as reader:
        embedding_VH = reader.take("model.embed_tokens.weight", spec.vocab_size, spec.hidden_size)
        quantised = _quantised(reader, spec, quant, cached)
        layers = tuple(_layer(reader, spec, index, quantised, nf4, cached) for index in range(spec.num_layers))
        norm_H = reader.take("model.norm.weight", spec.hidden_size)
        head_VH = _head(reader, spec, embedding_VH)
        reader.check_all_taken()
    return ModelWeights(embedding_VH, layers, norm_H, pack_linear(head_VH), nf4)


def base_linear(weights: ModelWeights, spec: ModelSpec, path: str) -> tuple[Tensor, Tensor | None]:
    """The plain weight (out, in) and the bias (out) of a linear module, as the decoder multiplies by them."""
    if path == HEAD:
        return _plain(weights.head_VH), None
    _, _, layer, name = path.split(".", 3)
    one, projection = weights.layers[int(layer)], PROJECTIONS.index(name)
    fused = (
        (one.qkv_OI, one.qkv_bias_O, 0),
        (one.o_OI, one.o_bias_O, 3),
        (one.gate_up_OI, one.gate_up_bias_O, 4),
        (one.down_OI, one.down_bias_O, 6),
    )
    weight_OI, bias_O, first = next(part for part in reversed(fused) if part[2] <= projection)
    start = sum(out for out, _ in spec.projection_shapes[first:projection])
    rows = slice(start, start + spec.projection_shapes[projection][0])
    bias = None if bias_O is None else bias_O[rows]
    if isinstance(weight_OI, Tensor):
        return _plain(weight_OI)[rows], bias
    part = weight_OI.parts[projection - first]
    return nf4_dequantize(*part.tensors, spec.projection_shapes[projection], weights.norm_H.dtype), bias


class _Reader:
    """The tensors of a folder by name; knows which were taken."""

    def __init__(self, path: Path, dtype: torch.dtype, device: torch.device) -> None:
        self._path, self._dtype, self._device = path, dtype, device
        self._files = ExitStack()
        self._file_of: dict[str, Any] = {}
        self._taken: set[str] = set()

    def __enter__(self) -> Self:
        for file in weight_files(self._path):
            opened = self._files.enter_context(safe_open(file, framework="pt"))
            self._file_of |= dict.fromkeys(opened.keys(), opened)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._files.close()

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    def take(self, name: str, *shape: int) -> Tensor:
        """A tensor of the given shape, copied to the reader's device and dtype."""
        return self._stored(name, shape).to(self._device, self._dtype, copy=True)

    def take_nf4(self, name: str, shape: tuple[int, int]) -> tuple[Tensor, "QuantState"]:
        """A weight of the given shape that bitsandbytes has stored in NF4: its codes and its scales."""
        from bitsandbytes.functional import QuantState

        scales = {key for key in self._file_of if key.startswith(f"{name}.")}
        if name in self._file_of and not scales:
            raise BaseModelError(f"{self._path}: tensor {name} is not in NF4, though config.json says so of the base")
        out_features, in_features = shape
        codes = self._stored(name, (out_features * in_features // 2, 1)).to(self._device)
        self._taken |= scales
        parts = {key.removeprefix(f"{name}."): self._file_of[key].get_tensor(key) for key in scales}
        try:
            state = QuantState.from_dict(parts, self._device)
        except (KeyError, ValueError, TypeError, AssertionError) as error:
            raise BaseModelError(f"{self._path}: the scales of tensor {name} can't be read ({error})") from error
        nested = state.state2
        fits = state.quant_type == "nf4" and tuple(state.shape or ()) == shape and state.blocksize == _BLOCK
        if not fits or nested is None or nested.blocksize != _NESTED_BLOCK:
            raise BaseModelError(
                f"{self._path}: tensor {name} is {state.quant_type} {list(state.shape or ())} in blocks of "
                f"{state.blocksize}; NF4 {list(shape)} in blocks of {_BLOCK}, scales in blocks of {_NESTED_BLOCK}, "
                "can be served"
            )
        state.dtype = self._dtype
        return codes, state

    def _stored(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """A tensor of the given shape as the file has it."""
        if name not in self._file_of:
            raise BaseModelError(f"{self._path}: tensor {name} is missing{did_you_mean(name, self._file_of)}")
        self._taken.add(name)
        tensor: Tensor = self._file_of[name].get_tensor(name)
        if tuple(tensor.shape) != shape:
            raise BaseModelError(
                f"{self._path}: tensor {name} has shape {list(tensor.shape)}, config.json makes it {list(shape)}"
            )
        return tensor

    def check_all_taken(self) -> None:
        # older checkpoints carry RoPE's frequencies, which config.json fixes
        left = sorted(name for name in set(self._file_of) - self._taken if not name.endswith("rotary_emb.inv_freq"))
        if left:
            raise BaseModelError(f"{self._path}: {len(left)} tensors belong to no layer, the first is {left[0]}")


_Quantised = Callable[[str, tuple[int, int]], tuple[Nf4Weight, Tensor]]
"""Path and shape of a linear layer → its weight in NF4, and dequantised if that is to be held too, else empty."""


def _quantised(reader: TensorSource, spec: ModelSpec, quant: Quant, cached: bool) -> _Quantised | None:
    """How linear layers come in NF4: as the folder holds them, or quantised on the way; None for full precision."""
    if spec.holds_nf4:
        assert isinstance(reader, _Reader), "only a folder holds NF4 weights"
        return lambda path, shape: _held(reader.take_nf4(f"{path}.weight", shape), cached=cached)
    if quant == "nf4":
        return lambda path, shape: _held(_quantize(reader.take(f"{path}.weight", *shape)), cached=cached)
    return None


def _layer(
    reader: TensorSource,
    spec: ModelSpec,
    index: int,
    quantised: _Quantised | None,
    nf4: dict[str, Nf4Weight],
    cached: bool,
) -> LayerWeights:
    prefix = f"model.layers.{index}"
    shapes: dict[str, tuple[int, int]] = dict(zip(PROJECTIONS, spec.projection_shapes, strict=True))

    def matrix(*projections: str) -> Matrix:
        parts: list[Tensor] = []
        for projection in projections:
            path = f"{prefix}.{projection}"
            if quantised is None:
                parts.append(reader.take(f"{path}.weight", *shapes[projection]))
            else:
                nf4[path], part = quantised(path, shapes[projection])
                parts.append(part)
        if quantised is not None and not cached:
            out_features = tuple(shapes[projection][0] for projection in projections)
            paths = [f"{prefix}.{projection}" for projection in projections]
            held, joined = join_nf4(tuple(nf4[path] for path in paths))
            nf4.update(zip(paths, held, strict=True))
            return Nf4Matrix(held, out_features, shapes[projections[0]][1], joined)
        return pack_linear(parts[0] if len(parts) == 1 else torch.cat(parts))

    def bias(present: bool, *projections: str) -> Tensor | None:
        if not present:
            return None
        return torch.cat([reader.take(f"{prefix}.{name}.bias", shapes[name][0]) for name in projections])

    def head_norm(name: str) -> Tensor | None:
        return reader.take(f"{prefix}.self_attn.{name}.weight", spec.head_dim) if spec.qk_norm else None

    q, k, v, o, gate, up, down = PROJECTIONS
    return LayerWeights(
        input_norm_H=reader.take(f"{prefix}.input_layernorm.weight", spec.hidden_size),
        post_norm_H=reader.take(f"{prefix}.post_attention_layernorm.weight", spec.hidden_size),
        qkv_OI=matrix(q, k, v),
        o_OI=matrix(o),
        gate_up_OI=matrix(gate, up),
        down_OI=matrix(down),
        qkv_bias_O=bias(spec.qkv_bias, q, k, v),
        o_bias_O=bias(spec.o_bias, o),
        gate_up_bias_O=bias(spec.mlp_bias, gate, up),
        down_bias_O=bias(spec.mlp_bias, down),
        q_norm_D=head_norm("q_norm"),
        k_norm_D=head_norm("k_norm"),
    )


def _head(reader: TensorSource, spec: ModelSpec, embedding_VH: Tensor) -> Tensor:
    """The output embedding: the file's own where it has one, else the tied input embedding."""
    if spec.tied_embeddings and "lm_head.weight" not in reader:
        return embedding_VH
    head_VH = reader.take("lm_head.weight", spec.vocab_size, spec.hidden_size)
    return embedding_VH if torch.equal(head_VH, embedding_VH) else head_VH


def _quantize(weight_OI: Tensor) -> tuple[Tensor, "QuantState"]:
    """Codes and scales as bitsandbytes makes them."""
    from bitsandbytes.functional import quantize_4bit  # slow to import, and only NF4 bases need it

    return quantize_4bit(weight_OI, blocksize=_BLOCK, compress_statistics=True, quant_type="nf4")


def _held(quantised: tuple[Tensor, "QuantState"], *, cached: bool) -> tuple[Nf4Weight, Tensor]:
    """The weight in NF4, and if it is to be cached the weight that bitsandbytes makes of it, bit for bit."""
    from bitsandbytes.functional import dequantize_4bit

    codes, state = quantised
    nested, offset = state.state2, state.offset
    assert nested is not None and offset is not None, "double quantisation was asked for"
    weight = Nf4Weight(codes.flatten(), state.absmax, nested.code, nested.absmax, offset)
    return weight, dequantize_4bit(codes, state) if cached else torch.empty(0)


def _plain(weight_OI: Tensor) -> Tensor:
    """The inverse of `pack_linear`."""
    return weight_OI.to_dense() if weight_OI.is_mkldnn else weight_OI


def _nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.dtype.itemsize
