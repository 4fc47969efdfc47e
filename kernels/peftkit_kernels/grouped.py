"""What each row does with its own adapter's weights, in plain PyTorch; the companion of `reference.py`.

Shape letters beyond those there: S adapter slots, G segments, X adapted rows. The segment table is `Segments`: rows
sorted by slot, `row_X[start_G1[g] : start_G1[g + 1]]` of slot `slot_G[g]`. Weights of all slots lie in one flat
buffer, each at its true rank or width; tables by slot say where. A row outside the segments is neither read nor
written.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from peftkit_kernels.tiles import activate, aligned_product, by_tiles, gelu_tanh

NON_LINEARITIES = ("relu", "gelu", "gelu_new", "silu", "tanh")
"""Non-linearities of bottleneck adapters, in the order of their numbers in `form_S3`."""

BOTTLENECK_INPUTS = ("output", "sum", "residual")
"""What a bottleneck adapter reads, in the order of its numbers in `form_S3`."""

_FUNCTIONS: tuple[Callable[[Tensor], Tensor], ...] = (F.relu, F.gelu, gelu_tanh, F.silu, torch.tanh)
_NORM_EPS = 1e-5


def grouped_lora(
    y_TO: Tensor,
    x_TI: Tensor,
    weights: Tensor,
    row_X: Tensor,
    segment_start_G1: Tensor,
    segment_slot_G: Tensor,
    row_slot_X: Tensor,
    offset_a_PS: Tensor,
    offset_b_PS: Tensor,
    rank_PS: Tensor,
    scale_PS: Tensor,
    offset_c_PS: Tensor,
    out_features: tuple[int, ...],
    *,
    x_settled: bool = False,
    deterministic: bool = False,
) -> Tensor:
    """Adds each row's own low-rank update to y, in place, several projections of one input at once; DoRA scales too.

    Here P counts the projections that y holds side by side.
    Semantics, for each segment g with slot s = segment_slot[g], each row t = row[i] with segment_start[g] ≤ i <
    segment_start[g + 1], each projection p with r = rank[p, s] > 0, whose columns c follow those of the projections
    before it:
        A = weights[offset_a[p, s] :][: r * I] as (r, I);  B = weights[offset_b[p, s] :][: r * out] as (r, out)
        y[t, c] += scale[p, s] * (x[t] @ Aᵀ) @ B
        where offset_c[p, s] ≥ 0:  m, n = weights[offset_c[p, s] :][: 2 * out] as (2, out);  y[t, c] += m * y[t, c] + n
    A projection of rank 0 is not adapted by that slot: its columns get + 0. Rows outside the segments are not touched.
    weights: one flat buffer in x's dtype. row_X: int64, all different. segment_start_G1: int32, from 0 to X, ascending
    (equal neighbours: an empty segment). segment_slot_G: int32. row_slot_X: int32, the slot of each entry of row_X by
    the segments, -1 behind the last one. offset_a_PS, offset_b_PS, offset_c_PS: int64, in elements. rank_PS: int32.
    scale_PS: float32. `sum(out_features) == O`. Returns y_TO.
    x_settled: a promise that x, the weights and all tables were complete before the kernel that was launched last on
    this stream began, and that it is no other `grouped_lora`'s, as after the product that y is. On a GPU the update
    then begins while that kernel still runs.
    """
    starts, slots = segment_start_G1.tolist(), segment_slot_G.tolist()
    offsets_a, offsets_b, ranks, scales = (table.tolist() for table in (offset_a_PS, offset_b_PS, rank_PS, scale_PS))
    offsets_c = offset_c_PS.tolist()
    x_XI = x_TI.index_select(0, row_X)
    delta_XO = y_TO.new_zeros(x_XI.shape[0], y_TO.shape[1])
    in_features, width = x_TI.shape[1], y_TO.shape[1]
    rescaled: list[tuple[int, int, int, int, int]] = []
    for start, end, slot in zip(starts, starts[1:], slots, strict=False):
        x, column = x_XI[start:end], 0
        for p, out in enumerate(out_features):
            if end > start and (rank := ranks[p][slot]):
                a_IR = weights.as_strided((in_features, rank), (1, in_features), offsets_a[p][slot])
                b_RO = weights.as_strided((rank, out), (out, 1), offsets_b[p][slot])
                delta = delta_XO.as_strided((end - start, out), (width, 1), start * width + column)
                _write_low_rank(delta, x, a_IR, b_RO, scales[p][slot], deterministic)
                if offsets_c[p][slot] >= 0:
                    rescaled.append((start, end, column, out, offsets_c[p][slot]))
            column += out
    y_TO.index_add_(0, row_X, delta_XO)
    for start, end, column, out, offset in rescaled:
        part, rows = y_TO[:, column : column + out], row_X[start:end]
        m, n = weights[offset:][: 2 * out].view(2, out)
        y = part.index_select(0, rows)
        part.index_copy_(0, rows, y.add_(y.mul(m).add_(n)))
    return y_TO


def grouped_bottleneck(
    y_TH: Tensor,
    residual_TH: Tensor,
    weights: Tensor,
    row_X: Tensor,
    segment_start_G1: Tensor,
    segment_slot_G: Tensor,
    row_slot_X: Tensor,
    offset_S: Tensor,
    width_S: Tensor,
    scale_S: Tensor,
    form_S3: Tensor,
    *,
    deterministic: bool = False,
) -> Tensor:
    """Adds each row's own bottleneck adapter to a sub-layer's output y, in place.

    Semantics, for each segment g with slot s = segment_slot[g] and b = width[s] > 0, each of its rows t:
        source, f, normed = form[s]
        down, up, up_bias [, norm_weight, norm_bias], down_bias = weights[offset[s] :], one behind the other, as
            (b, H), (b, H), (H) [, (H), (H)], (b)                       [only where normed is 1]
        x = y[t], y[t] + residual[t] or residual[t]                      by BOTTLENECK_INPUTS[source]
        x = (x - mean(x)) / sqrt(var(x) + 1e-5) * norm_weight + norm_bias        where normed is 1
        y[t] += scale[s] * (φ(x @ downᵀ + down_bias) @ up + up_bias)     φ by NON_LINEARITIES[f]
    A slot of width 0 has no such adapter; its rows, and those outside the segments, are not touched. residual_TH: the
    stream that y is to be added to. weights: one flat buffer in y's dtype. row_X, segment_start_G1, segment_slot_G,
    row_slot_X: as in `grouped_lora`. offset_S: int64, in elements. width_S, form_S3: int32. scale_S: float32.
    Returns y_TH.
    """
    starts, slots = segment_start_G1.tolist(), segment_slot_G.tolist()
    offsets, widths, scales, forms = (table.tolist() for table in (offset_S, width_S, scale_S, form_S3))
    for start, end, slot in zip(starts, starts[1:], slots, strict=False):
        if end == start or not (width := widths[slot]):
            continue
        source, function, normed = forms[slot]
        rows = row_X[start:end]
        y = y_TH.index_select(0, rows)
        x = y if source == 0 else residual_TH.index_select(0, rows)
        x = x + y if source == 1 else x
        parts = _bottleneck(weights[offsets[slot] :], width, x.shape[1], bool(normed))
        delta = _two_layers(x, parts, _FUNCTIONS[function], deterministic)
        y_TH.index_copy_(0, rows, y.add_(delta.mul_(scales[slot])))
    return y_TH


def _write_low_rank(y_TO: Tensor, x_TI: Tensor, a_IR: Tensor, b_RO: Tensor, scale: float, deterministic: bool) -> None:
    if deterministic:
        by_tiles(y_TO, x_TI, lambda tile: aligned_product(aligned_product(tile, a_IR), b_RO).mul_(scale))
    else:
        torch.addmm(y_TO, torch.mm(x_TI, a_IR), b_RO, beta=0, alpha=scale, out=y_TO)


class _Bottleneck(NamedTuple):
    down_BH: Tensor
    up_BH: Tensor
    up_bias_H: Tensor
    norm_2H: Tensor
    """Weight and bias; without rows where there is no norm."""
    down_bias_B: Tensor


def _bottleneck(weights: Tensor, width: int, hidden: int, normed: bool) -> _Bottleneck:
    """What stands at the head of `weights`."""
    num_norms = 2 if normed else 0
    sizes = [width * hidden, width * hidden, hidden, num_norms * hidden, width]
    down, up, up_bias, norm, down_bias = weights[: sum(sizes)].split(sizes)
    return _Bottleneck(
        down.view(width, hidden), up.view(width, hidden), up_bias, norm.view(num_norms, hidden), down_bias
    )


def _two_layers(x_XH: Tensor, parts: _Bottleneck, function: Callable[[Tensor], Tensor], deterministic: bool) -> Tensor:
    if parts.norm_2H.shape[0]:
        x_XH = F.layer_norm(x_XH, x_XH.shape[1:], parts.norm_2H[0], parts.norm_2H[1], _NORM_EPS)
    if not deterministic:
        inner_XB = function(torch.addmm(parts.down_bias_B, x_XH, parts.down_BH.T))
        return torch.addmm(parts.up_bias_H, inner_XB, parts.up_BH)
    inner_XB, delta_XH = x_XH.new_empty(x_XH.shape[0], len(parts.down_bias_B)), torch.empty_like(x_XH)
    by_tiles(inner_XB, x_XH, lambda tile: aligned_product(tile, parts.down_BH.T))
    inner_XB = activate(function, inner_XB.add_(parts.down_bias_B), deterministic=True)
    by_tiles(delta_XH, inner_XB, lambda tile: aligned_product(tile, parts.up_BH))
    return delta_XH.add_(parts.up_bias_H)
