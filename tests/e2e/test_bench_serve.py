"""`peftkit bench serve` on a toy shape: lines whose figures agree with each other, and a table."""

import json

import pytest

from peftkit.cli.main import run
from peftkit_bench import serve
from peftkit_bench.serve_inputs import workload


def test_a_toy_run_prints_a_line_a_case_and_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--shape", "toy", "--adapters", "0,3", "--batches", "1,4", "--requests", "5", "--max-tokens", "3"]
    for name in ("S1", "adapters=0 rows=1", "adapters=0 rows=4", "adapters=3 rows"):
        options += ["--only", name]
    code = run(["bench", "serve", *options, "--device", "cpu", "--num-pages", "600"])
    printed = capsys.readouterr().out
    assert code == 0, printed
    lines = [json.loads(line) for line in printed.splitlines() if line.startswith("{")]
    assert [line["case"] for line in lines] == ["start", *["decode", "decode", "throughput"] * 2, "start", "decode"]
    for line in lines[1:-2]:
        if line["case"] == "throughput":
            assert line["output_tokens"] == 15 and line["out_tok_s"] == pytest.approx(15 / line["seconds"], rel=0.05)
        else:
            assert line["tok_s"] == pytest.approx(1e3 * line["batch"] / line["step_ms"], rel=0.05)
    assert "throughput uniform" in printed and "vLLM" in printed


def test_figures_stand_beside_the_peers_of_the_same_case() -> None:
    ours = [{"case": "decode", "adapters": 8, "batch": 64, "step_ms": 5.0, "floor_ms": 4.0}]
    theirs = [{"case": "decode", "adapters": 8, "batch": 64, "step_ms": 10.3}, {"case": "start", "adapters": 8}]
    assert serve.rows(ours, theirs) == [["decode", 8, 64, "step_ms", 5.0, 10.3, 4.0]]
    assert serve.rows([ours[0] | {"context": 4096}], theirs) == [["decode at 4096", 8, 64, "step_ms", 5.0, "", 4.0]]


def test_the_requests_are_those_of_the_peers_program() -> None:
    work = workload(512, 8, "uniform", 128256)
    lengths = [len(prompt) for prompt, _ in work]
    assert min(lengths) >= 16 and max(lengths) == 1024 and 230 < sum(lengths) / 512 < 270
    assert {adapter for _, adapter in work} == set(range(8)) and work == workload(512, 8, "uniform", 128256)
    zipf = [adapter for _, adapter in workload(512, 128, "zipf", 128256)]
    assert zipf.count(0) > 3 * max(1, zipf.count(9))


@pytest.mark.parametrize("options", [["--shape", "9b"], ["--quant", "int8"], ["--adapters", "1,x"], ["--batches", "0"]])
def test_a_bad_option_is_named(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "serve", *options]) == 2
    assert options[0] in capsys.readouterr().err
