"""Adapters as the device's memory holds them: each layer's matrices one behind the other, at their true sizes.

    LoRA         | A q | A k | … | A down | B q | B k | … | B down | DoRA's scales q | …         A (r, in), B (r, out)
    bottleneck   | down | up | up's bias | norm | down's bias |  of the attention, then of the feed-forward

B and the up-projection are transposed, rows contiguous. A span says where in its layer a projection's LoRA or a
sub-layer's bottleneck begins, and how large it is; one of rank or width 0 is not there.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from peftkit.errors import AdapterError, UnsupportedError
from peftkit.methods import BottleneckConfig
from peftkit.methods.bottleneck import PREFIX as LAYERS_PREFIX
from peftkit.methods.lora import PREFIX, LoraSite
from peftkit_kernels import BOTTLENECK_INPUTS, NON_LINEARITIES
from peftkit_serve.models.spec import PROJECTIONS, ModelSpec

UNIT_BYTES = 64 * 1024
"""Extents are whole units."""

SUB_LAYERS = ("attn_adapter", "mlp_adapter")
"""Where bottleneck adapters stand, in the order of every table over sub-layers."""

BaseLinear = Callable[[int, int], tuple[Tensor, Tensor | None]]
"""Layer, projection → the base's weight (out, in) and bias (out)."""

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
    """DoRA's scale less one (out), then what it adds (out); -1 where there is none."""

    def moved(self, start: int) -> "LoraSpan":
        """The same for a layer that begins at `start`."""
        offset_c = self.offset_c + start if self.offset_c >= 0 else -1
        return self._replace(offset_a=self.offset_a + start, offset_b=self.offset_b + start, offset_c=offset_c)


class BottleneckSpan(NamedTuple):
    """A sub-layer's bottleneck in its layer. The fields are those of `BottleneckTables`, in their order."""

    offset: int = 0
    width: int = 0
    scale: float = 0.0
    form: tuple[int, int, int] = (0, 0, 0)
    """Input, non-linearity and layer norm, as `grouped_bottleneck` numbers them."""

    def moved(self, start: int) -> "BottleneckSpan":
        """The same for a layer that begins at `start`."""
        return self._replace(offset=self.offset + start)


@dataclass(frozen=True, slots=True, eq=False)
class PackedLayer:
    """One layer of an adapter as it lies in an extent."""

    weights: Tensor
    lora: tuple[LoraSpan, ...] = (LoraSpan(),) * len(PROJECTIONS)
    bottleneck: tuple[BottleneckSpan, ...] = (BottleneckSpan(),) * len(SUB_LAYERS)

    @property
    def num_units(self) -> int:
        """Length of its extent."""
        return -(-self.weights.nbytes // UNIT_BYTES)


@dataclass(frozen=True, slots=True, eq=False)
class PackedAdapter:
    """A LoRA or bottleneck adapter on the host, ready to be copied into `AdapterMemory`."""

    layers: tuple[PackedLayer, ...]

    @property
    def nbytes(self) -> int:
        """Bytes that it takes in `AdapterMemory`."""
        return UNIT_BYTES * sum(layer.num_units for layer in self.layers)

    @property
    def has_bottlenecks(self) -> bool:
        """Whether any sub-layer has a bottleneck."""
        return any(span.width for layer in self.layers for span in layer.bottleneck)


def pack_lora(
    tensors: Mapping[str, Tensor],
    sites: Mapping[str, LoraSite],
    spec: ModelSpec,
    *,
    dtype: torch.dtype = torch.float32,
    base_linear: BaseLinear | None = None,
) -> PackedAdapter:
    """Lays a LoRA's tensors out as `AdapterMemory` holds them.

    tensors: PEFT keys → lora_A (r, in), lora_B (out, r), for DoRA lora_magnitude_vector (out). sites: module path →
    rank and scale. dtype: that of the memory. base_linear: what DoRA's scales m / ‖W + sBA‖ are computed from. Raises
    UnsupportedError that names a module which isn't one of the layers' linear projections or a tensor which belongs to
    none, AdapterError for a tensor that is missing or of the wrong shape.
    """
    by_layer: list[dict[int, _Update]] = [{} for _ in range(spec.num_layers)]
    left = set(tensors)
    for path, site in sites.items():
        found = _SITE.fullmatch(path)
        if found is None or int(found[1]) >= spec.num_layers:
            raise UnsupportedError(f"LoRA on {path} can't be served: {', '.join(PROJECTIONS)} can")
        layer, projection = int(found[1]), PROJECTIONS.index(found[2])
        out_features, in_features = spec.projection_shapes[projection]
        names = [f"{PREFIX}{path}.lora_A.weight", f"{PREFIX}{path}.lora_B.weight"]
        a = _tensor(tensors, names[0], (site.r, in_features))
        b = _tensor(tensors, names[1], (out_features, site.r))
        rescaling = None
        magnitude = f"{PREFIX}{path}.lora_magnitude_vector"
        if base_linear is not None and magnitude in tensors:
            names.append(magnitude)
            wanted = _tensor(tensors, magnitude, (out_features,))
            rescaling = _rescaling(*base_linear(layer, projection), a, b, site.scale, wanted)
        by_layer[layer][projection] = _Update(a, b.T, site.scale, rescaling)
        left -= set(names)
    if left:
        raise UnsupportedError(f"tensor {min(left)} can't be served: it belongs to no LoRA on a linear projection")
    return PackedAdapter(tuple(_lora_layer(layer, dtype) for layer in by_layer))


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
    return PackedAdapter(tuple(layers))


class _Update(NamedTuple):
    """LoRA of one linear: A (r, in), B transposed (r, out), scale, and DoRA's two rows (2, out)."""

    a: Tensor
    b: Tensor
    scale: float
    rescaling: Tensor | None


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
    excess_O = magnitude / norm_O - 1
    return torch.stack((excess_O, torch.zeros_like(excess_O) if bias_O is None else -excess_O * bias_O)).cpu()


def _lora_layer(layer: Mapping[int, _Update], dtype: torch.dtype) -> PackedLayer:
    """layer: projection → its update."""
    extent = _Extent(dtype)
    offset_a = {p: extent.add(layer[p].a) for p in sorted(layer)}
    offset_b = {p: extent.add(layer[p].b) for p in sorted(layer)}
    offset_c = {p: extent.add(rows) for p in sorted(layer) if (rows := layer[p].rescaling) is not None}
    spans = [
        LoraSpan(offset_a[p], offset_b[p], layer[p].a.shape[0], layer[p].scale, offset_c.get(p, -1))
        if p in layer
        else LoraSpan()
        for p in range(len(PROJECTIONS))
    ]
    return PackedLayer(extent.weights(), lora=tuple(spans))


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
