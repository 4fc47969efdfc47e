"""`peftkit bench train` on a toy shape: lines whose figures agree with each other, and a table."""

import io
import json
from contextlib import redirect_stdout
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
import torch
from torch import nn

from peftkit.cli.main import run
from peftkit_bench import train, train_longest
from peftkit_bench.train_model import SHAPES, attention_flops, matrix_parameters, random_base
from peftkit_bench.train_peers import peer_lines
from peftkit_bench.train_profile import group_of


def bench(*options: str) -> tuple[list[dict[str, Any]], str]:
    with redirect_stdout(io.StringIO()) as out:
        code = run(["bench", "train", "--device", "cpu", "--seconds", "0", *options])
    printed = out.getvalue()
    assert code == 0, printed
    return [json.loads(line) for line in printed.splitlines() if line.startswith("{")], printed


def test_a_toy_run_prints_a_line_a_case_and_a_table(tmp_path: Path) -> None:
    out = tmp_path / "lines.jsonl"
    shapes = "toy:nf4:lora:2x32,toy:none:lora:2x48:packed,toy:none:prefix:2x32"
    lines, text = bench("--shapes", shapes, "--levels", "full,none", "--profile", "--out", str(out))
    assert lines == [json.loads(line) for line in out.read_text().splitlines()]
    assert [line["name"].split(" ", 1)[1] for line in lines] == [
        f"{case} {level}"
        for case in ("nf4 lora 2x32", "none lora 2x48 packed", "none prefix 2x32")
        for level in ("full", "none")
    ]
    for line in lines:
        packed = line["packed"]
        assert line["tokens"] == 64 or (packed and 0 < line["tokens"] <= 96)
        assert line["tokens_per_s"] == pytest.approx(1e3 * line["tokens"] / line["step_ms"], rel=0.05)
        assert 0 < line["min_ms"] <= line["step_ms"] <= line["max_ms"]
        ratio = 1.5 + 4.5 * attention_flops("toy", line["length"]) / 4 / matrix_parameters("toy")
        assert line["mfu_6n"] == pytest.approx(ratio * line["mfu_4n"], rel=0.05)
        groups = line["profile"]["groups_ms"]
        assert sum(groups.values()) == pytest.approx(line["profile"]["span_ms"], rel=0.05)
        assert line["commit"] and line["versions"]["torch"] == torch.__version__
    assert lines[0]["loss_first"] == lines[1]["loss_first"]
    assert "toy nf4 lora 2x32 full" in text and "GEMM" in text


def test_matrix_parameters_are_those_of_the_model_without_its_embedding() -> None:
    model = random_base("toy", "none", torch.float32, torch.device("cpu"))
    matrices = sum(parameter.numel() for parameter in model.parameters() if parameter.dim() == 2)
    assert matrix_parameters("toy") == matrices - SHAPES["toy"]["vocab_size"] * SHAPES["toy"]["hidden_size"]
    assert matrix_parameters("8b") == pytest.approx(7.5e9, rel=0.01)


def test_a_random_base_is_quantised_but_for_its_head_and_draws_by_its_seed() -> None:
    models = [random_base("toy", "nf4", torch.float32, torch.device("cpu"), seed=seed) for seed in (1, 1, 2)]
    linears = {name: type(m).__name__ for name, m in models[0].named_modules() if isinstance(m, nn.Linear)}
    assert linears.pop("lm_head") == "Linear" and set(linears.values()) == {"Linear4bit"}
    assert not any(parameter.requires_grad or parameter.is_meta for parameter in models[0].parameters())
    one, same, other = (model.get_parameter("model.layers.1.mlp.up_proj.weight") for model in models)
    assert torch.equal(one, same) and not torch.equal(one, other)


def test_floors_are_those_of_the_card() -> None:
    case = train.Case("8b", "nf4", "lora", 4, 2048)
    assert train.speed(case, 1.0, 8192, 700.0)["floor_tokens_per_s"] == pytest.approx(23_300, rel=0.01)
    for rows, length, tokens_per_s in ((4, 2048, 14_750), (1, 4096, 14_040)):
        case = train.Case("8b", "nf4", "lora", rows, length)
        tokens = rows * length
        assert train.speed(case, tokens / tokens_per_s, tokens, 700.0)["mfu_6n"] == pytest.approx(1, rel=0.01)


def test_longer_sequences_fit_the_more_is_computed_again() -> None:
    settings = train.Settings(torch.device("cpu"))
    lines = list(train_longest.longest(settings, "toy", (512, 1024)))
    tokens = {line["name"].split()[-1]: line["tokens"] for line in lines}
    assert list(tokens) == ["none", "selective", "full", "offload"]
    for lengths in tokens.values():
        assert list(lengths.values()) == sorted(lengths.values()) and lengths[24] > 0
    assert tokens["none"][24] < tokens["selective"][24] < tokens["full"][24]
    # without a GPU nothing is offloaded; what a rehearsal takes is read off the process, to a few pages
    assert tokens["offload"][24] == pytest.approx(tokens["full"][24], rel=0.01)
    for line in lines:
        for gb, length in line["tokens"].items():
            room = 0.91 * (gb - 0.9) * 1e9  # without the driver's part and the allocator's gaps
            free = room - line["bytes"] - line["bytes_a_token"] * length
            assert -1e-5 * room <= free < 257 * line["bytes_a_token"]
    assert len(train_longest.rows(lines)) == 4


def test_goals_are_met_by_speed_and_memory() -> None:
    case = train.Case("8b", "nf4", "lora", 4, 2048)
    assert list(train.goals(case, 13_000, 7 << 30).values()) == [True, False]
    assert list(train.goals(case, 16_000, 9 << 30).values()) == [False, True]
    assert train.goals(train.Case("8b", "none", "lora", 4, 2048), 16_000, 9 << 30) == {}


def test_figures_stand_beside_the_peers_of_the_same_step(tmp_path: Path) -> None:
    program = tmp_path / "peers.py"
    program.write_text(
        dedent("""
        import json, sys
        options = dict(zip(sys.argv[1::2], sys.argv[2::2]))
        print("noise")
        for batch in options["--batches"].split(","):
            b, n = map(int, batch.split("x"))
            case = dict(case="train", shape=options["--shapes"], peer="hf", batch=b, seq=n)
            print(json.dumps(case | dict(tok_s=100.0 * b, peak_gib=1.5)), flush=True)
        """)
    )
    sizes = (("8b", "nf4", 4), ("8b", "nf4", 1), ("8b", "none", 4), ("1.5b", "nf4", 4))
    cases = [train.Case(shape, quant, "lora", rows, 2048) for shape, quant, rows in sizes]  # type: ignore[arg-type]
    theirs = list(peer_lines(program, cases, limit_s=100))
    assert [(line["shape"], line["batch"]) for line in theirs] == [("8b", 4), ("8b", 1), ("1.5b", 4)]
    line = {
        "case": "train", "name": cases[0].name, **vars(cases[0]), "tokens_per_s": 1.0, "step_ms": 1.0, "min_ms": 1.0,
        "max_ms": 1.0, "mfu_4n": 0.5, "mfu_6n": 0.7, "peak_bytes": 1 << 30, "goals": {},
    }  # fmt: skip
    assert train.rows([line], theirs)[0][-1] == "hf 400 (1.5)"
    assert next(iter(peer_lines(program, cases, limit_s=1)))["case"] == "skipped"


@pytest.mark.parametrize(
    ("kernel", "group"),
    [
        ("nvjet_tst_256x128_64x4_2x1_v_bz_coopB_TNN", "GEMM"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64", "GEMM"),
        ("void cutlass::device_kernel<flash::FlashAttnFwdSm90<Copy_Atom>>", "attention"),
        ("void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<...>", "attention"),
        ("void cudnn::fusion::compute_dot_do_o_specialized<true, 128>(void const*)", "attention"),
        ("void kDequantizeBlockwise<__nv_bfloat16, 512, 64, 8, 2>(float*)", "dequantise"),
        ("void kOptimizerStatic8bit2StateBlockwise<float, 0, 256, 1>", "optimiser"),
        ("void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda>", "copies"),
        ("Memcpy DtoH (Device -> Pinned)", "copies"),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<c10::BFloat16>>",
         "adds and products"),
        ("_rms_norm_forward", "norm, rope, gate"),
    ],
)  # fmt: skip
def test_kernels_are_known_by_their_names(kernel: str, group: str) -> None:
    assert group_of(kernel) == group


@pytest.mark.parametrize("options", [["--levels", "half"], ["--only", "9b"], ["--peers", "nowhere.py"]])
def test_a_bad_option_is_named(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "train", *options]) == 2
    assert options[0] in capsys.readouterr().err
