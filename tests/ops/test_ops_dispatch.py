"""What operations refuse, which implementation they run, and what importing them costs."""

import subprocess
import sys
from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from torch import Tensor

import peftkit_kernels as ops
from peftkit_kernels import dispatch

INT = torch.int32


def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


def lora(**changed: Tensor) -> Callable[[], object]:
    arguments: dict[str, Tensor] = {
        "y_TO": zeros(4, 6),
        "x_TI": zeros(4, 5),
        "weights": zeros(30),
        "row_X": torch.tensor([1, 2]),
        "segment_start_G1": torch.tensor([0, 2], dtype=INT),
        "segment_slot_G": torch.tensor([0], dtype=INT),
        "row_slot_X": zeros(2, dtype=INT),
        "offset_a_PS": zeros(1, 2, dtype=torch.int64),
        "offset_b_PS": zeros(1, 2, dtype=torch.int64),
        "rank_PS": zeros(1, 2, dtype=INT),
        "scale_PS": zeros(1, 2),
        "offset_c_PS": zeros(1, 2, dtype=torch.int64),
    }
    return lambda: ops.grouped_lora(**(arguments | changed), out_features=(6,))  # type: ignore[arg-type]


def bottleneck(**changed: Tensor) -> Callable[[], object]:
    arguments: dict[str, Tensor] = {
        "y_TH": zeros(4, 6),
        "residual_TH": zeros(4, 6),
        "weights": zeros(30),
        "row_X": torch.tensor([1, 2]),
        "segment_start_G1": torch.tensor([0, 2], dtype=INT),
        "segment_slot_G": torch.tensor([0], dtype=INT),
        "row_slot_X": zeros(2, dtype=INT),
        "offset_S": zeros(2, dtype=torch.int64),
        "width_S": zeros(2, dtype=INT),
        "scale_S": zeros(2),
        "form_S3": zeros(2, 3, dtype=INT),
    }
    return lambda: ops.grouped_bottleneck(**(arguments | changed))  # type: ignore[arg-type]


def attention(**changed: Tensor) -> Callable[[], object]:
    arguments: dict[str, Tensor] = {
        "q_TQD": zeros(2, 4, 8),
        "kv_PZ2KD": zeros(3, 16, 2, 2, 8),
        "page_NM": zeros(1, 2, dtype=INT),
        "cu_seqlens_N1": torch.tensor([0, 2], dtype=INT),
        "context_N": torch.tensor([9], dtype=INT),
        "num_virtual_N": torch.tensor([0], dtype=INT),
    }
    return lambda: ops.paged_attention(**(arguments | changed), scale=1.0)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ops.linear(zeros(2, 5), zeros(3, 4)), r"weight_OI has shape \[3, 4\]: \(any, 5\) is wanted"),
        (lambda: ops.linear(zeros(5), zeros(3, 5)), r"x_TI has shape \[5\]: \(any, any\) is wanted"),
        (
            lambda: ops.linear(zeros(2, 5), zeros(3, 5, dtype=torch.bfloat16)),
            "weight_OI is torch.bfloat16: torch.float32 is wanted",
        ),
        (lambda: ops.linear(zeros(2, 5), zeros(3, 5), zeros(5)), r"bias_O has shape \[5\]: \(3\) is wanted"),
        (lambda: ops.linear(zeros(2, 5), torch.zeros(3, 5, device="meta")), "weight_OI is on meta: cpu is wanted"),
        (
            lambda: ops.embedding(zeros(2, dtype=INT), zeros(3, 4)),
            "token_T is torch.int32: torch.int64 is wanted",
        ),
        (lambda: ops.rms_norm(zeros(4), zeros(4), 1e-5), r"x_TH has shape \[4\]: two dimensions or more are wanted"),
        (
            lambda: ops.rms_norm(zeros(2, 4), zeros(4), 1e-5, zeros(3, 4)),
            r"residual_TH has shape \[3, 4\]: \(2, 4\) is wanted",
        ),
        (lambda: ops.silu_and_mul(zeros(2, 5)), "x_TO has 5 columns: an even number is wanted"),
        (attention(page_NM=zeros(1, 2, dtype=torch.int64)), "page_NM is torch.int64: torch.int32 is wanted"),
        (attention(q_TQD=zeros(2, 3, 8)), r"q_TQD has 3 heads: a multiple of 2 \(K\) is wanted"),
        (attention(context_N=zeros(2, dtype=INT)), r"context_N has shape \[2\]: \(1\) is wanted"),
        (
            attention(kv_PZ2KD=zeros(16, 3, 2, 2, 8).transpose(0, 1)),
            "kv_PZ2KD isn't contiguous: a contiguous tensor is wanted",
        ),
        (lora(y_TO=zeros(4, 7)), r"y_TO has shape \[4, 7\]: \(4, 6\) is wanted"),
        (lora(rank_PS=zeros(1, 3, dtype=INT)), r"rank_PS has shape \[1, 3\]: \(1, 2\) is wanted"),
        (lora(offset_c_PS=zeros(1, 2)), "offset_c_PS is torch.float32: torch.int64 is wanted"),
        (bottleneck(residual_TH=zeros(3, 6)), r"residual_TH has shape \[3, 6\]: \(4, 6\) is wanted"),
        (bottleneck(form_S3=zeros(2, 2, dtype=INT)), r"form_S3 has shape \[2, 2\]: \(2, 3\) is wanted"),
        (bottleneck(width_S=zeros(3, dtype=INT)), r"width_S has shape \[3\]: \(2\) is wanted"),
        (lora(weights=zeros(30).bfloat16()), "weights is torch.bfloat16: torch.float32 is wanted"),
        (lora(row_slot_X=zeros(3, dtype=INT)), r"row_slot_X has shape \[3\]: \(2\) is wanted"),
        (lora(segment_start_G1=zeros(3, dtype=INT)), r"segment_start_G1 has shape \[3\]: \(2\) is wanted"),
        (
            lambda: ops.copy_pages(zeros(3, 4), torch.tensor([0]), torch.tensor([1])),
            r"kv_PZ2KD has shape \[3, 4\]: \(P, Z, 2, K, D\) is wanted",
        ),
        (
            lambda: ops.rope_write_kv(
                zeros(2, 4, 8), zeros(2, 4), zeros(2, 4), zeros(2, dtype=torch.int64), zeros(1, 16, 2, 2, 8)
            ),
            r"qkv_TCD has 4 heads: more than 2 × 2 \(K\) are wanted",
        ),
    ],
)
def test_a_wrong_argument_is_refused_by_name_with_what_was_wanted(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}$"):
        call()


def test_a_window_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="window is 0: at least 1, or None, is wanted"):
        ops.paged_attention(
            zeros(1, 1, 2), zeros(1, 16, 2, 1, 2), *(torch.zeros(size, dtype=INT) for size in ((1, 1), 2, 1, 1)),
            scale=1.0, window=0,
        )  # fmt: skip


def test_importing_the_package_imports_no_triton() -> None:
    code = "import peftkit_kernels, sys; print([name for name in sys.modules if name.startswith('triton')])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout == "[]\n"


@pytest.mark.parametrize(
    ("choice", "device", "runs_kernel"),
    [("auto", "cpu", False), ("auto", "cuda", True), ("reference", "cuda", False), ("reference", "cpu", False)],
)
def test_the_device_and_the_environment_choose_the_implementation(
    monkeypatch: pytest.MonkeyPatch, choice: str, device: str, runs_kernel: bool
) -> None:
    module = ModuleType("peftkit_kernels.fake")
    module.linear = ops.linear  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "peftkit_kernels.fake", module)
    monkeypatch.setattr(dispatch, "TRITON", {"linear": "fake"})
    monkeypatch.setenv("PEFTKIT_KERNELS", choice)
    choose = dispatch._triton.__wrapped__  # what was chosen in this process stays chosen
    assert (choose("linear", device) is not None) == runs_kernel
    assert choose("embedding", device) is None


def test_an_unknown_choice_of_kernels_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PEFTKIT_KERNELS", "fast")
    with pytest.raises(ValueError, match="PEFTKIT_KERNELS=fast: it must be auto or reference"):
        dispatch._triton.__wrapped__("linear", "cpu")


def test_public_operations_keep_their_specification() -> None:
    for name in ops.__all__:
        assert getattr(ops, name).__doc__, f"{name} says nothing of itself"
    assert "Semantics" in str(ops.grouped_lora.__doc__)
