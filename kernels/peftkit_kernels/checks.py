"""What each operation asks of its arguments. A check raises ValueError that names the tensor, what it is and what was
wanted; it looks at shapes, dtypes and devices alone, never at values, so it costs a GPU no synchronisation."""

import torch
from torch import Tensor

from peftkit_kernels.training_steps import ACTIVATIONS

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
TRAINED = (*FLOATS, torch.float64)
INT32 = (torch.int32,)
INT64 = (torch.int64,)
FLOAT32 = (torch.float32,)
UINT8 = (torch.uint8,)

JOINED = range(1, 4)
"""How many matrices are dequantised together."""
NF4_JOINED_ELEMENTS = 4096
"""Of which each has a multiple of elements."""

Shape = tuple[int | None, ...]
"""Wanted sizes; None is any."""


def embedding(token_T: Tensor, weight_VH: Tensor) -> None:
    _tensor("token_T", token_T, (None,), INT64, weight_VH)
    _tensor("weight_VH", weight_VH, (None, None), FLOATS)


def linear(
    x_TI: Tensor,
    weight_OI: Tensor,
    bias_O: Tensor | None = None,
    *,
    deterministic: bool = False,
) -> None:
    _tensor("x_TI", x_TI, (None, None), FLOATS)
    _tensor("weight_OI", weight_OI, (None, x_TI.shape[1]), (x_TI.dtype,), x_TI)
    if bias_O is not None:
        _tensor("bias_O", bias_O, (weight_OI.shape[0],), (x_TI.dtype,), x_TI)


def rms_norm(x_TH: Tensor, weight_H: Tensor, eps: float, residual_TH: Tensor | None = None) -> None:
    if x_TH.dim() < 2:
        raise ValueError(f"x_TH has shape {list(x_TH.shape)}: two dimensions or more are wanted")
    _tensor("x_TH", x_TH, (None,) * x_TH.dim(), FLOATS)
    _tensor("weight_H", weight_H, (x_TH.shape[-1],), (x_TH.dtype,), x_TH)
    if residual_TH is not None:
        _tensor("residual_TH", residual_TH, tuple(x_TH.shape), (x_TH.dtype,), x_TH)


def rope_write_kv(qkv_TCD: Tensor, cos_TE: Tensor, sin_TE: Tensor, cell_T: Tensor, kv_PZ2KD: Tensor) -> None:
    _tensor("qkv_TCD", qkv_TCD, (None, None, None), FLOATS)
    num_rows, num_heads, head_size = qkv_TCD.shape
    if head_size % 2:
        raise ValueError(f"qkv_TCD has head size {head_size}: an even one is wanted")
    _pages(kv_PZ2KD, qkv_TCD)
    if num_heads <= 2 * kv_PZ2KD.shape[3]:
        raise ValueError(f"qkv_TCD has {num_heads} heads: more than 2 × {kv_PZ2KD.shape[3]} (K) are wanted")
    for name, table in (("cos_TE", cos_TE), ("sin_TE", sin_TE)):
        _tensor(name, table, (num_rows, head_size // 2), (qkv_TCD.dtype,), qkv_TCD)
    _tensor("cell_T", cell_T, (num_rows,), INT64, qkv_TCD)


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
) -> None:
    _tensor("q_TQD", q_TQD, (None, None, None), FLOATS)
    _pages(kv_PZ2KD, q_TQD)
    if q_TQD.shape[1] % kv_PZ2KD.shape[3]:
        raise ValueError(f"q_TQD has {q_TQD.shape[1]} heads: a multiple of {kv_PZ2KD.shape[3]} (K) is wanted")
    _tensor("page_NM", page_NM, (None, None), INT32, q_TQD)
    num_requests = page_NM.shape[0]
    _tensor("cu_seqlens_N1", cu_seqlens_N1, (num_requests + 1,), INT32, q_TQD)
    _tensor("context_N", context_N, (num_requests,), INT32, q_TQD)
    _tensor("num_virtual_N", num_virtual_N, (num_requests,), INT32, q_TQD)
    if window is not None and window < 1:
        raise ValueError(f"window is {window}: at least 1, or None, is wanted")
    if scale <= 0:
        raise ValueError(f"scale is {scale}: a positive one is wanted")


def gated_activation(x_TO: Tensor, *, deterministic: bool = False) -> None:
    _tensor("x_TO", x_TO, (None, None), FLOATS)
    if x_TO.shape[1] % 2:
        raise ValueError(f"x_TO has {x_TO.shape[1]} columns: an even number is wanted")


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
) -> None:
    _tensor("x_TI", x_TI, (None, None), FLOATS)
    _tensor("y_TO", y_TO, (x_TI.shape[0], sum(out_features)), (x_TI.dtype,), x_TI)
    _tensor("weights", weights, (None,), (x_TI.dtype,), x_TI)
    _segments(row_X, segment_start_G1, segment_slot_G, row_slot_X, x_TI)
    _tensor("offset_a_PS", offset_a_PS, (len(out_features), None), INT64, x_TI)
    table = tuple(offset_a_PS.shape)
    _tensor("offset_b_PS", offset_b_PS, table, INT64, x_TI)
    _tensor("rank_PS", rank_PS, table, INT32, x_TI)
    _tensor("scale_PS", scale_PS, table, FLOAT32, x_TI)
    _tensor("offset_c_PS", offset_c_PS, table, INT64, x_TI)


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
) -> None:
    _tensor("y_TH", y_TH, (None, None), FLOATS)
    _tensor("residual_TH", residual_TH, tuple(y_TH.shape), (y_TH.dtype,), y_TH)
    _tensor("weights", weights, (None,), (y_TH.dtype,), y_TH)
    _segments(row_X, segment_start_G1, segment_slot_G, row_slot_X, y_TH)
    _tensor("offset_S", offset_S, (None,), INT64, y_TH)
    num_slots = offset_S.shape[0]
    _tensor("width_S", width_S, (num_slots,), INT32, y_TH)
    _tensor("scale_S", scale_S, (num_slots,), FLOAT32, y_TH)
    _tensor("form_S3", form_S3, (num_slots, 3), INT32, y_TH)


def copy_pages(kv_PZ2KD: Tensor, source_X: Tensor, destination_X: Tensor) -> None:
    if kv_PZ2KD.dim() != 5:
        raise ValueError(f"kv_PZ2KD has shape {list(kv_PZ2KD.shape)}: (P, Z, 2, K, D) is wanted")
    _tensor("source_X", source_X, (None,), INT64, kv_PZ2KD)
    _tensor("destination_X", destination_X, tuple(source_X.shape), INT64, kv_PZ2KD)


def nf4_dequantize(
    code_X: Tensor,
    absmax_B: Tensor,
    absmax_code: Tensor,
    absmax_scale: Tensor,
    absmax_offset: Tensor,
    shape: tuple[int, int],
    dtype: torch.dtype,
) -> None:
    num_elements = shape[0] * shape[1]
    num_blocks = -(-num_elements // 64)
    _tensor("code_X", code_X, (-(-num_elements // 2),), UINT8)
    _tensor("absmax_B", absmax_B, (num_blocks,), UINT8, code_X)
    _tensor("absmax_code", absmax_code, (256,), FLOAT32, code_X)
    _tensor("absmax_scale", absmax_scale, (-(-num_blocks // 256),), FLOAT32, code_X)
    offsets = tuple(absmax_scale.shape) if absmax_offset.dim() else ()
    _tensor("absmax_offset", absmax_offset, offsets, FLOAT32, code_X)
    if dtype not in FLOATS:
        raise ValueError(f"dtype is {dtype}: one of {_names(FLOATS)} is wanted")


def nf4_dequantize_joined(
    codes: tuple[Tensor, ...],
    absmaxes: tuple[Tensor, ...],
    absmax_codes: tuple[Tensor, ...],
    absmax_scales: tuple[Tensor, ...],
    absmax_offsets: tuple[Tensor, ...],
    rows: tuple[int, ...],
    columns: int,
    dtype: torch.dtype,
) -> None:
    tables = (codes, absmaxes, absmax_codes, absmax_scales, absmax_offsets, rows)
    if {len(table) for table in tables} != {len(rows)} or len(rows) not in JOINED:
        lengths = ", ".join(str(len(table)) for table in tables)
        raise ValueError(f"{lengths} codes, scales and rows: those of {JOINED[0]} to {JOINED[-1]} matrices are wanted")
    for code_X, absmax_B, absmax_code, absmax_scale, absmax_offset, num_rows in zip(*tables, strict=True):
        nf4_dequantize(code_X, absmax_B, absmax_code, absmax_scale, absmax_offset, (num_rows, columns), dtype)
        _tensor("absmax_offset", absmax_offset, (), FLOAT32, code_X)
        if num_rows * columns % NF4_JOINED_ELEMENTS:
            raise ValueError(f"a matrix of {num_rows} × {columns}: a multiple of {NF4_JOINED_ELEMENTS} is wanted")


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
) -> None:
    _tensor("x_TI", x_TI, (None, None), FLOATS)
    shape = (out_features, x_TI.shape[1])
    nf4_dequantize(code_X, absmax_B, absmax_code, absmax_scale, absmax_offset, shape, x_TI.dtype)
    _tensor("code_X", code_X, tuple(code_X.shape), UINT8, x_TI)
    if bias_O is not None:
        _tensor("bias_O", bias_O, (out_features,), (x_TI.dtype,), x_TI)


def sample(
    logits_NV: Tensor,
    temperature_N: Tensor,
    top_k_N: Tensor,
    top_p_N: Tensor,
    min_p_N: Tensor,
    seed_N: Tensor,
    step_N: Tensor,
) -> None:
    _tensor("logits_NV", logits_NV, (None, None), FLOATS)
    rows = (logits_NV.shape[0],)
    _tensor("temperature_N", temperature_N, rows, FLOAT32, logits_NV)
    _tensor("top_k_N", top_k_N, rows, INT32, logits_NV)
    _tensor("top_p_N", top_p_N, rows, FLOAT32, logits_NV)
    _tensor("min_p_N", min_p_N, rows, FLOAT32, logits_NV)
    _tensor("seed_N", seed_N, rows, INT64, logits_NV)
    _tensor("step_N", step_N, rows, INT64, logits_NV)


def rms_norm_forward(x_NH: Tensor, weight_H: Tensor, eps: float) -> None:
    _rows("x_NH", x_NH)
    _tensor("weight_H", weight_H, (x_NH.shape[-1],), (x_NH.dtype,), x_NH)


def add_rms_norm_forward(x_NH: Tensor, residual_NH: Tensor, weight_H: Tensor, eps: float) -> None:
    rms_norm_forward(x_NH, weight_H, eps)
    _same("residual_NH", residual_NH, x_NH)


def rms_norm_backward(
    dy_NH: Tensor, x_NH: Tensor, weight_H: Tensor, scale_N: Tensor, added_NH: Tensor | None = None
) -> None:
    rms_norm_forward(x_NH, weight_H, 0.0)
    _same("dy_NH", dy_NH, x_NH)
    if added_NH is not None:
        _same("added_NH", added_NH, x_NH)
    _tensor("scale_N", scale_N, tuple(x_NH.shape[:-1]), (torch.promote_types(x_NH.dtype, torch.float32),), x_NH)


def rotate(q_NQD: Tensor, k_NKD: Tensor, cos_ND: Tensor, sin_ND: Tensor, inverse: bool = False) -> None:
    _tensor("q_NQD", q_NQD, (None, None, None), TRAINED)
    num_rows, _, head_size = q_NQD.shape
    if head_size % 2:
        raise ValueError(f"q_NQD has head size {head_size}: an even one is wanted")
    _tensor("k_NKD", k_NKD, (num_rows, None, head_size), (q_NQD.dtype,), q_NQD)
    for name, table in (("cos_ND", cos_ND), ("sin_ND", sin_ND)):
        _tensor(name, table, (num_rows, head_size), TRAINED, q_NQD)


def rotate_(q_NQD: Tensor, k_NKD: Tensor, cos_ND: Tensor, sin_ND: Tensor) -> None:
    rotate(q_NQD, k_NKD, cos_ND, sin_ND)
    for name, tensor in (("q_NQD", q_NQD), ("k_NKD", k_NKD)):
        if tensor.stride(-1) != 1:
            raise ValueError(f"{name} has heads that aren't contiguous: a tensor that can be overwritten is wanted")


def rotate_back(dq_NQD: Tensor, dk_NKD: Tensor, dv_NKD: Tensor, cos_ND: Tensor, sin_ND: Tensor) -> None:
    rotate(dq_NQD, dk_NKD, cos_ND, sin_ND)
    _same("dv_NKD", dv_NKD, dk_NKD)


def gated(gate_NF: Tensor, up_NF: Tensor, activation: str) -> None:
    _rows("gate_NF", gate_NF)
    _same("up_NF", up_NF, gate_NF)
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation is {activation}: one of {', '.join(ACTIVATIONS)} is wanted")


def gated_backward(dh_NF: Tensor, gate_NF: Tensor, up_NF: Tensor, activation: str) -> None:
    gated(gate_NF, up_NF, activation)
    _same("dh_NF", dh_NF, gate_NF)


def gated_backward_(dh_NF: Tensor, gate_NF: Tensor, up_NF: Tensor, activation: str) -> None:
    gated_backward(dh_NF, gate_NF, up_NF, activation)
    overwritten(gate_NF, up_NF)


def overwritten(gate_NF: Tensor, up_NF: Tensor) -> None:
    """Rows may lie apart, as halves of wider ones do."""
    for name, tensor in (("gate_NF", gate_NF), ("up_NF", up_NF)):
        if tensor.stride(-1) != 1 or (tensor.dim() > 2 and not tensor.is_contiguous()):
            raise ValueError(f"{name} isn't contiguous: a tensor that can be overwritten row by row is wanted")


def cross_entropy(logits_NV: Tensor, targets_N: Tensor) -> None:
    _tensor("logits_NV", logits_NV, (None, None), TRAINED)
    _tensor("targets_N", targets_N, (logits_NV.shape[0],), INT64, logits_NV)
    if logits_NV.shape[1] and logits_NV.stride(1) != 1:
        raise ValueError("logits_NV has rows that aren't contiguous: contiguous ones are wanted")


def cross_entropy_grad(logits_NV: Tensor, targets_N: Tensor, scale: float = 1.0) -> None:
    cross_entropy(logits_NV, targets_N)


def _rows(name: str, tensor: Tensor) -> None:
    if tensor.dim() < 2:
        raise ValueError(f"{name} has shape {list(tensor.shape)}: two dimensions or more are wanted")
    if tensor.dtype not in TRAINED:
        raise ValueError(f"{name} is {tensor.dtype}: {_names(TRAINED)} is wanted")


def _same(name: str, tensor: Tensor, like: Tensor) -> None:
    if tensor.shape == like.shape and tensor.dtype == like.dtype and tensor.device == like.device:
        return
    _tensor(name, tensor, tuple(like.shape), (like.dtype,), like)


def _pages(kv_PZ2KD: Tensor, like: Tensor) -> None:
    _tensor("kv_PZ2KD", kv_PZ2KD, (None, None, 2, None, like.shape[2]), (like.dtype,), like)
    if not kv_PZ2KD.is_contiguous():
        raise ValueError("kv_PZ2KD isn't contiguous: a contiguous tensor is wanted")


def _segments(
    row_X: Tensor, segment_start_G1: Tensor, segment_slot_G: Tensor, row_slot_X: Tensor, like: Tensor
) -> None:
    _tensor("row_X", row_X, (None,), INT64, like)
    _tensor("segment_slot_G", segment_slot_G, (None,), INT32, like)
    _tensor("segment_start_G1", segment_start_G1, (segment_slot_G.shape[0] + 1,), INT32, like)
    _tensor("row_slot_X", row_slot_X, tuple(row_X.shape), INT32, like)


def _tensor(
    name: str, tensor: Tensor, shape: Shape, dtypes: tuple[torch.dtype, ...], like: Tensor | None = None
) -> None:
    """Checks one tensor; `like` is one on the device that is wanted."""
    if not _fits(tensor.shape, shape):
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        raise ValueError(f"{name} has shape {list(tensor.shape)}: ({wanted}) is wanted")
    if tensor.dtype not in dtypes:
        raise ValueError(f"{name} is {tensor.dtype}: {_names(dtypes)} is wanted")
    if like is not None and tensor.device != like.device:
        raise ValueError(f"{name} is on {tensor.device}: {like.device} is wanted")


def _fits(shape: torch.Size, wanted: Shape) -> bool:
    if len(shape) != len(wanted):
        return False
    for size, want in zip(shape, wanted, strict=True):  # a loop: checks run some 2000 times a step
        if want is not None and size != want:
            return False
    return True


def _names(dtypes: tuple[torch.dtype, ...]) -> str:
    return " or ".join(str(dtype) for dtype in dtypes)
