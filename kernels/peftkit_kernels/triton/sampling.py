"""Sampling without a sort: three kernels, none of which waits for the host.

peak     largest logit of each group of a row's logits
limit    of a row: the greedy token; or the smallest logit that top-k and top-p keep. The bits of a logit are mapped to
         an integer of the same order, and three counts (or sums of weight) say in which quarter of the range the limit
         lies, two bits at a time. k groups have a largest logit that reaches the k-th largest of these, so k logits do:
         what top-k keeps lies in the groups that reach it. Where these are few, their logits fit in registers, and the
         row's token is drawn at once
draw     otherwise float64 weights of each chunk of the row; the program that finishes a row's last chunk takes the
         chunk in which the cumulative weight passes the drawn number, and the token within it
"""
# pyright: reportMissingParameterType=false, reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from peftkit_kernels.triton.compile import Specimen
from peftkit_kernels.triton.counts import cdiv, next_power_of_2
from peftkit_kernels.triton.device import counters_of

_CHUNK = 2048  # logits a program of the passes that are spread over the card
_PEAK_CHUNK = 4096
_GROUP = 32  # logits under one peak
_FEW_GROUPS = 128  # groups whose logits a program holds
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
    chunk = min(_CHUNK, max(16, next_power_of_2(vocab)))
    num_chunks = cdiv(vocab, chunk)
    num_groups = cdiv(vocab, _GROUP)
    peak_NG = torch.empty(num_rows, num_groups, dtype=torch.float32, device=device)
    few = min(_FEW_GROUPS, next_power_of_2(num_groups))
    few_NF = torch.empty(num_rows, few, dtype=torch.int32, device=device)
    mass_NC = torch.empty(num_rows, num_chunks, dtype=torch.float64, device=device)
    peak_N = torch.empty(num_rows, dtype=torch.float32, device=device)
    limit_N = torch.empty(num_rows, dtype=torch.float32, device=device)
    stride = logits_NV.stride(0)
    temperature_N, top_k_N, top_p_N = temperature_N.contiguous(), top_k_N.contiguous(), top_p_N.contiguous()
    min_p_N, seed_N, step_N = min_p_N.contiguous(), seed_N.contiguous(), step_N.contiguous()
    peak_chunk = min(_PEAK_CHUNK, max(_GROUP, next_power_of_2(vocab)))
    _peak[(num_rows, cdiv(vocab, peak_chunk))](
        logits_NV, peak_NG, stride, VOCAB=vocab, GROUPS=num_groups, GROUP=_GROUP, CHUNK=peak_chunk, num_warps=4
    )
    _limit[(num_rows,)](
        logits_NV, temperature_N, top_k_N, top_p_N, min_p_N, seed_N, step_N, peak_NG, few_NF, peak_N, limit_N, token_N,
        stride, VOCAB=vocab, GROUPS=num_groups, GROUPS_PADDED=next_power_of_2(num_groups), GROUP=_GROUP,
        FEW=few, BLOCK=min(_LIMIT_BLOCK, max(16, next_power_of_2(vocab))), LAST_BIT=_LAST_BIT[logits_NV.dtype],
        num_warps=_LIMIT_WARPS,
    )  # fmt: skip
    counters = counters_of("sample", next_power_of_2(max(num_rows, 1024)), device)
    _draw[(num_rows, num_chunks)](
        logits_NV, temperature_N, min_p_N, peak_N, limit_N, token_N, mass_NC, counters, seed_N, step_N, stride,
        VOCAB=vocab, CHUNKS=num_chunks, CHUNKS_PADDED=next_power_of_2(num_chunks), CHUNK=chunk, num_warps=8,
    )  # fmt: skip
    return token_N


@triton.jit
def _peak(logits, peak, stride, VOCAB: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr, CHUNK: tl.constexpr):
    """The largest logit of each group, infinite where one is no number."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    logit = tl.load(logits + row * stride + token, mask=token < VOCAB, other=float("-inf")).to(tl.float32)
    logit = tl.where(logit != logit, float("inf"), logit)
    group = chunk * (CHUNK // GROUP) + tl.arange(0, CHUNK // GROUP)
    largest = tl.max(tl.reshape(logit, (CHUNK // GROUP, GROUP)), axis=1)
    tl.store(peak + row * GROUPS + group, largest, mask=group < GROUPS)


@triton.jit
def _limit(
    logits, temperature, top_k, top_p, min_p, seed, step, peaks, few, peak, limit, token, stride,
    VOCAB: tl.constexpr, GROUPS: tl.constexpr, GROUPS_PADDED: tl.constexpr, GROUP: tl.constexpr, FEW: tl.constexpr,
    BLOCK: tl.constexpr, LAST_BIT: tl.constexpr,
):  # fmt: skip
    """token: the greedy or the drawn one, -1 where nothing can be drawn, -2 where a draw is to come."""
    row = tl.program_id(0).to(tl.int64)
    row_logits = logits + row * stride
    group = tl.arange(0, GROUPS_PADDED)
    peak_G = tl.load(peaks + row * GROUPS + group, mask=group < GROUPS, other=float("-inf"))
    heat, k, share = tl.load(temperature + row), tl.load(top_k + row), tl.load(top_p + row)
    largest = tl.max(peak_G, axis=0)
    by_count = (k > 0) & (k < VOCAB)
    lowest = tl.full((), float("-inf"), tl.float32)
    choice = tl.full((), -1, tl.int32)
    if (largest < float("inf")) & (largest > float("-inf")):
        choice -= 1
        if heat == 0.0:
            ids = tl.min(tl.where(peak_G == largest, group, GROUPS), axis=0) * GROUP + tl.arange(0, GROUP)
            logit = tl.load(row_logits + ids, mask=ids < VOCAB, other=float("-inf")).to(tl.float32)
            choice = tl.min(tl.where(logit == largest, ids, VOCAB), axis=0)
        elif by_count | (share < 1.0):
            cold = 1.4426950408889634 / heat  # log₂ e
            drawn = _uniform(tl.load(seed + row), tl.load(step + row))
            choice = _draw_few(
                row_logits, peak_G, few + row * FEW, largest, heat, cold, by_count, k, share, tl.load(min_p + row),
                drawn, VOCAB, GROUPS, GROUPS_PADDED, GROUP, FEW, BLOCK, LAST_BIT,
            )  # fmt: skip
            if choice == -2:
                if by_count:
                    lowest = _descend(row_logits, largest, 1.0, lowest, k.to(tl.float32), False, VOCAB, BLOCK, LAST_BIT)
                if share < 1.0:
                    wanted = share * _reach(row_logits, largest, cold, lowest, lowest, lowest, True, VOCAB, BLOCK)[0]
                    lowest = _descend(row_logits, largest, cold, lowest, wanted, True, VOCAB, BLOCK, LAST_BIT)
    tl.store(peak + row, largest)
    tl.store(token + row, choice)
    tl.store(limit + row, lowest)


@triton.jit
def _draw_few(
    logits, peak_G, few, largest, heat, cold, by_count, k, share, least, drawn,
    VOCAB: tl.constexpr, GROUPS: tl.constexpr, GROUPS_PADDED: tl.constexpr, GROUP: tl.constexpr, FEW: tl.constexpr,
    BLOCK: tl.constexpr, LAST_BIT: tl.constexpr,
):  # fmt: skip
    """The token drawn, where all that is kept lies in at most FEW groups; otherwise -2."""
    nothing = tl.full((), float("-inf"), tl.float32)
    choice = tl.full((), -2, tl.int32)
    wanted = tl.where(by_count, k, FEW // 2)
    least_peak = _nth(peak_G, 1.0, nothing, tl.minimum(wanted, GROUPS).to(tl.float32), LAST_BIT)
    least_peak = tl.where(wanted > GROUPS, nothing, least_peak)
    group = tl.arange(0, GROUPS_PADDED)
    held = (peak_G >= least_peak) & (group < GROUPS)
    num_held = tl.sum(held.to(tl.int32), axis=0)
    if num_held <= FEW:
        tl.store(few + tl.cumsum(held.to(tl.int32), axis=0) - 1, group, mask=held)
        tl.debug_barrier()  # other threads' groups are read
        slot = tl.arange(0, FEW)
        first = tl.load(few + slot, mask=slot < num_held, other=GROUPS) * GROUP
        ids = tl.reshape(first[:, None] + tl.arange(0, GROUP)[None, :], (FEW * GROUP,))
        logit = tl.load(logits + ids, mask=ids < VOCAB, other=float("-inf")).to(tl.float32)
        lowest = least_peak
        if by_count:
            lowest = tl.maximum(lowest, _nth(logit, 1.0, nothing, k.to(tl.float32), LAST_BIT))
        enough = by_count
        if share < 1.0:
            value = tl.exp2((logit - largest) * cold)
            inside = tl.sum(tl.where(logit >= lowest, value, 0.0), axis=0)
            total = inside
            if not by_count:
                total = _reach(logits, largest, cold, nothing, nothing, nothing, True, VOCAB, BLOCK)[0]
            enough = enough | (inside >= total * share)
            if enough:
                lowest = _nth(logit, value, lowest, total * share, LAST_BIT)
        if enough:
            weight = _weigh(logit, heat, largest, lowest, least)
            end = tl.cumsum(weight, axis=0)
            passed = end > drawn * tl.max(end, axis=0)
            last = tl.max(tl.where(weight > 0.0, ids, 0), axis=0)
            choice = tl.minimum(tl.min(tl.where(passed, ids, VOCAB), axis=0), last)
    return choice


@triton.jit
def _nth(values, weights, floor, wanted, LAST_BIT: tl.constexpr):
    """`_descend` among values in registers."""
    found = tl.full((), -2147483648, tl.int64)
    for step in range((32 - LAST_BIT) // 2):
        unit = tl.full((), 1, tl.int64) << (30 - 2 * step)
        one = tl.sum(tl.where(values >= tl.maximum(_logit(found + unit), floor), weights, 0.0), axis=0)
        two = tl.sum(tl.where(values >= tl.maximum(_logit(found + 2 * unit), floor), weights, 0.0), axis=0)
        three = tl.sum(tl.where(values >= tl.maximum(_logit(found + 3 * unit), floor), weights, 0.0), axis=0)
        digit = (one >= wanted).to(tl.int64) + (two >= wanted).to(tl.int64)
        found += unit * (digit + (three >= wanted).to(tl.int64))
    return tl.maximum(_logit(found), floor)


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
def _weigh(logit, heat, largest, limit, least):
    """Float64 weights, 0 for logits that aren't kept."""
    below = logit.to(tl.float64) - largest.to(tl.float64)
    weight = tl.exp(below * (1.0 / heat.to(tl.float64)))
    return tl.where((logit >= limit) & (weight >= least.to(tl.float64)), weight, 0.0)


@triton.jit
def _draw(
    logits, temperature, min_p, peak, limit, token, mass, arrived, seed, step, stride,
    VOCAB: tl.constexpr, CHUNKS: tl.constexpr, CHUNKS_PADDED: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """A chunk's weight; after a row's last one, the row's token. `arrived` is zero again at the end."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if tl.load(token + row) != -2:
        return
    heat, largest, lowest = tl.load(temperature + row), tl.load(peak + row), tl.load(limit + row)
    least, row_logits = tl.load(min_p + row), logits + row * stride
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    logit = tl.load(row_logits + ids, mask=ids < VOCAB, other=float("-inf")).to(tl.float32)
    tl.store(mass + row * CHUNKS + chunk, tl.sum(_weigh(logit, heat, largest, lowest, least), axis=0))
    tl.debug_barrier()  # every thread's stores before the one that counts
    if tl.atomic_add(arrived + row, 1, sem="acq_rel") == CHUNKS - 1:
        tl.store(arrived + row, 0)
        number = tl.arange(0, CHUNKS_PADDED)
        mass_C = tl.load(mass + row * CHUNKS + number, mask=number < CHUNKS, other=0.0, cache_modifier=".cg")
        end_C = tl.cumsum(mass_C, axis=0)
        wanted = _uniform(tl.load(seed + row), tl.load(step + row)) * tl.max(end_C, axis=0)
        chunk = tl.min(tl.where(end_C > wanted, number, CHUNKS - 1), axis=0)
        before = tl.sum(tl.where(number == chunk - 1, end_C, 0.0), axis=0)
        ids = chunk * CHUNK + tl.arange(0, CHUNK)
        logit = tl.load(row_logits + ids, mask=ids < VOCAB, other=float("-inf")).to(tl.float32)
        weight = _weigh(logit, heat, largest, lowest, least)
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
    num_chunks, num_groups = cdiv(vocab, _CHUNK), cdiv(vocab, _GROUP)
    groups = {"VOCAB": vocab, "GROUPS": num_groups, "GROUP": _GROUP}
    padded = {"CHUNKS": num_chunks, "CHUNKS_PADDED": next_power_of_2(num_chunks)}
    asked = {
        "temperature": "*fp32",
        "top_k": "*i32",
        "top_p": "*fp32",
        "min_p": "*fp32",
        "seed": "*i64",
        "step": "*i64",
    }
    asked |= {"peaks": "*fp32", "few": "*i32", "peak": "*fp32", "limit": "*fp32", "token": "*i64"}
    drawn = {"temperature": "*fp32", "min_p": "*fp32", "peak": "*fp32", "limit": "*fp32", "token": "*i64"}
    drawn |= {"mass": "*fp64", "arrived": "*i32", "seed": "*i64", "step": "*i64"}
    for dtype, last_bit in (("*bf16", 16), ("*fp32", 0)):
        block = {"GROUPS_PADDED": next_power_of_2(num_groups), "FEW": _FEW_GROUPS, "BLOCK": _LIMIT_BLOCK}
        for kernel, pointers, constants, num_warps in (
            (_peak, {"peak": "*fp32"}, {**groups, "CHUNK": _PEAK_CHUNK}, 4),
            (_limit, asked, {**groups, **block, "LAST_BIT": last_bit}, _LIMIT_WARPS),
            (_draw, drawn, {"VOCAB": vocab, **padded, "CHUNK": _CHUNK}, 8),
        ):
            signature = {"logits": dtype, **pointers, "stride": "i32", **dict.fromkeys(constants, "constexpr")}
            yield Specimen(kernel, signature, constants, num_warps, num_stages=1)
