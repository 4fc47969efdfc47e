"""Page copies: memory-bound. A program takes one slice of all pages, so every read can be before any write."""
# pyright: reportMissingParameterType=false, reportArgumentType=false

from collections.abc import Iterator

import triton
import triton.language as tl
from torch import Tensor

from peftkit_kernels import reference
from peftkit_kernels.triton.compile import Specimen
from peftkit_kernels.triton.counts import cdiv

_PAGES = 32  # copies that a program holds in registers
_SLICE = 256  # elements of each page, 64 a thread over all pages


def copy_pages(kv_PZ2KD: Tensor, source_X: Tensor, destination_X: Tensor) -> Tensor:
    """See `peftkit_kernels.reference.copy_pages`; more than 32 pages go through a staging copy."""
    num_pages = source_X.shape[0]
    if num_pages > _PAGES or not kv_PZ2KD[0].is_contiguous():
        return reference.copy_pages(kv_PZ2KD, source_X, destination_X)
    if num_pages:
        size = kv_PZ2KD[0].numel()
        _copy[(cdiv(size, _SLICE),)](
            kv_PZ2KD,
            source_X.contiguous(),
            destination_X.contiguous(),
            num_pages,
            kv_PZ2KD.stride(0),
            SIZE=size,
            PAGES=_PAGES,
            SLICE=_SLICE,
        )
    return kv_PZ2KD


@triton.jit(do_not_specialize=["num_pages"], do_not_specialize_on_alignment=["source", "destination"])
def _copy(
    kv, source, destination, num_pages, page_stride, SIZE: tl.constexpr, PAGES: tl.constexpr, SLICE: tl.constexpr
):
    number = tl.arange(0, PAGES)
    element = (tl.program_id(0) * SLICE + tl.arange(0, SLICE))[None, :]
    mask = (number < num_pages)[:, None] & (element < SIZE)
    read = tl.load(source + number, mask=number < num_pages, other=0)[:, None]
    written = tl.load(destination + number, mask=number < num_pages, other=0)[:, None]
    value = tl.load(kv + read * page_stride + element, mask=mask)
    tl.debug_barrier()  # a page may be read by one warp and written by another
    tl.store(kv + written * page_stride + element, value, mask=mask)


def specimens() -> Iterator[Specimen]:
    """Pages of 16 tokens, 8 and 2 KV heads of 128."""
    for num_kv in (8, 2):
        constants = {"SIZE": 16 * 2 * num_kv * 128, "PAGES": _PAGES, "SLICE": _SLICE}
        signature = {"kv": "*bf16", "source": "*i64", "destination": "*i64", "num_pages": "i32", "page_stride": "i64"}
        signature |= dict.fromkeys(constants, "constexpr")
        yield Specimen(_copy, signature, constants, num_warps=4, num_stages=1)
