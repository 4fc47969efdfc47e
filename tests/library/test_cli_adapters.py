"""`peftkit adapters` from the outside, and the formats that it takes in."""

import json
import shutil
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import save_file
from transformers import LlamaForCausalLM

import peftkit
from peftkit.artifact import read_adapter
from peftkit.cli.main import run
from peftkit.methods import LoraConfig, attached

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def adapter(seed: int, tiny_base: Path, tmp_path: Path) -> Path:
    model, _ = peftkit.load_base(tiny_base)
    peftkit.attach(model, LoraConfig(r=4, alpha=8))
    for parameter in attached(model)[0].parameters().values():
        torch.nn.init.normal_(parameter, std=0.05)
    peftkit.save_adapter(model, tmp_path / "mine")
    return tmp_path / "mine"


def answer(capsys: Capture, *argv: str | Path) -> tuple[int, Any, str]:
    capsys.readouterr()
    code = run(["adapters", *map(str, argv), "--json"])
    out, err = capsys.readouterr()
    return code, json.loads(out), err


def test_an_adapter_is_added_listed_shown_verified_and_removed(
    adapter: Path, tiny_base: Path, tmp_path: Path, capsys: Capture
) -> None:
    store = ["--adapters", tmp_path / "store"]
    code, added, err = answer(capsys, "add", adapter, *store)
    assert code == 0, err
    assert (added["name"], added["uid"]) == ("mine", read_adapter(adapter).uid)
    assert read_adapter(tmp_path / "store" / "mine").record == read_adapter(adapter).record
    _, listed, _ = answer(capsys, "list", *store)
    assert [(one["name"], one["kind"], one["base"]) for one in listed["adapters"]] == [("mine", "lora", str(tiny_base))]
    _, shown, _ = answer(capsys, "show", "mine", *store)
    assert shown["uid"] == added["uid"] and shown["configs"][0]["r"] == 4
    code, verified, err = answer(capsys, "verify", "mine", *store)
    assert code == 0, err
    assert verified["tensors"] == 28 and set(verified["same_as_recorded"]) >= {"weights", "tokenizer"}
    code, _, err = answer(capsys, "remove", "mime", *store)
    assert code == 2 and "did you mean 'mine'" in err
    assert answer(capsys, "remove", "mine", *store)[0] == 0
    assert answer(capsys, "list", *store)[1] == {"adapters": []}


def test_a_name_clash_leaves_the_first(adapter: Path, tmp_path: Path, capsys: Capture) -> None:
    store = ["--adapters", tmp_path / "store"]
    assert answer(capsys, "add", adapter, *store)[0] == 0
    before = (tmp_path / "store" / "mine" / "adapter_config.json").stat().st_mtime_ns
    code, result, _ = answer(capsys, "add", adapter, *store)
    assert code == 2 and result["error"]["field"] == "name" and "choose another --name" in result["error"]["message"]
    assert (tmp_path / "store" / "mine" / "adapter_config.json").stat().st_mtime_ns == before
    assert answer(capsys, "add", adapter, "--name", "../up", *store)[0] == 2


def test_pefts_and_torchtunes_folders_are_taken_in(seed: int, tiny_base: Path, tmp_path: Path, capsys: Capture) -> None:
    model = LlamaForCausalLM.from_pretrained(tiny_base)
    settings = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    theirs = peft.get_peft_model(model, settings).eval()
    for name, parameter in theirs.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    theirs.save_pretrained(tmp_path / "peft")
    torchtune = tmp_path / "torchtune"
    torchtune.mkdir()
    shutil.copy(tmp_path / "peft" / "adapter_model.safetensors", torchtune)
    fields = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], "peft_type": "LORA"}
    (torchtune / "adapter_config.json").write_text(json.dumps(fields))
    ids = torch.randint(3, 259, (1, 16))
    for source in (tmp_path / "peft", torchtune):
        code, added, err = answer(capsys, "add", source, "--base", tiny_base, "--adapters", tmp_path / "store")
        assert code == 0, err
        ours = peftkit.load_adapter(peftkit.load_base(tiny_base)[0], added["path"], strict_base=True)
        with torch.no_grad():
            torch.testing.assert_close(ours(ids).logits, theirs(ids).logits, rtol=1e-4, atol=1e-5)
    own = tmp_path / "own"
    own.mkdir()
    (own / "adapter_0.pt").write_bytes(b"x")
    code, _, err = answer(capsys, "add", own, "--adapters", tmp_path / "store")
    assert code == 2 and "torchtune's own checkpoint" in err


def test_a_microsoft_lora_is_taken_in_with_its_alpha(
    adapter: Path, tiny_base: Path, tmp_path: Path, capsys: Capture
) -> None:
    store = ["--adapters", tmp_path / "store", "--base", tiny_base]
    known = read_adapter(adapter)
    tensors = {
        key.removeprefix("base_model.model.").removesuffix(".weight"): tensor for key, tensor in known.tensors.items()
    }
    file = tmp_path / "loralib.safetensors"
    save_file(tensors, file)
    code, _, err = answer(capsys, "add", file, *store)
    assert code == 2 and "--alpha" in err
    code, added, err = answer(capsys, "add", file, "--alpha", "8", *store)
    assert code == 0, err
    ids = torch.randint(3, 259, (1, 16))
    with torch.no_grad():
        wanted = peftkit.load_adapter(peftkit.load_base(tiny_base)[0], adapter)(ids).logits
        found = peftkit.load_adapter(peftkit.load_base(tiny_base)[0], added["path"])(ids).logits
    torch.testing.assert_close(found, wanted)
    first = sorted(tensors)[0]
    faults = {
        "has only lora_B": {key: t for key, t in tensors.items() if key != first},
        "isn't lora_A or lora_B": tensors | {"model.norm.bias": torch.zeros(64)},
        "MergedLinear": tensors | {first: torch.cat([tensors[first]] * 2)},
        "matches no module": {f"x.{key}": t for key, t in tensors.items()},
    }
    for number, (said, wrong) in enumerate(faults.items()):
        save_file(wrong, tmp_path / f"wrong-{number}.safetensors")
        code, _, err = answer(capsys, "add", tmp_path / f"wrong-{number}.safetensors", "--alpha", "8", *store)
        assert code == 2 and said in err, (said, err)
    (tmp_path / "lora.pt").write_bytes(b"x")
    code, _, err = answer(capsys, "add", tmp_path / "lora.pt", "--alpha", "8", *store)
    assert code == 2 and "pickled" in err and "safetensors" in err
    assert {folder.name for folder in (tmp_path / "store").iterdir()} == {"loralib"}


def test_diff_prints_norms_and_overlaps_by_layer(adapter: Path, capsys: Capture) -> None:
    code, result, err = answer(capsys, "diff", adapter, adapter)
    assert code == 0, err
    assert [layer["name"] for layer in result["layers"]] == ["layers.0", "layers.1"] and len(result["modules"]) == 14
    assert all(layer["cosine"] == pytest.approx(1) and layer["norm_a"] == layer["norm_b"] for layer in result["layers"])
    capsys.readouterr()
    assert run(["adapters", "diff", str(adapter), str(adapter)]) == 0
    assert capsys.readouterr().out.splitlines()[0].startswith("layer")
