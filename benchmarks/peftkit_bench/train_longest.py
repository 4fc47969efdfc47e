"""The longest sequence that trains in the memory of usual cards, by the estimate of `peftkit train`, and one of them
tried.

    bytes(T) = a + b T                             at each level of recomputation, from rehearsals of two lengths with
                                                   a few layers
    bytes(T) ≤ (card − driver) · (1 − gaps)        the longest is the largest such T
"""

import time
from collections.abc import Iterator
from typing import Any

import torch

from peftkit.data.sampler import Shape
from peftkit.methods import detach
from peftkit.train.loop import Trainer
from peftkit.train.memory import estimate_memory
from peftkit.train.prepare import Prepared
from peftkit.train.recompute import Recompute, decoder_layers, set_recompute
from peftkit_bench.train import Bench, Case, Settings, let_go

CARDS_GB = (24, 48, 80, 141)
_LEVELS = (Recompute(), Recompute("selective"), Recompute("full"), Recompute("offload"))
_DRIVER_BYTES = 0.9e9
"""What the driver keeps for a process, kernels' code among it: 0.89 GB on an H200, and taken for any card's."""
_GAPS = 0.09
"""Share of the rest that is allowed for what torch's allocator can't give, free pieces between blocks in use: where a
trial on an H200 ran out of memory, 1.6 of 21.5 GiB were such pieces."""
_LENGTHS = (4096, 8192)
_WHOLE = 256
"""Lengths are multiples of it."""
_TRIED = ("full", CARDS_GB[0])


def longest(settings: Settings, shape: str = "8b", lengths: tuple[int, int] = _LENGTHS) -> Iterator[dict[str, Any]]:
    """A line for each level, of LoRA over NF4 with one sequence a step; on a GPU one length is tried."""
    let_go()
    bench = Bench(shape, "nf4", settings)
    prepared = bench.prepared(Case(shape, "nf4", "lora", 1, lengths[0], "none"))
    for recompute in _LEVELS:
        short, long = (_needed(prepared, recompute, length) for length in lengths)
        a_token = (long - short) / (lengths[1] - lengths[0])
        start = short - a_token * lengths[0]
        found = {gb: max(int((_room(gb) - start) / a_token) // _WHOLE * _WHOLE, 0) for gb in CARDS_GB}
        line: dict[str, Any] = {
            "case": "longest",
            "name": f"{shape} nf4 lora {recompute.level}",
            "bytes": round(start),
            "bytes_a_token": round(a_token, 1),
            "tokens": found,
        }
        if recompute.level == _TRIED[0] and settings.device.type == "cuda":
            detach(prepared.model)
            line["tried"] = _tried(bench, Case(shape, "nf4", "lora", 1, found[_TRIED[1]], recompute.level), _TRIED[1])
            prepared = bench.prepared(Case(shape, "nf4", "lora", 1, lengths[0], "none"))
        yield line


def _room(gb: int) -> float:
    """Bytes of a card that weights and a step may take."""
    return (gb * 1e9 - _DRIVER_BYTES) * (1 - _GAPS)


def _needed(prepared: Prepared, recompute: Recompute, length: int) -> float:
    """Bytes of a step over one sequence, its layers taken to be alike."""
    set_recompute(prepared.model, recompute)
    count = len(decoder_layers(prepared.model))
    few, more = max(min(3, count) - 1, 1), min(3, count)
    shapes = [Shape(1, length, length, length - 1)]
    bytes_few, bytes_more = (
        estimate_memory(prepared.model, shapes, packed=False, moments_8bit=True, layers=layers).total
        for layers in (few, more)
    )
    return bytes_few + (count - few) * (bytes_more - bytes_few) / max(more - few, 1)


def _tried(bench: Bench, case: Case, gb: int) -> dict[str, Any]:
    """Two steps in so much memory, of which the driver has its part."""
    trainer = Trainer(bench.prepared(case), bench.nowhere, {})
    let_go()
    torch.cuda.reset_peak_memory_stats()
    free, total = torch.cuda.mem_get_info()
    driver = total - free - torch.cuda.memory_reserved()
    line: dict[str, Any] = {"gb": gb, "tokens": case.length, "driver_bytes": driver}
    line["held_bytes"] = torch.cuda.memory_allocated()
    torch.cuda.set_per_process_memory_fraction((gb * 1e9 - driver) / total)
    try:
        trainer._step()
        torch.cuda.synchronize()
        begun = time.perf_counter()
        trainer._step()
        torch.cuda.synchronize()
        line["step_s"] = round(time.perf_counter() - begun, 2)
    except torch.OutOfMemoryError as error:
        line["error"] = str(error)[:400]
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
        detach(trainer._model)
    line |= {"peak_bytes": torch.cuda.max_memory_allocated(), "reserved_bytes": torch.cuda.max_memory_reserved()}
    return line


HEADERS = ("longest sequence", *(f"{gb} GB" for gb in CARDS_GB), "bytes a token", "tried")


def rows(lines: list[dict[str, Any]]) -> list[list[object]]:
    """The table: tokens by level and card."""
    return [
        [line["name"], *line["tokens"].values(), line["bytes_a_token"], _text(line.get("tried"))]
        for line in lines
        if line["case"] == "longest"
    ]


def _text(tried: dict[str, Any] | None) -> str:
    if tried is None:
        return ""
    if "error" in tried:
        return f"{tried['tokens']} tokens in {tried['gb']} GB: {tried['error'][:60]}"
    return f"{tried['tokens']} tokens in {tried['gb']} GB: {tried['peak_bytes'] / 1e9:.1f} GB, {tried['step_s']} s"
