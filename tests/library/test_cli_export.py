"""`peftkit export` from the outside."""

import json
import shutil
from pathlib import Path

import peft
import pytest
import torch

import peftkit
from peftkit.cli.main import run
from peftkit.methods import LoraConfig, attached

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def adapter(seed: int, tiny_base: Path, tmp_path: Path) -> Path:
    model, _ = peftkit.load_base(tiny_base)
    peftkit.attach(model, LoraConfig(r=4, alpha=8))
    for parameter in attached(model)[0].parameters().values():
        torch.nn.init.normal_(parameter, std=0.05)
    peftkit.save_adapter(model, tmp_path / "adapter")
    return tmp_path / "adapter"


def answer(capsys: Capture, *argv: str | Path) -> tuple[int, str, str]:
    capsys.readouterr()
    code = run(["export", *map(str, argv)])
    out, err = capsys.readouterr()
    return code, out, err


def test_peft_opens_the_export_by_the_base_it_names(
    adapter: Path, tiny_base: Path, tmp_path: Path, capsys: Capture
) -> None:
    code, out, err = answer(capsys, adapter, "--out", tmp_path / "out", "--format", "peft", "--json")
    assert code == 0, err
    result = json.loads(out)
    assert (result["format"], result["base_name"], result["kind"]) == ("peft", str(tiny_base), "lora")
    assert result["uid"] == json.loads((adapter / "peftkit.json").read_text())["uid"]
    theirs = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    ours = peftkit.load_adapter(peftkit.load_base(tiny_base)[0], adapter)
    ids = torch.randint(3, 259, (1, 20))
    with torch.no_grad():
        torch.testing.assert_close(theirs(ids).logits, ours(ids).logits, rtol=1e-4, atol=1e-5)


def test_a_base_name_given_is_kept_as_it_is(adapter: Path, tmp_path: Path, capsys: Capture) -> None:
    code, out, _ = answer(capsys, adapter, "--out", tmp_path / "out", "--base-name", "org/model")
    assert code == 0 and out == f"lora adapter written to {tmp_path / 'out'} for HF PEFT, on base org/model\n"
    assert json.loads((tmp_path / "out" / "adapter_config.json").read_text())["base_model_name_or_path"] == "org/model"


def test_a_base_that_is_not_here_asks_for_a_name(adapter: Path, tmp_path: Path, capsys: Capture) -> None:
    fields = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps({**fields, "base_model_name_or_path": "/gone"}))
    code, _, err = answer(capsys, adapter, "--out", tmp_path / "out")
    assert code == 2 and "/gone" in err and "--base-name" in err
    assert not (tmp_path / "out").exists()


def test_a_lora_is_exported_for_llama_cpp(adapter: Path, tmp_path: Path, capsys: Capture) -> None:
    code, out, err = answer(capsys, adapter, "--out", tmp_path / "out", "--format", "gguf")
    assert code == 0, err
    assert "for llama.cpp" in out
    assert {file.name for file in (tmp_path / "out").iterdir()} == {"adapter-f32.gguf", "README.md"}


def test_a_format_that_is_not_there_is_bad_input(adapter: Path, tmp_path: Path, capsys: Capture) -> None:
    code, _, err = answer(capsys, adapter, "--out", tmp_path / "out", "--format", "onnx")
    assert code == 2 and "onnx" in err


def test_a_damaged_adapter_is_named(adapter: Path, tmp_path: Path, capsys: Capture) -> None:
    broken = shutil.copytree(adapter, tmp_path / "broken")
    tensors = broken / "adapter_model.safetensors"
    tensors.write_bytes(tensors.read_bytes()[:-9])
    code, _, err = answer(capsys, broken, "--out", tmp_path / "out")
    assert code == 2 and str(tensors) in err and not (tmp_path / "out").exists()
