"""Sampling without a sort: four passes' worth of kernels, none of which waits for the host.

peak     largest logit of each chunk of a row, and where it first stands
limit    of a row: greedy token, or the smallest logit that top-k and top-p keep, found two bits at a time: the
         bits of a logit are mapped to an integer of the same order, and three counts (or sums of weight) say which
         quarter of the range the limit lies in
mass     float64 weight of each chunk that is kept
pick     the chunk in which the cumulative weight passes the drawn number, and the token within it
"""
# pyright: reportMissingParameterType=false, reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from peftkit_kernels.triton.compile import Specimen

_CHUNK = 2048  # logits a program of the passes that are spread over the card
_LIMIT_BLOCK = 8192  # logits at a time where one program has a row
_LIMIT_WARPS = 16
_LAST_BIT = {torch.float32: 0, torch.float16: 12, torch.bfloat16: 16}  # as float32; an even one


def sample(
    logits_NV: Tensor,
    temperature_N: Tensor,
    top_k_N: Tensor,
    top_p_N: Tensor,
    min_p_N: Tensor,
    seed_N: Tensor,
    step_N: Tensor,
) -> Tensor:
    """See `peftkit_kernels.reference.sample`. The sum that top-p is a share of is float32, the draw is float64."""
    num_rows, vocab = logits_NV.shape
    device = logits_NV.device
    token_N = torch.empty(num_rows, dtype=torch.int64, device=device)
    if not num_rows:
        return token_N
    logits_NV = logits_NV if logits_NV.stride(1) == 1 else logits_NV.contiguous()
    chunk = min(_CHUNK, max(16, triton.next_power_of_2(vocab)))
    num_chunks = triton.cdiv(vocab, chunk)
    sizes = {"VOCAB": vocab, "CHUNKS": num_chunks, "CHUNKS_PADDED": triton.next_power_of_2(num_chunks)}
    peak_NC = torch.empty(num_rows, num_chunks, dtype=torch.float32, device=device)
    place_NC = torch.empty(num_rows, num_chunks, dtype=torch.int32, device=device)
    mass_NC = torch.empty(num_rows, num_chunks, dtype=torch.float64, device=device)
    peak_N = torch.empty(num_rows, dtype=torch.float32, device=device)
    limit_N = torch.empty(num_rows, dtype=torch.float32, device=device)
    stride = logits_NV.stride(0)
    temperature_N, top_k_N, top_p_N = temperature_N.contiguous(), top_k_N.contiguous(), top_p_N.contiguous()
    min_p_N, seed_N, step_N = min_p_N.contiguous(), seed_N.contiguous(), step_N.contiguous()
    spread = (num_rows, num_chunks)
    _peak[spread](logits_NV, peak_NC, place_NC, stride, VOCAB=vocab, CHUNKS=num_chunks, CHUNK=chunk, num_warps=8)
    _limit[(num_rows,)](
        logits_NV,
        temperature_N,
        top_k_N,
        top_p_N,
        peak_NC,
        place_NC,
        peak_N,
        limit_N,
        token_N,
        stride,
        **sizes,
        BLOCK=min(_LIMIT_BLOCK, max(16, triton.next_power_of_2(vocab))),
        LAST_BIT=_LAST_BIT[logits_NV.dtype],
        num_warps=_LIMIT_WARPS,
    )
    drawn = (logits_NV, temperature_N, min_p_N, peak_N, limit_N, token_N)
    _mass[spread](*drawn, mass_NC, stride, VOCAB=vocab, CHUNKS=num_chunks, CHUNK=chunk, num_warps=8)
    _pick[(num_rows,)](*drawn, mass_NC, seed_N, step_N, stride, **sizes, CHUNK=chunk, num_warps=8)
    return token_N


@triton.jit
def _peak(logits, peak, place, stride, VOCAB: tl.constexpr, CHUNKS: tl.constexpr, CHUNK: tl.constexpr):
    """A chunk's largest logit, infinite where one is no number, and its lowest id."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    logit = tl.load(logits + row * stride + token, mask=token < VOCAB, other=float("-inf")).to(tl.float32)
    logit = tl.where(logit != logit, float("inf"), logit)
    largest = tl.max(logit, axis=0)
    tl.store(peak + row * CHUNKS + chunk, largest)
    tl.store(place + row * CHUNKS + chunk, tl.min(tl.where(logit == largest, token, VOCAB), axis=0))


@triton.jit
def _limit(
    logits,
    temperature,
    top_k,
    top_p,
    peaks,
    places,
    peak,
    limit,
    token,
    stride,
    VOCAB: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNKS_PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
    LAST_BIT: tl.constexpr,
):
    """token: the greedy one, -1 where nothing can be drawn, -2 where a draw is to come."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.arange(0, CHUNKS_PADDED)
    peak_C = tl.load(peaks + row * CHUNKS + chunk, mask=chunk < CHUNKS, other=float("-inf"))
    place_C = tl.load(places + row * CHUNKS + chunk, mask=chunk < CHUNKS, other=VOCAB)
    largest = tl.max(peak_C, axis=0)
    heat = tl.load(temperature + row)
    greedy = tl.min(tl.where(peak_C == largest, place_C, VOCAB), axis=0)
    finite = (largest < float("inf")) & (largest > float("-inf"))
    tl.store(peak + row, largest)
    tl.store(token + row, tl.where(finite, tl.where(heat == 0.0, greedy, -2), -1).to(tl.int64))
    floor = tl.full((), float("-inf"), tl.float32)
    if finite & (heat > 0.0):
        row_logits = logits + row * stride
        k = tl.load(top_k + row)
        if (k > 0) & (k < VOCAB):
            floor = _descend(row_logits, largest, 1.0, floor, k.to(tl.float32), False, VOCAB, BLOCK, LAST_BIT)
        share = tl.load(top_p + row)
        if share < 1.0:
            cold = 1.4426950408889634 / heat  # log₂ e
            total = _reach(row_logits, largest, cold, floor, floor, floor, True, VOCAB, BLOCK)
            floor = _descend(row_logits, largest, cold, floor, total[0] * share, True, VOCAB, BLOCK, LAST_BIT)
    tl.store(limit + row, floor)


@triton.jit
def _descend(
    logits,
    largest,
    cold,
    floor,
    wanted,
    WEIGHED: tl.constexpr,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
    LAST_BIT: tl.constexpr,
):
    """The largest logit such that what is there or above, and not below `floor`, reaches what is wanted."""
    found = tl.full((), -2147483648, tl.int64)
    for step in range((32 - LAST_BIT) // 2):
        unit = tl.full((), 1, tl.int64) << (30 - 2 * step)
        one = tl.maximum(_logit(found + unit), floor)
        two = tl.maximum(_logit(found + 2 * unit), floor)
        three = tl.maximum(_logit(found + 3 * unit), floor)
        reach = _reach(logits, largest, cold, one, two, three, WEIGHED, VOCAB, BLOCK)
        digit = (reach[0] >= wanted).to(tl.int64) + (reach[1] >= wanted).to(tl.int64)
        found += unit * (digit + (reach[2] >= wanted).to(tl.int64))
    return tl.maximum(_logit(found), floor)


@triton.jit
def _reach(logits, largest, cold, one, two, three, WEIGHED: tl.constexpr, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """How many tokens, or how much weight, stand at each of three logits or above."""
    sum_one, sum_two = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    sum_three = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, VOCAB, BLOCK):
        token = start + tl.arange(0, BLOCK)
        logit = tl.load(logits + token, mask=token < VOCAB, other=float("-inf")).to(tl.float32)
        value = 1.0
        if WEIGHED:
            value = tl.exp2((logit - largest) * cold)
        sum_one += (logit >= one).to(tl.float32) * value
        sum_two += (logit >= two).to(tl.float32) * value
        sum_three += (logit >= three).to(tl.float32) * value
    return tl.sum(sum_one, axis=0), tl.sum(sum_two, axis=0), tl.sum(sum_three, axis=0)


@triton.jit
def _logit(rank):
    """Integers to the float32 of the same order; beyond the infinities there are only these."""
    bits = tl.minimum(tl.maximum(rank, -2139095041), 2139095040).to(tl.int32)
    return tl.where(bits >= 0, bits, bits ^ 0x7FFFFFFF).to(tl.float32, bitcast=True)


@triton.jit
def _weight(logits, temperature, min_p, peak, limit, row, token, VOCAB: tl.constexpr):
    """Float64 weights of a row's tokens, 0 for those that aren't kept."""
    logit = tl.load(logits + token, mask=token < VOCAB, other=float("-inf")).to(tl.float32)
    below = logit.to(tl.float64) - tl.load(peak + row).to(tl.float64)
    weight = tl.exp(below * (1.0 / tl.load(temperature + row).to(tl.float64)))
    kept = (token < VOCAB) & (logit >= tl.load(limit + row))
    return tl.where(kept & (weight >= tl.load(min_p + row).to(tl.float64)), weight, 0.0)


@triton.jit
def _mass(
    logits,
    temperature,
    min_p,
    peak,
    limit,
    token,
    mass,
    stride,
    VOCAB: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if tl.load(token + row) == -2:
        ids = chunk * CHUNK + tl.arange(0, CHUNK)
        weight = _weight(logits + row * stride, temperature, min_p, peak, limit, row, ids, VOCAB)
        tl.store(mass + row * CHUNKS + chunk, tl.sum(weight, axis=0))


@triton.jit
def _pick(
    logits,
    temperature,
    min_p,
    peak,
    limit,
    token,
    mass,
    seed,
    step,
    stride,
    VOCAB: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNKS_PADDED: tl.constexpr,
    CHUNK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    if tl.load(token + row) == -2:
        number = tl.arange(0, CHUNKS_PADDED)
        mass_C = tl.load(mass + row * CHUNKS + number, mask=number < CHUNKS, other=0.0)
        end_C = tl.cumsum(mass_C, axis=0)
        wanted = _uniform(tl.load(seed + row), tl.load(step + row)) * tl.max(end_C, axis=0)
        chunk = tl.min(tl.where(end_C > wanted, number, CHUNKS - 1), axis=0)
        before = tl.sum(tl.where(number == chunk - 1, end_C, 0.0), axis=0)
        ids = chunk * CHUNK + tl.arange(0, CHUNK)
        weight = _weight(logits + row * stride, temperature, min_p, peak, limit, row, ids, VOCAB)
        passed = before + tl.cumsum(weight, axis=0) > wanted
        # two orders of addition may differ by an ulp, and then none passes: the last that is kept is meant
        last = tl.max(tl.where(weight > 0.0, ids, 0), axis=0)
        tl.store(token + row, tl.minimum(tl.min(tl.where(passed, ids, VOCAB), axis=0), last).to(tl.int64))


@triton.jit
def _uniform(seed, step):
    """See `peftkit_kernels.reference.uniform`."""
    gamma = tl.full((), 0x9E3779B97F4A7C15, tl.uint64)
    bits = _mix(_mix(seed.to(tl.uint64, bitcast=True) + gamma) + step.to(tl.uint64, bitcast=True) * gamma)
    return (bits >> 11).to(tl.float64) * (1.0 / 9007199254740992.0)


@triton.jit
def _mix(z):
    z = (z ^ (z >> 30)) * tl.full((), 0xBF58476D1CE4E5B9, tl.uint64)
    z = (z ^ (z >> 27)) * tl.full((), 0x94D049BB133111EB, tl.uint64)
    return z ^ (z >> 31)


def specimens() -> Iterator[Specimen]:
    """Llama's vocabulary of 128256 in bfloat16 and float32."""
    vocab = 128256
    num_chunks = triton.cdiv(vocab, _CHUNK)
    sizes = {"VOCAB": vocab, "CHUNKS": num_chunks}
    padded = {**sizes, "CHUNKS_PADDED": triton.next_power_of_2(num_chunks)}
    drawn = {"temperature": "*fp32", "min_p": "*fp32", "peak": "*fp32", "limit": "*fp32", "token": "*i64"}
    asked = {"temperature": "*fp32", "top_k": "*i32", "top_p": "*fp32", "peaks": "*fp32", "places": "*i32"}
    asked |= {"peak": "*fp32", "limit": "*fp32", "token": "*i64"}
    for dtype, last_bit in (("*bf16", 16), ("*fp32", 0)):
        for kernel, pointers, constants, num_warps in (
            (_peak, {"peak": "*fp32", "place": "*i32"}, {**sizes, "CHUNK": _CHUNK}, 8),
            (_limit, asked, {**padded, "BLOCK": _LIMIT_BLOCK, "LAST_BIT": last_bit}, _LIMIT_WARPS),
            (_mass, {**drawn, "mass": "*fp64"}, {**sizes, "CHUNK": _CHUNK}, 8),
            (_pick, {**drawn, "mass": "*fp64", "seed": "*i64", "step": "*i64"}, {**padded, "CHUNK": _CHUNK}, 8),
        ):
            signature = {"logits": dtype, **pointers, "stride": "i32", **dict.fromkeys(constants, "constexpr")}
            yield Specimen(kernel, signature, constants, num_warps, num_stages=1)
