"""`peftkit merge` and `peftkit export` from the outside: exit codes, one result on stdout, one line an error."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

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
    first, second, _, differences, agreement = out.splitlines()
    assert first == f"14 weights of {tiny_base} merged into the dequantized base"
    assert second.startswith(f"written to {tmp_path / 'out'}: float32, ")
    assert "relative" in differences and "limit" in differences
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


def test_exactly_one_adapter_is_taken(adapter: Path, tmp_path: Path, capsys: Capture) -> None:
    code, _, err = answer(capsys, "merge", adapter, adapter, "--out", tmp_path / "out")
    assert code == 2 and "unexpected extra argument" in err
