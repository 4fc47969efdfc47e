"""What an engine costs before and beside its speed: start-up, pages' waste, adapters a GiB, cold first tokens."""

import statistics
import tempfile
import time
from pathlib import Path

import torch

from peftkit_bench.serve_adapters import MIXED, RANK_16, AdapterMaker, Family
from peftkit_bench.serve_fleet import Fleet, Line
from peftkit_bench.serve_http_figures import spread
from peftkit_bench.serve_inputs import SHAPES, write_config
from peftkit_serve.models.spec import read_spec
from peftkit_serve.pages import PAGE_TOKENS

_WASTE_GOAL = 0.04
_COLD_GOAL_MS = 15.0
_COLD_REPEATS = 5


def start_line(fleet: Fleet) -> Line:
    """Until the engine is ready, and its very first requests: nothing is left to be compiled, so they are like later
    ones."""
    firsts = [1e3 * fleet.first_token_s(None, fleet.sizes.prompt) for _ in range(6)]
    stats = fleet.engine.stats()
    return {
        "case": "start",
        "engine_s": round(fleet.engine_s, 2),
        "first_request_ms": round(firsts[0], 2),
        "later_requests_ms": spread(firsts[1:], 2),
        "adapter_slots": stats["adapter_slots"],
        "pages": stats["pages_total"],
        "weight_bytes": stats["weight_bytes"],
        "kv_bytes": stats["kv_bytes"],
    }


def pages_case(fleet: Fleet) -> Line:
    """The share of held pages' cells that no token is in, while sequences of a mean length grow by a token a step.

    Their lengths lie evenly from half to one and a half of the mean.
    """
    sizes, steps = fleet.sizes, 2 * PAGE_TOKENS
    mean = sizes.mean_length
    lengths = [mean // 2 + round(mean * (row + 0.5) / sizes.rows) - steps // 2 for row in range(sizes.rows)]
    fleet.fill([None] * sizes.rows, [max(1, length) for length in lengths])
    wastes: list[float] = []
    means: list[float] = []
    for _ in range(steps):
        fleet.step()
        held = [live.num_virtual + live.num_computed for live in fleet.engine._scheduler.running]
        wastes.append(1 - sum(held) / (PAGE_TOKENS * fleet.engine.stats()["pages_used"]))
        means.append(statistics.mean(held))
    fleet.clear()
    waste = statistics.mean(wastes)
    return {
        "case": "pages",
        "rows": sizes.rows,
        "mean_length": round(statistics.mean(means), 1),
        "page_tokens": PAGE_TOKENS,
        "waste": round(waste, 4),
        "min": round(min(wastes), 4),
        "max": round(max(wastes), 4),
        "steps": steps,
        "goals": {"waste": _WASTE_GOAL},
        "met": {"waste": waste < _WASTE_GOAL},
    }


def memory_case(fleet: Fleet, family: Family) -> Line:
    """How many adapters a GiB of the device's memory holds: each at its own ranks, in whole units."""
    fleet.unload()
    names = fleet.adapters(family, 2 * len(MIXED.ranks))
    fleet.make_resident(names)
    stats = fleet.engine.stats()
    assert stats["adapters_resident"] == len(names)
    return _memory_line(family, fleet.weight_bytes(names) / len(names), stats["adapter_bytes"] / len(names))


def packed_case(shape: str, family: Family) -> Line:
    """The same for a base of another shape in bfloat16, as adapters are packed for it: no device holds them."""
    with tempfile.TemporaryDirectory() as folder:
        spec = read_spec(write_config(Path(folder), SHAPES[shape], 8192))
    maker = AdapterMaker(spec, torch.bfloat16, torch.device("cpu"))
    sizes = [maker.lora_bytes(family, number) for number in range(len(family.ranks))]
    weights, device = (statistics.mean(column) for column in zip(*sizes, strict=True))
    return _memory_line(family, weights, device) | {"shape": shape}


def _memory_line(family: Family, weight_bytes: float, device_bytes: float) -> Line:
    return {
        "case": "adapter memory",
        "ranks": list(family.ranks),
        "projections": len(family.projections),
        "weight_bytes": round(weight_bytes),
        "device_bytes": round(device_bytes),
        "padding": round(1 - weight_bytes / device_bytes, 4),
        "per_gib": round((1 << 30) / device_bytes, 2),
    }


def cold_case(fleet: Fleet, beside: int) -> Line:
    """A request's first token by where its adapter is: on the device, in host memory, in a folder (whose file the
    system holds in memory); alone, or beside so many rows that decode."""
    sizes = fleet.sizes
    fleet.unload()
    warm, host, *others = fleet.adapters(RANK_16, 2 + beside)
    folder = fleet.maker.write(RANK_16, 20_000, fleet.folder / f"cold-{beside}")
    fleet.make_resident([warm, *others])
    if beside:
        fleet.fill(others, sizes.prompt)
    times: dict[str, list[float]] = {"warm": [], "host": [], "disk": []}
    for _ in range(_COLD_REPEATS + 1):
        times["warm"].append(1e3 * fleet.first_token_s(warm, sizes.prompt))
        fleet.evict(host)
        times["host"].append(1e3 * fleet.first_token_s(host, sizes.prompt))
        times["disk"].append(1e3 * _first_from_disk_s(fleet, folder))
    fleet.clear()
    medians = {place: statistics.median(some[1:]) for place, some in times.items()}  # the first one is for warmth
    over = {place: round(medians[place] - medians["warm"], 3) for place in ("host", "disk")}
    return {
        "case": "first token",
        "beside": beside,
        "prompt_tokens": sizes.prompt,
        "adapter_bytes": fleet.weight_bytes([host]),
        **{f"{place}_ms": spread(some[1:], 3) for place, some in times.items()},
        "over_warm_ms": over,
        "goals": {"over_warm_ms": _COLD_GOAL_MS},
        "met": {"over_warm_ms": over["host"] <= _COLD_GOAL_MS},
    }


def _first_from_disk_s(fleet: Fleet, folder: Path) -> float:
    """From the beginning of the load; what else there is goes on meanwhile."""
    begun = time.perf_counter()
    ticket = fleet.engine.adapters.begin(folder.name, folder)
    while fleet.live and not ticket.future.done():
        fleet.step()
    fleet.engine.adapters.register(ticket)
    loaded_s = time.perf_counter() - begun
    first_s = fleet.first_token_s(folder.name, fleet.sizes.prompt)
    fleet.engine.adapters.remove(folder.name)
    return loaded_s + first_s
