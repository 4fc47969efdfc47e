"""Merging a weight at a time: memory, several files, NF4 again, what is kept, and bases that are broken."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import bitsandbytes as bnb
import pytest
import safetensors.torch
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import peftkit
from peftkit.artifact import read_adapter
from peftkit.base import Quant, load_base
from peftkit.errors import AdapterError, BaseModelError, InputError, RunError
from peftkit.merge import merge_to_folder
from peftkit.merge.export import MIN_KEPT
from peftkit.merge.shards import ShardWriter
from peftkit.merge.stream import Kept
from peftkit.methods import LoraConfig, attached

MakeAdapter = Callable[..., Path]


@pytest.fixture
def make_adapter(seed: int, tiny_base: Path, tmp_path: Path) -> MakeAdapter:
    """Saves a random adapter; with `std` its factors' spread is chosen."""

    def make(config: LoraConfig, *, quant: Quant = "none", std: float = 0.05, base: Path = tiny_base) -> Path:
        model, _ = load_base(base, quant=quant)
        peftkit.attach(model, config)
        for parameter in attached(model)[0].parameters().values():
            torch.nn.init.normal_(parameter, std=std)
        peftkit.save_adapter(model, tmp_path / "adapter")
        return tmp_path / "adapter"

    return make


def sharded(base: Path, folder: Path, size: str = "60KB") -> Path:
    shutil.copytree(base, folder)
    LlamaForCausalLM.from_pretrained(base).save_pretrained(folder, max_shard_size=size)
    (folder / "model.safetensors").unlink()
    return folder


@pytest.mark.parametrize("dtype", ["auto", "bfloat16"])
def test_several_files_stay_several_and_read_back_as_one_merge(
    dtype: str, tiny_base: Path, make_adapter: MakeAdapter, tmp_path: Path
) -> None:
    base = sharded(tiny_base, tmp_path / "base")
    adapter = make_adapter(LoraConfig(r=4, alpha=8, targets=["q_proj", "lm_head", "down_proj"]))
    merge_to_folder(adapter, tmp_path / "out", base, dtype=dtype)
    files = {file.name for file in base.glob("*.safetensors")}
    assert len(files) > 3 and {file.name for file in (tmp_path / "out").glob("*.safetensors")} == files
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    wanted = peftkit.merge(load_base(tiny_base)[0], [adapter], dtype="float32" if dtype == "auto" else dtype)
    assert index["metadata"]["total_size"] == sum(p.nbytes for p in wanted.parameters())
    assert found.config.tie_word_embeddings is False
    for name, parameter in wanted.named_parameters():
        assert torch.equal(found.get_parameter(name), parameter), name


MEMORY = """
import sys, threading, psutil
from peftkit.merge import merge_to_folder
from peftkit.merge.weights import BaseWeights
from peftkit.base import resolve_base
merge_to_folder(sys.argv[1], sys.argv[3] + "-warm", sys.argv[2] + "-small", verify=False)
resolve_base(sys.argv[2]).fingerprint  # remembered: hashing reads in pieces of 16 MB
process, peak, done = psutil.Process(), [0], threading.Event()
def watch():
    while not done.wait(0.002):
        peak[0] = max(peak[0], process.memory_full_info().uss)
before = process.memory_full_info().uss
threading.Thread(target=watch, daemon=True).start()
merge_to_folder(sys.argv[1] + "-large", sys.argv[3], sys.argv[2], verify=False)
done.set()
print(peak[0] - before, BaseWeights(resolve_base(sys.argv[2]), None).largest_file_bytes)
"""


def test_memory_is_bounded_by_the_largest_file_and_a_tenth(
    tiny_base: Path, make_adapter: MakeAdapter, tmp_path: Path
) -> None:
    sizes = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 16, "num_attention_heads": 8}
    large = shutil.copytree(tiny_base, tmp_path / "base")
    config = LlamaConfig.from_pretrained(tiny_base, **sizes, num_key_value_heads=8)
    LlamaForCausalLM(config).save_pretrained(large, max_shard_size="30MB")
    (large / "model.safetensors").unlink()
    shutil.copytree(tiny_base, tmp_path / "base-small")
    make_adapter(LoraConfig(r=4), base=large).rename(tmp_path / "adapter-large")
    make_adapter(LoraConfig(r=4))
    command = [sys.executable, "-c", MEMORY, *(str(tmp_path / name) for name in ("adapter", "base", "out"))]
    # what was freed goes back at once, so that what is measured is what is held
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "65536"}
    run = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert run.returncode == 0, run.stderr
    used, largest = map(int, run.stdout.split()[-2:])
    whole = sum(file.stat().st_size for file in large.glob("*.safetensors"))
    assert 3 * largest < whole and 0 < used <= 1.1 * largest


def test_nf4_again_is_what_bitsandbytes_makes_of_the_sum(
    tiny_base: Path, make_adapter: MakeAdapter, tmp_path: Path
) -> None:
    adapter = make_adapter(LoraConfig(r=4, alpha=8), quant="nf4", std=0.1)
    report = merge_to_folder(adapter, tmp_path / "out", tiny_base, into="requantize")
    assert (report.mode, report.format) == ("requantize", "bnb4") and MIN_KEPT < report.kept < 1.2
    assert report.equivalence is not None and report.equivalence.relative < report.equivalence.limit
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    exact = peftkit.merge(load_base(tiny_base, quant="nf4")[0], [adapter])
    for path, module in found.named_modules():
        if isinstance(module, bnb.nn.Linear4bit):
            codes, state = bnb.functional.quantize_4bit(
                exact.get_submodule(path).weight.data, quant_type="nf4", blocksize=64, compress_statistics=True
            )
            assert torch.equal(module.weight.data, codes), path
            wanted = bnb.functional.dequantize_4bit(codes, state)
            assert torch.equal(bnb.functional.dequantize_4bit(module.weight.data, module.weight.quant_state), wanted)
    assert sum(isinstance(module, bnb.nn.Linear4bit) for module in found.modules()) == 14


def test_a_change_that_four_bits_round_away_is_refused_with_the_share(
    tiny_base: Path, make_adapter: MakeAdapter, tmp_path: Path
) -> None:
    adapter = make_adapter(LoraConfig(r=4, alpha=8), quant="nf4", std=0.01)
    with pytest.raises(
        RunError, match=r"only -?\d+\.\d% of the adapter's change survives rounding to NF4, less than 80%"
    ):
        merge_to_folder(adapter, tmp_path / "out", tiny_base, into="requantize")
    assert not (tmp_path / "out").exists()
    assert merge_to_folder(adapter, tmp_path / "out", tiny_base).kept == pytest.approx(1.0, abs=1e-5)


def test_a_change_that_bfloat16_rounds_away_is_refused_too(
    tiny_base: Path, make_adapter: MakeAdapter, tmp_path: Path
) -> None:
    base = shutil.copytree(tiny_base, tmp_path / "base")
    LlamaForCausalLM.from_pretrained(base, dtype=torch.bfloat16).save_pretrained(base)
    adapter = make_adapter(LoraConfig(r=4, alpha=8, targets=["q_proj"]), std=0.001, base=base)
    with pytest.raises(RunError, match=r"rounding to bfloat16, less than 80%.*--dtype float32 keeps it"):
        merge_to_folder(adapter, tmp_path / "out", base)
    assert merge_to_folder(adapter, tmp_path / "out", base, dtype="float32").kept == pytest.approx(1.0, abs=1e-3)


def test_an_adapter_without_effect_gives_back_the_bits_of_its_base(
    tiny_base: Path, make_adapter: MakeAdapter, tmp_path: Path
) -> None:
    adapter = make_adapter(LoraConfig(r=4), quant="nf4", std=0.0)
    merge_to_folder(adapter, tmp_path / "out", tiny_base, into="requantize")
    found, (base, _) = AutoModelForCausalLM.from_pretrained(tmp_path / "out"), load_base(tiny_base, quant="nf4")
    for name, parameter in base.named_parameters():
        assert torch.equal(found.get_parameter(name), parameter), name


def test_formats_and_modes_that_contradict_each_other_are_refused(
    tiny_base: Path, make_adapter: MakeAdapter, tmp_path: Path
) -> None:
    adapter = make_adapter(LoraConfig(r=4))
    for settings in ({"into": "requantize", "format": "hf"}, {"into": "original", "format": "bnb4"}):
        with pytest.raises(InputError, match="requantize writes bnb4, and nothing else does"):
            merge_to_folder(adapter, tmp_path / "out", tiny_base, **settings)  # pyright: ignore[reportArgumentType]


def test_the_share_kept_is_the_projection_on_the_change(seed: int) -> None:
    before, change, kept = torch.randn(8, 8), torch.randn(8, 8), Kept()
    kept.add("model.layers.0.a.weight", before, before + change, before + 0.5 * change)
    kept.add("model.layers.1.a.weight", before, before + 3 * change, before + 3 * change)
    kept.add("lm_head.weight", before, before, before + change)
    assert kept.by_layer() == pytest.approx({"layers.0": 0.5, "layers.1": 1.0}, rel=1e-5)
    assert kept.share == pytest.approx((0.5 + 9) / 10, rel=1e-5)
    assert Kept().share == 1.0


def test_the_layers_of_the_share_kept_come_by_number(seed: int) -> None:
    kept = Kept()
    for place in ("layers.10.a", "layers.9.a", "lm_head", "layers.0.a"):  # as a file's names are sorted
        kept.add(f"model.{place}.weight", before := torch.randn(4, 4), after := before + 1, after)
    assert list(kept.by_layer()) == ["model.lm_head", "layers.0", "layers.9", "layers.10"]


def test_a_file_written_by_parts_is_read_by_safetensors(seed: int, tmp_path: Path) -> None:
    tensors = {
        "odd": torch.arange(7, dtype=torch.uint8),
        "half": torch.randn(3, 5).to(torch.bfloat16),
        "single": torch.randn(3),
        "whole": torch.randn(4, 6),
        "f16": torch.randn(2, 2).half(),
        "nothing": torch.empty(0, 4),
    }
    with ShardWriter(tmp_path / "x.safetensors", max_tensors=len(tensors)) as writer:
        for name, tensor in tensors.items():
            writer.add(name, tensor)
    found = safetensors.torch.load_file(tmp_path / "x.safetensors")
    assert found.keys() == tensors.keys()
    assert all(found[name].dtype == t.dtype and torch.equal(found[name], t) for name, t in tensors.items())
    with safe_open(tmp_path / "x.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}


@pytest.mark.parametrize("fault", ["missing", "shape", "truncated", "nan"])
def test_a_broken_base_is_named_and_nothing_is_written(
    fault: str, tiny_base: Path, make_adapter: MakeAdapter, tmp_path: Path
) -> None:
    adapter = make_adapter(LoraConfig(r=4))
    base = shutil.copytree(tiny_base, tmp_path / "base")
    file, name = base / "model.safetensors", "model.layers.1.mlp.up_proj.weight"
    tensors = safetensors.torch.load_file(file)
    changed: dict[str, dict[str, Any]] = {
        "missing": {key: tensor for key, tensor in tensors.items() if key != name},
        "shape": tensors | {name: tensors[name][:-1]},
        "nan": tensors | {name: tensors[name] * float("nan")},
    }
    if fault == "truncated":
        file.write_bytes(file.read_bytes()[:-9])
    else:
        safetensors.torch.save_file(changed[fault], file, metadata={"format": "pt"})
    said = {"missing": f"missing, the first is {name}", "shape": f"tensor {name} has shape", "truncated": "damaged"}
    with pytest.raises(
        RunError if fault == "nan" else BaseModelError, match=said.get(fault, f"{name} has values that aren't finite")
    ):
        merge_to_folder(adapter, tmp_path / "out", base)
    assert {path.name for path in tmp_path.iterdir()} == {"adapter", "base"}


@pytest.mark.parametrize("fault", ["config", "tensors", "truncated", "nan", "half"])
def test_a_broken_adapter_is_named_and_nothing_is_written(
    fault: str, tiny_base: Path, make_adapter: MakeAdapter, tmp_path: Path
) -> None:
    adapter = make_adapter(LoraConfig(r=4))
    file, tensors = adapter / "adapter_model.safetensors", read_adapter(adapter).tensors
    (adapter / "peftkit.json").unlink()
    first = sorted(tensors)[0]
    match fault:
        case "config":
            (adapter / "adapter_config.json").unlink()
        case "tensors":
            file.unlink()
        case "truncated":
            file.write_bytes(file.read_bytes()[:-9])
        case "nan":
            safetensors.torch.save_file(tensors | {first: tensors[first] * float("nan")}, file)
        case _:
            safetensors.torch.save_file({key: tensors[key] for key in tensors if "B.weight" in key}, file)
    said = {
        "config": "has no adapter_config.json",
        "tensors": "has no adapter_model.safetensors",
        "truncated": "damaged",
        "nan": "aren't finite",
        "half": "missing",
    }
    with pytest.raises(AdapterError, match=said[fault]):
        merge_to_folder(adapter, tmp_path / "out", tiny_base)
    assert {path.name for path in tmp_path.iterdir()} == {"adapter"}


def test_the_card_says_where_the_model_comes_from(tiny_base: Path, make_adapter: MakeAdapter, tmp_path: Path) -> None:
    base = shutil.copytree(tiny_base, tmp_path / "base")
    (base / "README.md").write_text("---\nlicense: apache-2.0\n---\n")
    adapter = make_adapter(LoraConfig(r=4), base=base)
    record = json.loads((adapter / "peftkit.json").read_text())
    data = {"train": {"path": "/home/me/notes.jsonl", "rows": 24, "sha256": "ab12"}}
    (adapter / "peftkit.json").write_text(
        json.dumps(record | {"data": data, "metrics": {"eval_loss": 0.15}, "seed": 7})
    )
    merge_to_folder(adapter, tmp_path / "out", base)
    card = (tmp_path / "out" / "README.md").read_text()
    assert "license: apache-2.0" in card and 'base_model: "base"' in card and str(tmp_path) not in card
    for said in (record["uid"], "notes.jsonl, 24 rows, SHA-256 ab12", "eval_loss: 0.15", "- seed: 7", "100.0000%"):
        assert said in card, said
    assert "/home/me" not in card
