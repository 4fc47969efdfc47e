"""Adapters as the device's memory holds them: each layer's matrices one behind the other, at their true sizes.

    LoRA         | A q | A k | … | A down | B q | B k | … | B down | DoRA's scales q | …         A (r, in), B (r, out)
    bottleneck   | down | up | up's bias | norm | down's bias |  of the attention, then of the feed-forward
    both ends    | A, B of the output embedding | A, B of the input embedding | rows in the place of the base's |

B and the up-projection are transposed, rows contiguous. A span says where in its layer a projection's LoRA or a
sub-layer's bottleneck begins, and how large it is; one of rank or width 0 is not there. The two ends of the decoder
count as one more layer, behind the others.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from peftkit.errors import AdapterError, UnsupportedError
from peftkit.methods import BottleneckConfig
from peftkit.methods.bottleneck import PREFIX as LAYERS_PREFIX
from peftkit.methods.lora import PREFIX, LoraSite
from peftkit.methods.lora_layers import SMALLEST_NORM, LoraEmbedding, TokenRows
from peftkit_kernels import BOTTLENECK_INPUTS, NON_LINEARITIES
from peftkit_serve.models.spec import EMBEDDING, HEAD, PROJECTIONS, ModelSpec

UNIT_BYTES = 64 * 1024
"""Extents are whole units."""

SUB_LAYERS = ("attn_adapter", "mlp_adapter")
"""Where bottleneck adapters stand, in the order of every table over sub-layers."""

BaseLinear = Callable[[str], tuple[Tensor, Tensor | None]]
"""Path of a linear module → the base's weight (out, in) and bias (out)."""

ENDS = (HEAD, EMBEDDING)
"""The ends of the decoder, in the order of their spans in the last layer."""

_FEED_FORWARD = slice(4, 7)  # of `PROJECTIONS`: gate, up, down
_ALIGN_BYTES = 64  # every matrix starts on a cache line
_SITE = re.compile(rf"model\.layers\.(\d+)\.({'|'.join(re.escape(name) for name in PROJECTIONS)})")
_SOURCES = {"houlsby": "output", "pfeiffer": "sum", "parallel": "residual"}


class LoraSpan(NamedTuple):
    """A projection's LoRA in its layer; offsets in elements. The fields are those of `LoraTables`, in their order."""

    offset_a: int = 0
    offset_b: int = 0
    rank: int = 0
    scale: float = 0.0
    offset_c: int = -1
    """DoRA's scale less one (out), then what it or a LoRA's bias adds (out); -1 where there is none."""


class BottleneckSpan(NamedTuple):
    """A sub-layer's bottleneck in its layer. The fields are those of `BottleneckTables`, in their order."""

    offset: int = 0
    width: int = 0
    scale: float = 0.0
    form: tuple[int, int, int] = (0, 0, 0)
    """Input, non-linearity and layer norm, as `grouped_bottleneck` numbers them."""


class RowsSpan(NamedTuple):
    """Rows of an embedding that an adapter has in the place of the base's; without rows it is not there."""

    offset: int = 0
    num_rows: int = 0
    token_ids: Tensor | None = None
    """int64 (num_rows); None where the rows are those of the whole vocabulary."""


@dataclass(frozen=True, slots=True, eq=False)
class PackedLayer:
    """One layer of an adapter as it lies in an extent."""

    weights: Tensor
    lora: tuple[LoraSpan, ...] = (LoraSpan(),) * len(PROJECTIONS)
    """By projection; in the last layer the first two are those of `ENDS`. The embedding's A is transposed, B is not."""
    bottleneck: tuple[BottleneckSpan, ...] = (BottleneckSpan(),) * len(SUB_LAYERS)
    rows: tuple[RowsSpan, ...] = (RowsSpan(),) * len(ENDS)
    """By `ENDS`; only in the last layer."""

    num_units: int = field(init=False)
    """Length of its extent."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_units", -(-self.weights.nbytes // UNIT_BYTES))

    def pinned(self) -> "PackedLayer":
        """The same in pinned memory."""
        rows = (
            span if span.token_ids is None else span._replace(token_ids=span.token_ids.pin_memory())
            for span in self.rows
        )
        return replace(self, weights=self.weights.pin_memory(), rows=tuple(rows))


class Columns(NamedTuple):
    """What a slot's tables say of an adapter, by layer, while each of its layers begins at 0."""

    lora: tuple[NDArray[Any], ...]
    """(layers, projections) for each field of `LoraSpan`, in their order."""
    bottleneck: tuple[NDArray[Any], ...]
    """(layers, sub-layers) for each field of `BottleneckSpan`, the last with three entries a sub-layer."""

    def moved(self, start_L: NDArray[np.int64]) -> "Columns":
        """The same for layers that begin at `start_L`."""
        start_L1 = start_L[:, None]
        a, b, rank, scale, c = self.lora
        offset, *form = self.bottleneck
        moved_c = np.where(c < 0, c, c + start_L1)
        return Columns((a + start_L1, b + start_L1, rank, scale, moved_c), (offset + start_L1, *form))


@dataclass(frozen=True, slots=True, eq=False)
class PackedAdapter:
    """A LoRA or bottleneck adapter on the host, ready to be copied into `AdapterMemory`."""

    layers: tuple[PackedLayer, ...]
    """The decoder's, and one for its two ends."""
    columns: Columns = field(init=False)
    """Made where the adapter is, off the thread that steps."""
    nbytes: int = field(init=False)
    """Bytes that it takes in `AdapterMemory`."""

    def __post_init__(self) -> None:
        lora = tuple(zip(*(span for layer in self.layers for span in layer.lora), strict=True))
        bottleneck = tuple(zip(*(span for layer in self.layers for span in layer.bottleneck), strict=True))
        num_layers = len(self.layers)

        def arrays(fields: tuple[tuple[Any, ...], ...]) -> tuple[NDArray[Any], ...]:
            columns = (np.array(values) for values in fields)
            return tuple(one.reshape(num_layers, -1, *one.shape[1:]) for one in columns)

        object.__setattr__(self, "columns", Columns(arrays(lora), arrays(bottleneck)))
        object.__setattr__(self, "nbytes", UNIT_BYTES * sum(layer.num_units for layer in self.layers))

    def pinned(self) -> "PackedAdapter":
        """The same in pinned memory, from which a GPU copies while the host goes on."""
        return PackedAdapter(tuple(layer.pinned() for layer in self.layers))

    @property
    def has_feed_forward_lora(self) -> bool:
        """Whether gate, up or down of any layer has a LoRA."""
        return any(span.rank for layer in self.layers[:-1] for span in layer.lora[_FEED_FORWARD])

    @property
    def has_bottlenecks(self) -> bool:
        """Whether any sub-layer has a bottleneck."""
        return any(span.width for layer in self.layers for span in layer.bottleneck)

    @property
    def has_head_lora(self) -> bool:
        """Whether the output embedding has a LoRA."""
        return self.layers[-1].lora[0].rank > 0

    @property
    def has_ends(self) -> bool:
        """Whether the input embedding has a LoRA, or either end rows of the adapter's own."""
        last = self.layers[-1]
        return last.lora[1].rank > 0 or any(span.num_rows for span in last.rows)


def pack_lora(
    tensors: Mapping[str, Tensor],
    sites: Mapping[str, LoraSite],
    spec: ModelSpec,
    *,
    base_linear: BaseLinear,
    dtype: torch.dtype = torch.float32,
    token_ids: Mapping[str, Sequence[int]] = MappingProxyType({}),
) -> PackedAdapter:
    """Lays a LoRA's tensors out as `AdapterMemory` holds them.

    tensors: PEFT keys → lora_A (r, in), lora_B (out, r) and its bias (out), for DoRA lora_magnitude_vector (out), and
    at the ends of the decoder also whole matrices and token rows. sites: module path → rank and scale. base_linear:
    what DoRA's scales m / ‖W + sBA‖ are computed from. dtype: that of the memory. token_ids: which tokens an end's
    token rows are for.
    Raises UnsupportedError that names a module which can't have a LoRA or a tensor which nothing is done with,
    AdapterError for a tensor that is missing or of the wrong shape.
    """
    source = _Tensors(tensors, base_linear)
    layers: list[dict[int, _Update]] = [{} for _ in range(spec.num_layers)]
    ends: dict[str, _Update] = {}
    for path, site in sites.items():
        found = _SITE.fullmatch(path)
        if path == EMBEDDING:
            a = source.take(f"{PREFIX}{path}.{LoraEmbedding.NAME_A}", (site.r, spec.vocab_size)).T
            b = source.take(f"{PREFIX}{path}.{LoraEmbedding.NAME_B}", (spec.hidden_size, site.r))
            ends[path] = _Update(a, b, site)
        elif path == HEAD:
            ends[path] = source.update(path, site, (spec.vocab_size, spec.hidden_size))
        elif found is None or int(found[1]) >= spec.num_layers:
            raise UnsupportedError(f"LoRA on {path} can't be served: {', '.join((*PROJECTIONS, *ENDS))} can")
        else:
            projection = PROJECTIONS.index(found[2])
            layers[int(found[1])][projection] = source.update(path, site, spec.projection_shapes[projection])
    rows = {path: found for path in ENDS if (found := source.rows(path, spec, token_ids.get(path, ()))) is not None}
    if spec.tied_embeddings and HEAD not in rows and EMBEDDING in rows and rows[EMBEDDING].token_ids is not None:
        rows[HEAD] = rows[EMBEDDING]
    if source.left:
        raise UnsupportedError(f"tensor {min(source.left)} can't be served: nothing would be done with it")
    return PackedAdapter((*(_lora_layer(layer, dtype) for layer in layers), _ends_layer(ends, rows, dtype)))


def pack_bottleneck(
    tensors: Mapping[str, Tensor],
    config: BottleneckConfig,
    spec: ModelSpec,
    *,
    dtype: torch.dtype = torch.float32,
) -> PackedAdapter:
    """Lays a bottleneck adapter's tensors, under their keys in its folder, out as `AdapterMemory` holds them.

    Raises AdapterError for a tensor that is missing, of the wrong shape, or belongs to no sub-layer.
    """
    config = config.resolved(spec.hidden_size)
    shapes = config.expected_tensors(spec.num_layers, spec.hidden_size)
    if left := set(tensors) - set(shapes):
        raise AdapterError(f"tensor {min(left)} belongs to no bottleneck of this adapter")
    checked = {name: _tensor(tensors, name, shape) for name, shape in shapes.items()}
    places = set(config.places(spec.num_layers))
    layers: list[PackedLayer] = []
    for layer in range(spec.num_layers):
        extent = _Extent(dtype)
        spans = [
            _bottleneck(extent, checked, f"{layer}.{name}", config) if f"{layer}.{name}" in places else BottleneckSpan()
            for name in SUB_LAYERS
        ]
        layers.append(PackedLayer(extent.weights(), bottleneck=tuple(spans)))
    return PackedAdapter((*layers, PackedLayer(torch.empty(0, dtype=dtype))))


class _Update(NamedTuple):
    """LoRA of one module: A (r, in), B transposed (r, out), and what rescales and then shifts its output (2, out)."""

    a: Tensor
    b: Tensor
    site: LoraSite
    rescaling: Tensor | None = None


class _Rows(NamedTuple):
    """Rows (n, H) in the place of an embedding's."""

    weight: Tensor
    token_ids: Tensor | None


class _Tensors:
    """The tensors of a folder by name; knows which were taken."""

    def __init__(self, tensors: Mapping[str, Tensor], base_linear: BaseLinear) -> None:
        self._tensors, self._base_linear = tensors, base_linear
        self.left = set(tensors)

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """A tensor of the given shape."""
        self.left.discard(name)
        return _tensor(self._tensors, name, shape)

    def update(self, path: str, site: LoraSite, shape: tuple[int, int]) -> _Update:
        """The LoRA of a linear module of shape (out, in)."""
        out_features, in_features = shape
        key = f"{PREFIX}{path}"
        a = self.take(f"{key}.lora_A.weight", (site.r, in_features))
        b = self.take(f"{key}.lora_B.weight", (out_features, site.r))
        if f"{key}.lora_B.bias" in self._tensors:
            bias_O = self.take(f"{key}.lora_B.bias", (out_features,)).float() * site.scale
            return _Update(a, b.T, site, torch.stack((torch.zeros_like(bias_O), bias_O)))
        if f"{key}.lora_magnitude_vector" not in self._tensors:
            return _Update(a, b.T, site)
        magnitude = self.take(f"{key}.lora_magnitude_vector", (out_features,))
        return _Update(a, b.T, site, _rescaling(*self._base_linear(path), a, b, site.scale, magnitude))

    def rows(self, path: str, spec: ModelSpec, token_ids: Sequence[int]) -> _Rows | None:
        """What stands in the place of an end's rows: a whole matrix (modules_to_save), or the rows of some tokens."""
        whole = f"{PREFIX}{path}.weight"
        if whole in self._tensors:
            return _Rows(self.take(whole, (spec.vocab_size, spec.hidden_size)), None)
        if not token_ids:
            return None
        some = f"{PREFIX}{path}.{TokenRows.KEY}"
        return _Rows(self.take(some, (len(token_ids), spec.hidden_size)), torch.tensor(token_ids))


class _Extent:
    """Grows by tensors that each start on a cache line."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._align = _ALIGN_BYTES // dtype.itemsize
        self._parts: list[tuple[int, Tensor]] = []
        self._end = 0

    def add(self, tensor: Tensor) -> int:
        """The tensor's offset."""
        offset = self._end
        self._parts.append((offset, tensor))
        self._end += -(-tensor.numel() // self._align) * self._align
        return offset

    def weights(self) -> Tensor:
        """All of it, flat."""
        flat = torch.zeros(self._end, dtype=self._dtype)
        for offset, tensor in self._parts:
            flat[offset:][: tensor.numel()].view(tensor.shape).copy_(tensor)
        return flat


def _tensor(tensors: Mapping[str, Tensor], name: str, shape: tuple[int, ...]) -> Tensor:
    if name not in tensors:
        raise AdapterError(f"tensor {name} is missing")
    if tuple(tensors[name].shape) != shape:
        raise AdapterError(f"tensor {name} has shape {list(tensors[name].shape)}, the base needs {list(shape)}")
    return tensors[name]


def _rescaling(
    weight_OI: Tensor, bias_O: Tensor | None, a_RI: Tensor, b_OR: Tensor, scale: float, magnitude_O: Tensor
) -> Tensor:
    """DoRA's y ← c · (y - bias) + bias with c = m / ‖W + sBA‖, as rows c - 1 and (1 - c) · bias: float32 (2, out)."""
    a, b, magnitude = (tensor.to(weight_OI.device, torch.float32) for tensor in (a_RI, b_OR, magnitude_O))
    norm_O = torch.linalg.vector_norm(torch.addmm(weight_OI.float(), b, a, alpha=scale), dim=1)
    excess_O = magnitude / norm_O.clamp(min=SMALLEST_NORM) - 1
    return torch.stack((excess_O, torch.zeros_like(excess_O) if bias_O is None else -excess_O * bias_O)).cpu()


def _lora_layer(layer: Mapping[int, _Update], dtype: torch.dtype) -> PackedLayer:
    """layer: projection → its update."""
    extent = _Extent(dtype)
    spans = _add_lora(extent, layer)
    return PackedLayer(extent.weights(), lora=spans)


def _ends_layer(updates: Mapping[str, _Update], rows: Mapping[str, _Rows], dtype: torch.dtype) -> PackedLayer:
    extent = _Extent(dtype)
    lora = _add_lora(extent, {ENDS.index(path): update for path, update in updates.items()})
    spans = [
        RowsSpan(extent.add(rows[path].weight), len(rows[path].weight), rows[path].token_ids)
        if path in rows
        else RowsSpan()
        for path in ENDS
    ]
    return PackedLayer(extent.weights(), lora=lora, rows=tuple(spans))


def _add_lora(extent: _Extent, layer: Mapping[int, _Update]) -> tuple[LoraSpan, ...]:
    offset_a = {p: extent.add(layer[p].a) for p in sorted(layer)}
    offset_b = {p: extent.add(layer[p].b) for p in sorted(layer)}
    offset_c = {p: extent.add(rows) for p in sorted(layer) if (rows := layer[p].rescaling) is not None}
    return tuple(
        LoraSpan(offset_a[p], offset_b[p], layer[p].site.r, layer[p].site.scale, offset_c.get(p, -1))
        if p in layer
        else LoraSpan()
        for p in range(len(PROJECTIONS))
    )


def _bottleneck(extent: _Extent, tensors: Mapping[str, Tensor], place: str, config: BottleneckConfig) -> BottleneckSpan:
    assert config.bottleneck_size is not None and config.non_linearity is not None and config.scaling is not None
    key = f"{LAYERS_PREFIX}{place}."
    parts = [tensors[f"{key}down.weight"], tensors[f"{key}up.weight"].T, tensors[f"{key}up.bias"]]
    if config.ln_before:
        parts += [tensors[f"{key}norm.weight"], tensors[f"{key}norm.bias"]]
    parts.append(tensors[f"{key}down.bias"])
    offset = extent.add(torch.cat([part.flatten() for part in parts]))
    function = NON_LINEARITIES.index("silu" if config.non_linearity == "swish" else config.non_linearity)
    form = (BOTTLENECK_INPUTS.index(_SOURCES[config.variant]), function, int(config.ln_before))
    return BottleneckSpan(offset, config.bottleneck_size, config.scaling, form)
