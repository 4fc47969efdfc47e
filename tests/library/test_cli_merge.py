"""`peftkit merge` and `peftkit export` from the outside: exit codes, one result on stdout, one line an error."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

import peftkit
from peftkit.artifact import read_adapter, write_adapter
from peftkit.base import Quant
from peftkit.cli.main import run
from peftkit.methods import AnyConfig, LoraConfig, PromptTuningConfig, attached

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def adapter(seed: int, tiny_base: Path, tmp_path: Path) -> Path:
    return save(tiny_base, tmp_path / "adapter", LoraConfig(r=4, alpha=8), quant="nf4")


def save(base: Path, folder: Path, config: AnyConfig, *, quant: Quant = "none") -> Path:
    model, _ = peftkit.load_base(base, quant=quant)
    peftkit.attach(model, config)
    for parameter in attached(model)[0].parameters().values():
        torch.nn.init.normal_(parameter, std=0.05)
    peftkit.save_adapter(model, folder)
    return folder


def answer(capsys: Capture, *argv: str | Path) -> tuple[int, str, str]:
    capsys.readouterr()
    code = run([str(arg) for arg in argv])
    out, err = capsys.readouterr()
    return code, out, err


def test_merge_takes_base_and_mode_from_the_adapter_and_prints_the_proof(
    adapter: Path, tiny_base: Path, tmp_path: Path, capsys: Capture
) -> None:
    code, out, err = answer(capsys, "merge", adapter, "--out", tmp_path / "out")
    assert code == 0, err
    first, second, kept, _, differences, agreement = out.splitlines()
    assert first == f"14 weights of {tiny_base} merged into the dequantized base"
    assert second.startswith(f"written to {tmp_path / 'out'}: float32, ")
    assert kept.startswith("100.00% of the change is kept; least in layers.")
    assert "relative" in differences and "limit" in differences and "KL" in differences
    assert agreement == "  the same most likely token at 100.0% of positions"
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").dtype == torch.float32


def test_merges_json_has_the_figures(adapter: Path, tmp_path: Path, capsys: Capture) -> None:
    code, out, _ = answer(
        capsys, "merge", adapter, "--out", tmp_path / "out", "--into", "original", "--dtype", "bfloat16", "--json"
    )
    result = json.loads(out)
    assert code == 0
    assert (result["mode"], result["dtype"], result["num_merged"]) == ("original", "bfloat16", 14)
    assert result["out"] == str(tmp_path / "out")
    assert 0 < result["equivalence"]["relative"] < result["equivalence"]["limit"]
    written = json.loads((tmp_path / "out" / "peftkit_merge.json").read_text())
    assert written["equivalence"] == result["equivalence"]


def test_no_verify_writes_without_proof_and_says_so(adapter: Path, tmp_path: Path, capsys: Capture) -> None:
    code, out, _ = answer(capsys, "merge", adapter, "--out", tmp_path / "out", "--no-verify")
    assert code == 0 and out.splitlines()[-1] == "not verified"


def test_merging_what_cant_be_merged_is_bad_input_in_one_line(tiny_base: Path, tmp_path: Path, capsys: Capture) -> None:
    folder = save(tiny_base, tmp_path / "p", PromptTuningConfig(num_virtual_tokens=3))
    code, out, err = answer(capsys, "merge", folder, "--out", tmp_path / "out")
    assert (code, out) == (2, "")
    assert len(err.splitlines()) == 1 and "serve it unmerged: peftkit serve --base BASE --adapter NAME=" in err
    assert not (tmp_path / "out").exists()


def test_a_taken_target_is_bad_input(adapter: Path, tmp_path: Path, capsys: Capture) -> None:
    code, out, err = answer(capsys, "merge", adapter, "--out", adapter, "--json")
    assert code == 2 and json.loads(out)["error"]["field"] == "out"
    assert "exists and isn't empty" in err


def test_an_adapter_that_names_no_base_asks_for_one(
    adapter: Path, tiny_base: Path, tmp_path: Path, capsys: Capture
) -> None:
    known = read_adapter(adapter)
    foreign = write_adapter(tmp_path / "foreign", known.config, known.tensors).path
    code, _, err = answer(capsys, "merge", foreign, "--out", tmp_path / "out")
    assert code == 2 and "doesn't say which base it was made for: name it with --base" in err
    code, out, err = answer(capsys, "merge", foreign, "--out", tmp_path / "out", "--base", tiny_base)
    assert code == 0, err
    assert out.startswith(f"14 weights of {tiny_base} merged into the original base")


def test_several_adapters_are_composed_and_merged_or_written_alone(
    adapter: Path, tiny_base: Path, tmp_path: Path, capsys: Capture
) -> None:
    other = save(tiny_base, tmp_path / "other", LoraConfig(r=2, alpha=4, variant="rslora"), quant="nf4")
    both = ["merge", adapter, other, "--weights", "0.7,-0.3"]
    code, out, err = answer(capsys, *both, "--out", tmp_path / "merged")
    assert code == 0, err
    assert out.startswith(f"2 adapters, whose rank holds 100.0% of the sought change: 14 weights of {tiny_base} merged")
    code, out, err = answer(
        capsys, *both, "--out", tmp_path / "made", "--format", "adapter", "--method", "svd", "--rank", "3", "--json"
    )
    assert code == 0, err
    made = read_adapter(tmp_path / "made")
    assert json.loads(out)["uid"] == made.uid and 0.5 < json.loads(out)["kept"] < 1
    assert made.record["composed"]["adapters"][1]["weight"] == -0.3
    layered = tmp_path / "weights.json"
    layered.write_text("[[1, 0.5], 2]")
    code, _, err = answer(
        capsys, "merge", adapter, other, "--weights", layered, "--out", tmp_path / "c", "--format", "adapter"
    )
    assert code == 0, err


def test_settings_of_a_merge_that_make_no_sense_are_bad_input(adapter: Path, tmp_path: Path, capsys: Capture) -> None:
    for wrong, said in (
        (["--weights", "1,x"], "must be numbers with commas between"),
        (["--weights", "1,2"], "weights: 2 for 1 adapters"),
        (["--format", "gguf", "--into", "requantize"], "requantize writes bnb4"),
        (["--dtype", "q8_0"], "add format gguf"),
        (["--rank", "3"], "use method svd"),
    ):
        code, _, err = answer(capsys, "merge", adapter, "--out", tmp_path / "out", *wrong)
        assert code == 2 and said in err, err
    code, _, err = answer(capsys, "merge", adapter)
    assert code == 2 and "with --out" in err
    assert {path.name for path in tmp_path.iterdir()} == {"adapter"}


def test_check_compares_an_adapter_with_the_model_it_was_merged_into(
    adapter: Path, tiny_base: Path, tmp_path: Path, capsys: Capture
) -> None:
    merged = tmp_path / "out"
    assert answer(capsys, "merge", adapter, "--out", merged, "--dtype", "bfloat16")[0] == 0
    code, out, err = answer(capsys, "merge", "--check", adapter, merged)
    assert code == 0, err
    assert "share of the change kept" in out and "layers.1" in out and "KL divergence" in out
    code, out, _ = answer(capsys, "merge", "--check", adapter, merged, "--json")
    found, report = json.loads(out), json.loads((merged / "peftkit_merge.json").read_text())
    assert code == 0 and found["holds"] and found["kept_by_layer"] == pytest.approx(report["kept_by_layer"], abs=1e-6)
    assert found["equivalence"]["relative"] == pytest.approx(report["equivalence"]["relative"], rel=1e-3)
    code, out, err = answer(capsys, "merge", "--check", adapter, merged, "--limit", "1e-6")
    assert code == 1 and "more than 1e-06" in err and "relative difference" in out


def test_check_compares_two_models_and_tells_them_apart(
    adapter: Path, tiny_base: Path, tmp_path: Path, capsys: Capture
) -> None:
    for name, settings in {"a": [], "b": ["--format", "gguf"], "c": ["--into", "original"]}.items():
        assert answer(capsys, "merge", adapter, "--out", tmp_path / name, "--no-verify", *settings)[0] == 0
    same = tmp_path / "a"
    assert answer(capsys, "merge", "--check", same, same)[0] == 0
    code, _, err = answer(capsys, "merge", "--check", same, tmp_path / "c")
    assert code == 1 and "isn't" in err
    for wrong, said in (((same, adapter), "is an adapter: name it first"), ((same, tmp_path), "no config.json")):
        code, _, err = answer(capsys, "merge", "--check", *wrong)
        assert code == 2 and said in err, err
    code, _, err = answer(capsys, "merge", "--check", same)
    assert code == 2 and "compares two folders" in err


def test_the_wrong_base_is_bad_input(adapter: Path, tiny_base: Path, tmp_path: Path, capsys: Capture) -> None:
    other = tmp_path / "other"
    config = LlamaConfig.from_pretrained(tiny_base, hidden_size=32, num_attention_heads=2, num_key_value_heads=2)
    LlamaForCausalLM(config).save_pretrained(other)
    AutoTokenizer.from_pretrained(tiny_base).save_pretrained(other)
    code, _, err = answer(capsys, "merge", adapter, "--out", tmp_path / "out", "--base", other)
    assert code == 2 and "this base and config need" in err and not (tmp_path / "out").exists()
