"""The cases of `peftkit bench serve` by name, in the order in which they run.

Throughput and decode latency (S1, S2) have an engine of their own, whose adapters are as many as vLLM's beside it has;
all others share one. An engine is made when the first chosen case needs it, and prints a line of its start.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self

from peftkit_bench import serve, serve_facts, serve_profile, serve_steady
from peftkit_bench.serve_adapters import MIXED, RANK_8, RANK_16, Family
from peftkit_bench.serve_fleet import Fleet, Line, Sizes, release_memory
from peftkit_bench.serve_replay import Replays

EngineKind = Literal["bench", "fleet"]


@dataclass(frozen=True)
class Case:
    """What is measured under a name."""

    name: str
    engine: EngineKind
    run: Callable[[Any], Iterable[Line]]
    """Takes the engine's `Bench` or `Fleet`."""


def all_cases(settings: serve.Settings, sizes: Sizes, *, profiled: bool) -> list[Case]:
    """Every case; the profiles only where they are asked for."""
    cases: list[Case] = []
    for adapters in settings.adapters:
        for batch in settings.batches:
            cases.append(_bench(f"S2 decode adapters={adapters} rows={batch}", "decode", adapters, batch))
        for dist in ("uniform", "zipf") if adapters > 32 else ("uniform",):
            cases.append(_bench(f"S1 throughput adapters={adapters} {dist}", "throughput", adapters, dist))
    context, rows = sizes.long_context, sizes.rows
    for adapters in (0, 8, rows):
        for batch in (1, 8, rows):
            name = f"S2 decode adapters={adapters} rows={batch} context={context}"
            cases.append(_fleet(name, serve_steady.decode_case, adapters, batch, context))
    replays = Replays()
    for family, counts in ((RANK_8, sizes.replayed), (MIXED, sizes.replayed_mixed)):
        for count in counts:
            name = f"S3 replay {_ranks(family)} adapters={count}"
            cases.append(Case(name, "fleet", lambda fleet, family=family, count=count: replays(fleet, family, count)))
    cases.append(_fleet(f"S4 kinds rows={rows}", serve_steady.kinds_case))
    cases.append(_fleet(f"S5 churn rows={rows}", serve_steady.churn_case))
    cases.append(_fleet(f"base traffic adapters={sizes.loaded}", serve_steady.base_case))
    for beside in (0, rows - 1):
        cases.append(_fleet(f"first token beside={beside}", serve_facts.cold_case, beside))
    cases.append(_fleet(f"pages mean={sizes.mean_length}", serve_facts.pages_case))
    for family in (RANK_8, MIXED, RANK_16):
        cases.append(_fleet(f"memory {_ranks(family)}", serve_facts.memory_case, family))
    if sizes.shape != "8b":
        cases.append(_fleet("memory 8b rank=16", lambda _: serve_facts.packed_case("8b", RANK_16)))
    return cases + (_profiles(sizes) if profiled else [])


def _profiles(sizes: Sizes) -> list[Case]:
    cases: list[Case] = []
    for adapters, rows in ((0, 1), (1, 1), (0, sizes.rows), (8, sizes.rows), (sizes.rows, sizes.rows)):
        name = f"profile decode adapters={adapters} rows={rows}"
        cases.append(_fleet(name, serve_profile.decode_case, adapters, rows))
    for tokens in (sizes.prompt, sizes.max_tokens_per_step):
        for adapters in (0, 1, 8):
            name = f"profile prefill adapters={adapters} tokens={tokens}"
            cases.append(_fleet(name, serve_profile.prefill_case, adapters, tokens))
    return cases


def measure(
    cases: Sequence[Case], settings: serve.Settings, sizes: Sizes, limit_s: float | None = None
) -> Iterator[Line]:
    """The cases' lines, each with its case's name; no case begins after `limit_s` seconds.

    A case that fails is a line with an "error", and its engine is made anew.
    """
    begun = time.perf_counter()
    with _Engines(settings, sizes) as engines:
        for number, case in enumerate(cases):
            if limit_s is not None and time.perf_counter() - begun > limit_s:
                yield {"case": "left out", "names": [one.name for one in cases[number:]]}
                return
            error: str | None = None
            try:
                yield from engines.run(case)
            except Exception as failure:  # one case's failure is its line's, and the command's exit code
                error = f"{type(failure).__name__}: {failure}"[:400]
            if error is not None:  # only here nothing refers to what the engine held
                engines.close()
                yield {"case": "error", "name": case.name, "error": error}


class _Engines:
    """One engine at a time."""

    def __init__(self, settings: serve.Settings, sizes: Sizes) -> None:
        self._settings, self._sizes = settings, sizes
        self._bench: serve.Bench | None = None
        self._fleet: Fleet | None = None

    def run(self, case: Case) -> Iterator[Line]:
        """A case's lines, and before them that of its engine's start if it is made for it."""
        begun = time.perf_counter()
        if case.engine == "bench" and self._bench is None:
            self.close()
            self._bench = serve.Bench(self._settings)
            yield self._bench.start
        if case.engine == "fleet" and self._fleet is None:
            self.close()
            self._fleet = Fleet(self._sizes)
            yield serve_facts.start_line(self._fleet)
        for line in case.run(self._bench if case.engine == "bench" else self._fleet):
            took_s = round(time.perf_counter() - begun, 2)
            yield {"case": line["case"], "name": case.name, **line, "took_s": took_s}

    def close(self) -> None:
        """No engine holds memory any more."""
        if self._fleet is not None:
            self._fleet.close()
        self._bench = self._fleet = None
        release_memory()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _bench(name: str, method: str, *arguments: Any) -> Case:
    return Case(name, "bench", lambda bench: [getattr(bench, method)(*arguments)])


def _fleet(name: str, run: Callable[..., Line], *arguments: Any) -> Case:
    return Case(name, "fleet", lambda fleet: [run(fleet, *arguments)])


def _ranks(family: Family) -> str:
    return f"rank={','.join(map(str, family.ranks))}"
