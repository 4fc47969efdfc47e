"""The engine's cases of `peftkit bench serve` beside throughput and decode latency: a toy run of each, and what their
figures say of times that are known."""

import importlib
import inspect
import itertools
import math
import pkgutil
import random
import weakref
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch

import peftkit_kernels.triton
from peftkit.cli.main import run as run_command
from peftkit_bench import serve, serve_profile, serve_tables
from peftkit_bench.serve_adapters import KINDS, MIXED, RANK_8, RANK_16
from peftkit_bench.serve_cases import Case, all_cases, measure
from peftkit_bench.serve_fleet import Fleet, Sizes, sizes_of
from peftkit_bench.serve_replay import Arrival, Run, replay, requests

SIZES = replace(sizes_of("toy", "none", "cpu", 600, 1.0, quick=True), seconds=0.4, period_s=0.1)
SETTINGS = serve.Settings(shape="toy", device="cpu", adapters=(), batches=())


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    one = Fleet(SIZES)
    yield one
    one.close()


def test_every_case_of_a_toy_run_has_its_lines_and_rows() -> None:
    cases = all_cases(SETTINGS, SIZES, profiled=False)
    lines = list(measure(cases, SETTINGS, SIZES))
    assert not [line for line in lines if "error" in line]
    assert list(dict.fromkeys(line["name"] for line in lines if "name" in line)) == [case.name for case in cases]
    of = {line["name"]: line for line in lines if "name" in line}
    kinds = of["S4 kinds rows=5"]
    assert kinds["ratio"]["median"] == pytest.approx(kinds["mixed_ms"]["median"] / kinds["lora_ms"]["median"], rel=0.01)
    assert set(kinds["alone_ms"]) == {"lora", "prefix", "prompt", "bottleneck", "base"}
    churn = of["S5 churn rows=5"]
    assert churn["with"]["p99_ms"]["median"] >= churn["with"]["p50_ms"]["median"]
    assert of["base traffic adapters=4"]["resident"] == 4
    most = of["S3 replay rank=8 adapters=12"]
    assert most["goals"] == {"of_first": 0.95} and 0 < most["used"] <= 12 and most["requests"] >= most["finished"]
    assert [line["case"] for line in lines].count("capacity") == 1
    for name in ("rank=8", "rank=64,32,16,8", "rank=16"):
        memory = of[f"memory {name}"]
        assert memory["per_gib"] == pytest.approx(2**30 / memory["device_bytes"], rel=1e-3)
        assert memory["weight_bytes"] <= memory["device_bytes"]
    assert of["memory 8b rank=16"]["device_bytes"] == 32 * 16 * 2 * sum(
        one + other for one, other in [(4096, 4096), (4096, 1024), (4096, 1024), (4096, 4096), *[(4096, 14336)] * 3]
    )
    assert of["memory 8b rank=16"]["per_gib"] == 12.8 and of["pages mean=512"]["met"] == {"waste": True}
    table = serve_tables.rows(lines)
    assert {row[0] for row in table} >= {name for name in of if "S2" not in name}
    assert all(len(row) == len(serve_tables.HEADERS) for row in table)


def test_the_waste_of_pages_is_half_a_page_a_sequence(fleet: Fleet) -> None:
    from peftkit_bench.serve_facts import pages_case

    line = pages_case(fleet)
    # each length is met at all places of a page: of 16 cells 7.5 are empty on average
    assert line["waste"] == pytest.approx(7.5 / (line["mean_length"] + 7.5), rel=0.1)


def test_arrivals_are_poisson_and_uniform(fleet: Fleet, seed: int) -> None:
    arrivals = list(itertools.islice(requests(fleet, 50.0, ["a", "b", "c"], seed), 2000))
    gaps = np.diff([one.at for one in arrivals])
    assert gaps.mean() == pytest.approx(1 / 50, abs=5 / 50 / math.sqrt(2000))
    assert gaps.std() == pytest.approx(1 / 50, rel=0.2)
    low, high = SIZES.lengths
    lengths = {len(one.prompt) for one in arrivals}
    assert lengths == set(range(low, high)) == {one.max_tokens for one in arrivals}
    counts = [sum(one.adapter == name for one in arrivals) for name in "abc"]
    assert min(counts) > 667 - 5 * math.sqrt(2000 * 2 / 9)
    again = list(itertools.islice(requests(fleet, 50.0, [], seed), 2000))
    assert [(one.at, len(one.prompt), one.max_tokens) for one in again] == [
        (one.at, len(one.prompt), one.max_tokens) for one in arrivals
    ]


def test_a_replay_begins_no_request_before_it_arrives(fleet: Fleet) -> None:
    names = fleet.adapters(RANK_8, 2)
    planned = [Arrival(at, fleet.prompt(5), 3, names[n % 2]) for n, at in enumerate((0.0, 0.01, 0.15, 9.0))]
    run = replay(fleet, iter(planned), 0.3)
    assert [one.at for one in run.arrived.values()] == [0.0, 0.01, 0.15] and len(run.ended) == 3
    assert all(run.first[name] > one.at for name, one in run.arrived.items())
    assert sum(tokens for _, tokens in run.served) == 3 * (5 + 3) and not fleet.live


def test_rates_are_those_of_what_ended_behind_the_ramp(seed: int) -> None:
    rng = random.Random(seed)
    run = Run(
        30.0, ended=[0.1 * n + 0.01 * rng.random() for n in range(300)], served=[(0.1 * n, 7) for n in range(300)]
    )
    rate = run.rate()
    assert rate["requests_per_s"] == pytest.approx(10.0) and rate["tokens_per_s"] == pytest.approx(70.0, rel=0.01)
    assert rate["low"] == pytest.approx(rate["high"], abs=1.0)
    run.ended = [one for one in run.ended if not 12.0 <= one < 20.0]
    assert run.rate()["requests_per_s"] == pytest.approx(6.0) and run.rate()["high"] > 8.0


def test_adapters_are_all_different_and_come_again_by_number(fleet: Fleet) -> None:
    for family in (*KINDS, RANK_8, MIXED):
        first, second, again = (fleet.maker.make(family, number) for number in (0, 1, 0))
        flat = [
            torch.cat([layer.weights for layer in one.weights.layers])
            if one.weights is not None
            else (one.embeddings_VH if one.embeddings_VH is not None else one.kv_VL2KD)
            for one in (first, second, again)
        ]
        assert flat[0] is not None and flat[1] is not None and flat[2] is not None
        assert torch.equal(flat[0], flat[2]) and first.uid == again.uid != second.uid
        assert flat[0].shape != flat[1].shape or not torch.equal(flat[0], flat[1])
        assert 0.005 < float(flat[0].std()) < 0.02
    ranks = [fleet.maker.make(MIXED, number).weights for number in range(5)]
    assert [max(span.rank for span in one.layers[0].lora) for one in ranks if one is not None] == [64, 32, 16, 8, 64]


def serving_kernels() -> set[str]:
    """Names of the Triton kernels that a server launches."""
    names: set[str] = set()
    for found in pkgutil.iter_modules(peftkit_kernels.triton.__path__):
        if found.name.startswith(("training", "dropout")):
            continue
        module = importlib.import_module(f"peftkit_kernels.triton.{found.name}")
        if hasattr(module, "specimens"):
            arguments = (90,) if inspect.signature(module.specimens).parameters else ()
            names |= {specimen.kernel.__name__ for specimen in module.specimens(*arguments)}
    return names


def test_every_kernel_of_a_server_has_a_group() -> None:
    groups = {name: serve_profile.group_of(name) for name in serving_kernels()}
    assert len(groups) > 12 and "other" not in groups.values(), groups
    expected = {"_shrink": "adapters", "rope_kernel": "norm, rope, gate", "_linear": "linears", "_draw": "sampling"}
    assert {name: groups[name] for name in expected} == expected
    others = {
        "nvjet_tst_64x8_64x16_4x1_v_bz_TNT": "linears",
        "void cublasLt::splitKreduce_kernel<32, 16, int, __nv_bfloat16>(cublasLt::x)": "linears",
        "void at::native::unrolled_elementwise_kernel<at::native::copy, 4>(int)": "copies",
        "Memcpy HtoD (Pinned -> Device)": "copies",
        "something_new": "other",
    }
    assert {name: serve_profile.group_of(name) for name in others} == others


def test_busy_time_counts_overlaps_once_and_long_pauses_apart() -> None:
    spans = [(100.0, 110.0), (0.0, 10.0), (5.0, 8.0), (9.0, 20.0), (25.0, 30.0)]
    assert serve_profile.busy_and_gaps_us(spans) == (35.0, 70.0)
    assert serve_profile.busy_and_gaps_us([]) == (0.0, 0.0)


@pytest.mark.parametrize("what", ["decode", "prefill"])
def test_a_profile_accounts_for_its_step(fleet: Fleet, what: str) -> None:
    line = serve_profile.decode_case(fleet, 3, 5) if what == "decode" else serve_profile.prefill_case(fleet, 2, 32)
    assert line["busy_ms"] <= line["profiled_ms"] and line["kernels"] > 0 and not fleet.live
    assert sum(line["groups_ms"].values()) <= 1.05 * line["busy_ms"]
    row = serve_tables.profile_rows([{"name": f"profile {what}", **line}])[0]
    assert len(row) == len(serve_tables.PROFILE_HEADERS)
    assert sum(float(str(one)) for one in row[2:-1]) == pytest.approx(sum(line["groups_ms"].values()), rel=1e-3)


def test_a_failed_case_is_a_line_and_the_limit_leaves_cases_out() -> None:
    def fail(_: object) -> list[dict[str, object]]:
        raise RuntimeError("no such kernel")

    memory = next(case for case in all_cases(SETTINGS, SIZES, profiled=False) if case.name == "memory rank=8")
    lines = list(measure([Case("bad", "fleet", fail), memory], SETTINGS, SIZES))
    assert [line["case"] for line in lines] == ["start", "error", "start", "adapter memory"]
    assert lines[1]["error"] == "RuntimeError: no such kernel"
    assert list(measure([memory], SETTINGS, SIZES, limit_s=-1.0)) == [{"case": "left out", "names": ["memory rank=8"]}]


def test_the_command_chooses_cases_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["bench", "serve", "--shape", "toy", "--device", "cpu", "--num-pages", "600", "--quick"]
    assert run_command([*options, "--list", "--only", "memory", "--only", "S5"]) == 0
    expected = ["S5 churn rows=5", "memory rank=8", "memory rank=64,32,16,8", "memory rank=16", "memory 8b rank=16"]
    assert capsys.readouterr().out.splitlines() == expected
    assert run_command([*options, "--only", "memory rank=16"]) == 0
    printed = capsys.readouterr().out
    assert '"case": "adapter memory"' in printed and "adapters a GiB" in printed


@pytest.mark.parametrize(
    ("options", "culprit"),
    [(["--only", "S9"], "S9"), (["--http", "--only", "S3"], "--only"), (["--profile", "--device", "cpu"], "--profile")],
)
def test_a_choice_that_can_not_be_measured_is_refused(
    options: list[str], culprit: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["bench", "serve", "--shape", "toy", *options]) != 0
    assert culprit in capsys.readouterr().err


def test_a_gpus_sizes_are_those_of_the_design() -> None:
    sizes = Sizes("8b")
    assert sizes.replayed == (5, 100, 1000, 2000) and sizes.replayed_mixed == (5, 100, 500)
    assert (
        sizes.lengths == (8, 512)
        and sizes.seconds == 60.0
        and RANK_16.ranks == (16,)
        and MIXED.ranks == (64, 32, 16, 8)
    )


def test_an_engine_is_gone_before_the_next_one_is_made() -> None:
    engines: list[weakref.ref[object]] = []
    alive: list[int] = []

    def note(measured: serve.Bench | Fleet, fails: bool) -> list[dict[str, object]]:
        alive.append(sum(one() is not None for one in engines))
        engines.append(weakref.ref(measured.engine))
        assert not fails, "fails while it holds the engine"
        return [{"case": "noted"}]

    bench = Case("a", "bench", lambda one: note(one, fails=False))
    fleet = Case("b", "fleet", lambda one: note(one, fails=False))
    broken = Case("c", "bench", lambda one: note(one, fails=True))
    settings = replace(SETTINGS, adapters=(0,), num_pages=600)
    lines = list(measure([bench, fleet, broken, bench], settings, SIZES))
    assert [line["case"] for line in lines if line["case"] != "start"] == ["noted", "noted", "error", "noted"]
    assert alive == [0, 0, 0, 0]
