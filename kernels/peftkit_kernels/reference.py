"""Each operation in plain PyTorch: the specification, the test oracle and the CPU path.

The operations that every row does with its own adapter's weights are in `grouped.py`.

Shape letters: T packed tokens of a step, N requests, H hidden, I in, O out, Q query heads, K KV heads, D head size,
E = D / 2, P pages, Z tokens a page, M pages a request, V vocabulary. A packed tensor holds the new tokens of all
requests one request after another; request n has the rows `cu_seqlens_N1[n]` to `cu_seqlens_N1[n + 1]`.

`deterministic=True` makes a row's result independent of which rows are computed beside it, and of where it stands
among them: every matrix product then has one shape for all rows, cut into tiles of `TILE` rows.
"""

from collections import Counter
from collections.abc import Callable
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from peftkit_kernels.tiles import activate, aligned_product, by_tiles, gelu_tanh

NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
    -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
    0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
"""The 16 levels of 4-bit NormalFloat (Dettmers et al. 2023, appendix E)."""

_NUCLEUS = (512, 8192)  # largest weights looked at before all are sorted: 0.1 and 1 ms, against 4 for 49152
_SHORT = 192  # single rows with contexts up to here are gathered together: 16 × 64 positions 0.4 ms a layer, not 0.7
_GATHER_BYTES = 4 << 20  # what is gathered at once stays in cache
_GAMMA = -0x61C8864680B583EB  # 0x9E3779B97F4A7C15, the golden ratio's odd 64-bit fraction, as a signed integer
_MIN_PACKED_ROWS = 4  # oneDNN is quicker at 4 rows than at 1 to 3: 27 ms against 35 for a 135M model on one Zen 4 core


def embedding(token_T: Tensor, weight_VH: Tensor) -> Tensor:
    """Rows of the embedding matrix.

    Semantics: `x[t] = weight[token[t]]`. token_T: int64, each 0 ≤ id < V. Returns x_TH in the weight's dtype.
    """
    return weight_VH.index_select(0, token_T)


def pack_linear(weight_OI: Tensor) -> Tensor:
    """The weight in the layout in which `linear` is quickest; the result only serves as `linear`'s weight.

    On a CPU with oneDNN a float32 matrix becomes an opaque oneDNN tensor (16 rows through a 135M model on one Zen 4
    core: 51 ms against 97 through MKL); anything else is returned as it is.
    """
    if weight_OI.device.type == "cpu" and weight_OI.dtype == torch.float32 and torch.backends.mkldnn.is_available():
        return torch.ops.mkldnn._reorder_linear_weight(weight_OI)
    return weight_OI


def linear(
    x_TI: Tensor,
    weight_OI: Tensor,
    bias_O: Tensor | None = None,
    *,
    deterministic: bool = False,
) -> Tensor:
    """Affine map of each row.

    Semantics: `y[t] = weight @ x[t] + bias`. weight_OI: plain, or packed by `pack_linear`; one floating dtype for all.
    Returns y_TO.
    """
    if not deterministic:
        return _matmul(x_TI, weight_OI, bias_O)
    y_TO = x_TI.new_empty(x_TI.shape[0], weight_OI.shape[0])
    if weight_OI.is_mkldnn:
        by_tiles(y_TO, x_TI, lambda tile_TI: _matmul(tile_TI, weight_OI, bias_O))
        return y_TO
    by_tiles(y_TO, x_TI, lambda tile_TI: aligned_product(tile_TI, weight_OI.T))
    return y_TO if bias_O is None else y_TO.add_(bias_O)


def rms_norm(x_TH: Tensor, weight_H: Tensor, eps: float, residual_TH: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Root-mean-square normalisation over the last dimension, after adding a residual where one is given.

    Semantics:
        sum = x + residual                               (x alone without a residual)
        y = sum / sqrt(mean(sum²) + eps) * weight        (the mean in float32)
    x may have more leading dimensions. Returns (y, sum), both shaped like x and in its dtype.
    """
    total_TH = x_TH if residual_TH is None else x_TH + residual_TH
    return F.rms_norm(total_TH, weight_H.shape, weight_H, eps), total_TH


def rope_write_kv(qkv_TCD: Tensor, cos_TE: Tensor, sin_TE: Tensor, cell_T: Tensor, kv_PZ2KD: Tensor) -> Tensor:
    """Rotates queries and keys by their positions (rotate-half convention) and writes keys and values into pages.

    Semantics, for head h of q and k, with E = D / 2:
        rotated[t, h, :E] = x[t, h, :E] * cos[t] - x[t, h, E:] * sin[t]
        rotated[t, h, E:] = x[t, h, E:] * cos[t] + x[t, h, :E] * sin[t]
        page, offset = divmod(cell[t], Z)
        kv[page, offset, 0] = rotated k of t;  kv[page, offset, 1] = v of t
    qkv_TCD: C = Q + 2 K heads, queries first, then keys, then values. cos_TE, sin_TE: of position × frequency.
    cell_T: int64, a token's place in the pages, all different. kv_PZ2KD is written in place, nowhere else than at
    these cells. Returns the rotated q_TQD.
    """
    num_kv, half = kv_PZ2KD.shape[3], cos_TE.shape[1]
    num_rotated = qkv_TCD.shape[1] - num_kv
    first, second = qkv_TCD[:, :num_rotated, :half], qkv_TCD[:, :num_rotated, half:]
    cos, sin = cos_TE.unsqueeze(1), sin_TE.unsqueeze(1)
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    num_q = num_rotated - num_kv
    fresh_T2KD = torch.stack((rotated[:, num_q:], qkv_TCD[:, num_rotated:]), dim=1)
    kv_PZ2KD.view(-1, *kv_PZ2KD.shape[2:]).index_copy_(0, cell_T, fresh_T2KD)
    return rotated[:, :num_q]


def silu_and_mul(x_TO: Tensor, *, deterministic: bool = False) -> Tensor:
    """SwiGLU's activation. Semantics: `y[t] = silu(x[t, :O/2]) * x[t, O/2:]`. Returns y of half the width."""
    return _gate(F.silu, x_TO, deterministic)


def gelu_tanh_and_mul(x_TO: Tensor, *, deterministic: bool = False) -> Tensor:
    """GeGLU's activation. Semantics: `y[t] = gelu_tanh(x[t, :O/2]) * x[t, O/2:]`. Returns y of half the width."""
    return _gate(gelu_tanh, x_TO, deterministic)


def paged_attention(
    q_TQD: Tensor,
    kv_PZ2KD: Tensor,
    page_NM: Tensor,
    cu_seqlens_N1: Tensor,
    context_N: Tensor,
    num_virtual_N: Tensor,
    *,
    scale: float,
    window: int | None = None,
    deterministic: bool = False,
) -> Tensor:
    """Causal attention of new tokens to everything their requests have in the pages, themselves included.

    Semantics, for request n, its i-th new row t and query head h, with k and v of KV head h // (Q / K):
        position = context[n] - (number of new rows of n) + i
        visible = {j ≤ position: window is None or j > position - window or j < num_virtual[n]}
        y[t, h] = Σ softmax_j(scale * q[t, h] · k[j]) * v[j] over visible j, where position j of request n stands
                  at kv[page[n, j // Z], j % Z]
    page_NM: int32, only its first ⌈context / Z⌉ entries a row are read. cu_seqlens_N1: int32, from 0 to T, ascending.
    context_N: int32, positions of each request with its new ones, all in the pages. num_virtual_N: int32. Nothing
    behind a request's context is read, whatever the pages hold there. Returns y_TQD.
    """
    out_TQD = torch.empty_like(q_TQD)
    starts, contexts, virtuals = cu_seqlens_N1.tolist(), context_N.tolist(), num_virtual_N.tolist()
    lengths = [end - start for start, end in pairwise(starts)]
    position_bytes = kv_PZ2KD[0, 0].nbytes
    short = [n for n, length in enumerate(lengths) if length == 1 and contexts[n] <= _SHORT and not deterministic]
    groups = _alike(short, contexts, max_positions=max(1, _GATHER_BYTES // position_bytes))
    together = [group for group in groups if len(group) > 1]
    for n in set(range(len(lengths))).difference(*together):
        if lengths[n]:
            kv_C2KD = _positions(kv_PZ2KD, page_NM[n], contexts[n])
            attend, rows = _attend_each if deterministic else _attend_chunk, slice(starts[n], starts[n + 1])
            attend(out_TQD[rows], q_TQD[rows], kv_C2KD, scale, window, virtuals[n])
    for group in together:
        index = torch.tensor(group, device=q_TQD.device)
        row_X = cu_seqlens_N1.index_select(0, index)
        context_X, virtual_X = context_N.index_select(0, index), num_virtual_N.index_select(0, index)
        kv_XC2KD = _padded_positions(kv_PZ2KD, page_NM.index_select(0, index), context_X, [contexts[n] for n in group])
        seen_XC = _seen(kv_XC2KD.shape[1], context_X.unsqueeze(1) - 1, window, virtual_X.unsqueeze(1))
        out_TQD.index_copy_(0, row_X.long(), _attend_rows(q_TQD.index_select(0, row_X), kv_XC2KD, scale, seen_XC))
    return out_TQD


def copy_pages(kv_PZ2KD: Tensor, source_X: Tensor, destination_X: Tensor) -> Tensor:
    """Copies whole pages. Semantics: `kv[destination[i]] = kv[source[i]]`, every read before any write.

    source_X, destination_X: int64; destinations all different. kv_PZ2KD is written in place and returned.
    """
    return kv_PZ2KD.index_copy_(0, destination_X, kv_PZ2KD.index_select(0, source_X))


def nf4_dequantize(
    code_X: Tensor,
    absmax_B: Tensor,
    absmax_code: Tensor,
    absmax_scale: Tensor,
    absmax_offset: Tensor,
    shape: tuple[int, int],
    dtype: torch.dtype,
) -> Tensor:
    """Weights from bitsandbytes' NF4 layout with double quantisation: 4-bit codes in blocks of 64, scales in 8 bits.

    Semantics, for element e of the flattened matrix, B = ⌈O·I / 64⌉ blocks:
        b = e // 64
        scale = absmax_code[absmax[b]] * absmax_scale[b // 256] + absmax_offset (or absmax_offset[b // 256])
        nibble = code[e // 2] >> 4 if e is even else code[e // 2] & 15
        w[e] = NF4[nibble] * scale                        (in float32, cast once)
    code_X: uint8, X = ⌈O·I / 2⌉. absmax_B: uint8. absmax_code: float32 (256,). absmax_scale: float32 (⌈B / 256⌉,).
    absmax_offset: float32, no dimension, or (⌈B / 256⌉,) for matrices below one another, which is the same for all of a
    row. Returns w of `shape` (O, I) and `dtype`.
    """
    nibble = torch.stack((code_X >> 4, code_X & 15), dim=-1).flatten()
    value = torch.tensor(NF4, dtype=torch.float32, device=code_X.device)[nibble.int()]
    scale_B, offset_B = absmax_scale.repeat_interleave(256)[: absmax_B.numel()], absmax_offset
    if absmax_offset.dim():
        offset_B = absmax_offset.repeat_interleave(256)[: absmax_B.numel()]
    scale_B = absmax_code[absmax_B.int()] * scale_B + offset_B
    num_elements = shape[0] * shape[1]
    return (value[:num_elements] * scale_B.repeat_interleave(64)[:num_elements]).view(shape).to(dtype)


def nf4_linear(
    x_TI: Tensor,
    code_X: Tensor,
    absmax_B: Tensor,
    absmax_code: Tensor,
    absmax_scale: Tensor,
    absmax_offset: Tensor,
    out_features: int,
    bias_O: Tensor | None = None,
    *,
    deterministic: bool = False,
) -> Tensor:
    """Affine map of each row by an NF4 weight.

    Semantics: `y[t] = w @ x[t] + bias` with w = `nf4_dequantize` of the codes and scales, (out_features, I). Returns
    y_TO in x's dtype.
    """
    shape = (out_features, x_TI.shape[1])
    weight_OI = nf4_dequantize(code_X, absmax_B, absmax_code, absmax_scale, absmax_offset, shape, x_TI.dtype)
    return linear(x_TI, weight_OI, bias_O, deterministic=deterministic)


def sample(
    logits_NV: Tensor,
    temperature_N: Tensor,
    top_k_N: Tensor,
    top_p_N: Tensor,
    min_p_N: Tensor,
    seed_N: Tensor,
    step_N: Tensor,
) -> Tensor:
    """Draws one token a row; a row's draw depends on nothing but that row.

    Semantics, for each row, in float64:
        temperature 0: the likeliest token, the lowest id among equals
        weight = exp((logits - max(logits)) / temperature)
        top_k > 0: only tokens whose logit reaches the k-th largest
        top_p < 1: of those, only tokens that reach the weight of the last one in the smallest set of likeliest
                   tokens which holds top_p of the weight
        min_p > 0: of those, only tokens with weight ≥ min_p
        cdf = cumulative sum of the weights kept, by ascending id
        token = the first with cdf > uniform(seed, step) * cdf[-1]
    Tokens that tie at a limit are all kept. temperature_N, top_p_N, min_p_N: float32. top_k_N: int32. seed_N, step_N:
    int64. Returns token_N int64; -1 for a row whose largest logit is not finite, from which nothing can be drawn.
    """
    parameters = zip(
        logits_NV, temperature_N.tolist(), top_k_N.tolist(), top_p_N.tolist(), min_p_N.tolist(), strict=True
    )
    uniforms = uniform(seed_N, step_N).tolist()
    tokens = [_draw(*row, u) for row, u in zip(parameters, uniforms, strict=True)]
    return torch.tensor(tokens, dtype=torch.int64, device=logits_NV.device)


def uniform(seed_N: Tensor, step_N: Tensor) -> Tensor:
    """A number in [0, 1) for each (seed, step): a counter-based hash on 64-bit integers, the same on every device.

    Semantics, modulo 2⁶⁴, with `mix` the finaliser of splitmix64 (Steele et al. 2014) and >> logical:
        u = (mix(mix(seed + GAMMA) + step * GAMMA) >> 11) / 2⁵³
    seed_N, step_N: int64. Returns float64.
    """
    return _shift(_mix(_mix(seed_N + _GAMMA) + step_N * _GAMMA), 11).double() * 2.0**-53


def _matmul(x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
    if not weight_OI.is_mkldnn:
        return F.linear(x_TI, weight_OI, bias_O)
    num_rows = x_TI.shape[0]
    if num_rows < _MIN_PACKED_ROWS:
        x_TI = F.pad(x_TI, (0, 0, 0, _MIN_PACKED_ROWS - num_rows))
    return torch.ops.mkldnn._linear_pointwise(x_TI, weight_OI, bias_O, "none", [], "")[:num_rows]


def _gate(activation: Callable[[Tensor], Tensor], x_TO: Tensor, deterministic: bool) -> Tensor:
    gate, up = x_TO.chunk(2, dim=1)
    return activate(activation, gate, deterministic=deterministic).mul_(up)


def _alike(requests: list[int], contexts: list[int], max_positions: int) -> list[list[int]]:
    """Requests in groups whose contexts are within a factor of two, and together not much longer than a limit."""
    groups: dict[tuple[int, int], list[int]] = {}
    counts: Counter[int] = Counter()
    for n in requests:
        size = contexts[n].bit_length()
        groups.setdefault((size, counts[size] * (1 << size) // max_positions), []).append(n)
        counts[size] += 1
    return list(groups.values())


def _positions(kv_PZ2KD: Tensor, page_M: Tensor, context: int) -> Tensor:
    """Keys and values of one request by position, (C, 2, K, D)."""
    num_pages = -(-context // kv_PZ2KD.shape[1])
    return kv_PZ2KD.index_select(0, page_M[:num_pages]).flatten(0, 1)[:context]


def _padded_positions(kv_PZ2KD: Tensor, page_XM: Tensor, context_X: Tensor, contexts: list[int]) -> Tensor:
    """Keys and values of requests by position, (X, C, 2, K, D) with C the longest context.

    Behind a shorter context stands its last position again, so that no other request's numbers, or NaN, are read.
    """
    num_cells = kv_PZ2KD.shape[1]
    position_C = torch.arange(max(contexts), device=kv_PZ2KD.device)
    position_XC = torch.minimum(position_C, context_X.unsqueeze(1) - 1)
    cell_XC = page_XM.gather(1, position_XC // num_cells) * num_cells + position_XC % num_cells
    kv_XC = kv_PZ2KD.flatten(0, 1).index_select(0, cell_XC.flatten())
    return kv_XC.view(*cell_XC.shape, *kv_PZ2KD.shape[2:])


def _seen(num_positions: int, query: Tensor, window: int | None, num_virtual: Tensor | int) -> Tensor:
    """Which of the first positions each query position sees; `query` has a last dimension of 1."""
    position_C = torch.arange(num_positions, device=query.device)
    seen = position_C <= query
    if window is not None:
        seen &= (position_C > query - window) | (position_C < num_virtual)
    return seen


def _attend_rows(q_XQD: Tensor, kv_XC2KD: Tensor, scale: float, seen_XC: Tensor | None) -> Tensor:
    """One query position a request: the query heads of a KV head are the rows of one small matrix product."""
    k_XKCD, v_XKCD = kv_XC2KD.permute(2, 0, 3, 1, 4)
    q_XKGD = q_XQD.reshape(q_XQD.shape[0], k_XKCD.shape[1], -1, q_XQD.shape[2])
    mask = None if seen_XC is None else seen_XC[:, None, None]
    return F.scaled_dot_product_attention(q_XKGD, k_XKCD, v_XKCD, attn_mask=mask, scale=scale).reshape(q_XQD.shape)


def _attend_chunk(
    out_TQD: Tensor, q_TQD: Tensor, kv_C2KD: Tensor, scale: float, window: int | None, num_virtual: int
) -> None:
    """The new rows of one request."""
    num_rows, context = q_TQD.shape[0], kv_C2KD.shape[0]
    k_KCD, v_KCD = kv_C2KD.permute(1, 2, 0, 3)
    mask, sees_all = None, window is None or window >= context
    if not sees_all or num_rows not in (1, context):
        query_T1 = torch.arange(context - num_rows, context, device=q_TQD.device).unsqueeze(1)
        mask = _seen(context, query_T1, window, num_virtual)
    causal = mask is None and num_rows > 1
    y_QTD = F.scaled_dot_product_attention(
        q_TQD.transpose(0, 1)[None], k_KCD[None], v_KCD[None], mask, is_causal=causal, scale=scale, enable_gqa=True
    )[0]
    out_TQD.copy_(y_QTD.transpose(0, 1))


def _attend_each(
    out_TQD: Tensor, q_TQD: Tensor, kv_C2KD: Tensor, scale: float, window: int | None, num_virtual: int
) -> None:
    """The new rows of one request one by one: the shapes that a row meets depend on its own position alone."""
    start = kv_C2KD.shape[0] - q_TQD.shape[0]
    for position, (q_QD, y_QD) in enumerate(zip(q_TQD, out_TQD, strict=True), start):
        seen_1C = None
        if window is not None and window <= position:
            seen_1C = _seen(position + 1, torch.tensor([[position]], device=q_TQD.device), window, num_virtual)
        y_QD.copy_(_attend_rows(q_QD.clone()[None], kv_C2KD[None, : position + 1], scale, seen_1C)[0])


def _draw(logits_V: Tensor, temperature: float, top_k: int, top_p: float, min_p: float, uniform_draw: float) -> int:
    if not logits_V.max().isfinite():
        return -1
    if temperature == 0:
        return int(logits_V.argmax())
    token_X = None
    if 0 < top_k < logits_V.shape[0]:
        token_X = (logits_V >= logits_V.topk(top_k).values[-1]).nonzero()[:, 0]
        logits_V = logits_V.index_select(0, token_X)
    weight = ((logits_V.double() - logits_V.max()) / temperature).exp_()
    floor = max(min_p, _nucleus_floor(weight, top_p) if top_p < 1 else 0.0)
    if floor > 0:
        weight = torch.where(weight >= floor, weight, 0.0)
    cdf = weight.cumsum(0)
    drawn = int(torch.searchsorted(cdf, uniform_draw * cdf[-1], right=True))
    return drawn if token_X is None else int(token_X[drawn])


def _nucleus_floor(weight_X: Tensor, top_p: float) -> float:
    """The smallest weight in the smallest set of largest weights that hold `top_p` of the sum."""
    wanted = top_p * weight_X.sum()
    for count in (*_NUCLEUS, weight_X.shape[0]):
        largest = weight_X.topk(min(count, weight_X.shape[0])).values
        cdf = largest.cumsum(0)
        if cdf[-1] >= wanted:
            return float(largest[torch.searchsorted(cdf, wanted)])
    return 0.0  # the sum of all, added up in another order, is an ulp short of what is wanted


def _mix(z: Tensor) -> Tensor:
    z = (z ^ _shift(z, 30)) * -0x40A7B892E31B1A47  # 0xBF58476D1CE4E5B9 as a signed integer
    z = (z ^ _shift(z, 27)) * -0x6B2FB644ECCEEE15  # 0x94D049BB133111EB
    return z ^ _shift(z, 31)


def _shift(z: Tensor, bits: int) -> Tensor:
    """Logical right shift of int64."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)
