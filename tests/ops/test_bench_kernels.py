"""The kernels' benchmark where there is no GPU: its cases, floors and goals, and what the command says."""

import math

import pytest
import torch

from peftkit.cli import main
from peftkit_bench.kernels import all_cases, run
from peftkit_bench.kernels.case import Case, Floor, Goal

pytest.importorskip("triton", reason="Triton is made for Linux only, where the tests always have it")


def case(name: str) -> Case:
    return next(case for case in all_cases() if case.name == name)


def test_every_case_has_its_own_name_and_a_floor() -> None:
    cases = all_cases()
    assert len({case.name for case in cases}) == len(cases)
    assert all(math.isfinite(case.floor.us) and case.floor.us > 0 for case in cases)
    assert 0 < sum(case.quick for case in cases) < len(cases) / 2


@pytest.mark.parametrize(
    ("name", "us"),
    [
        ("grouped_lora model=8B linear=qkv rows=64 adapters=64 rank=16", 8.6),
        ("grouped_lora model=8B linear=gate_up rows=64 adapters=64 rank=16", 18),
        ("grouped_lora model=8B linear=gate_up rows=2048 adapters=8 rank=16", 56),
        ("nf4_linear rows=1 out=28672 in=4096", 13),
        ("nf4_dequantize out=28672 in=4096", 64),
        ("training norm model=8B rows=8192 hidden=4096 steps=both", 5 * 2 * 8192 * 4096 / 4.64e6),
        ("training gate model=8B rows=8192 width=14336 steps=both", 8 * 2 * 8192 * 14336 / 4.64e6),
        ("training loss model=8B rows=8192 vocabulary=128256 hidden=4096", 4 * 8192 * 128256 * 4096 / 700e6),
        ("paged_attention prefill model=8B requests=1 new=8192 context=8192", 4 * 8192 * 8193 / 2 * 4096 / 700e6),
        ("paged_attention decode model=8B requests=64 context=4096", 64 * 4096 * 4096 / 4.64e6 + 64 * 2**14 / 4.64e6),
    ],
)
def test_a_floor_is_what_must_move_or_be_multiplied(name: str, us: float) -> None:
    assert case(name).floor.us == pytest.approx(us, rel=0.03)


@pytest.mark.parametrize(
    ("goal", "peers", "met"),
    [
        (Goal("4 µs", 4.0), {}, False),
        (Goal("6 µs", 6.0), {}, True),
        (Goal("ahead", 6.0, ("a",)), {}, None),
        (Goal("ahead", 4.0, ("a",)), {}, False),
        (Goal("ahead", 6.0, ("a", "b")), {"a": 9.0, "b": 9.0}, True),
        (Goal("ahead", 6.0, ("a", "b")), {"a": 9.0, "b": 3.0}, False),
        (Goal("share", share_of=("a", 0.75)), {"a": 4.0}, True),
        (Goal("share", share_of=("a", 0.75)), {"a": 3.0}, False),
        (Goal("share", share_of=("a", 0.75)), {}, None),
    ],
)
def test_a_goal_is_met_by_time_and_by_peers_that_were_measured(
    goal: Goal, peers: dict[str, float], met: object
) -> None:
    assert goal.met(5.0, peers) is met


def test_cases_are_chosen_by_a_part_of_their_name() -> None:
    cases = all_cases()
    assert {case.kernel for case in run.chosen(cases, ["rms_norm", "copy"], False)} == {"rms_norm", "copy_pages"}
    assert all(case.quick for case in run.chosen(cases, [], True))


def test_the_larger_of_bytes_and_operations_is_the_floor() -> None:
    assert Floor(4.64e6).us == pytest.approx(1)
    assert Floor(4.64e6, 1400e6).us == pytest.approx(2)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_command_says_what_it_needs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["bench", "kernels", "--quick"]) == 1
    assert "peftkit bench kernels needs a CUDA GPU" in capsys.readouterr().err
