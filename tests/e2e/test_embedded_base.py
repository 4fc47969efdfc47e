"""The real base and the shipped adapters: one batch of every kind, HF PEFT beside us, and a few steps of training."""

import json
from pathlib import Path
from typing import Literal

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from peftkit import resources
from peftkit.artifact import load_adapter, read_adapter
from peftkit.base import load_base, resolve_base
from peftkit.methods import LoraConfig, attach, attached, detach
from peftkit.recipe import load_recipe
from peftkit.train import train
from peftkit_serve import Engine, Request, SamplingParams

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("embedded_cache")]

ADAPTERS = ("address-lora", "address-prompt", "sentiment-lora", "sentiment-prompt")


def prompts(task: str, count: int) -> list[str]:
    lines = resources.find(f"example:{task}/test.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["prompt"] for line in lines[:count]]


def folder(name: str) -> Path:
    found = resources.shipped(f"adapters/{name}")
    assert found is not None
    return found


def test_shipped_adapters_are_small_and_made_for_the_embedded_base() -> None:
    base = resolve_base("smollm2-135m")
    sizes = [file.stat().st_size for name in ADAPTERS for file in folder(name).rglob("*") if file.is_file()]
    assert sum(sizes) < 5e6
    for name in ADAPTERS:
        artifact = read_adapter(folder(name), base=base, strict_base=True)
        assert artifact.record["base"]["id"] == "smollm2-135m" and artifact.record["quant"] == "nf4"


def test_every_row_of_a_mixed_batch_has_the_tokens_of_its_solo_run() -> None:
    engine = Engine("smollm2-135m", quant="nf4", deterministic=True, num_pages=128)
    for name in ADAPTERS:
        engine.adapters.add(name, folder(name))
    greedy, drawn = SamplingParams(max_tokens=6, temperature=0), SamplingParams(max_tokens=6, temperature=0.9, seed=7)
    requests = [
        Request(prompt=text, adapter=name, sampling=drawn if name == "address-prompt" else greedy, request_id=f"{name}")
        for name, text in zip((*ADAPTERS, None), prompts("address", 3) + prompts("sentiment", 2), strict=True)
    ]
    solo = {request.request_id: next(iter(engine.generate([request]))).token_ids for request in requests}
    mixed = {output.request_id: output.token_ids for output in engine.generate(requests)}
    assert mixed == solo
    engine.check_integrity()


@pytest.mark.parametrize("name", ADAPTERS)
def test_peft_gives_the_same_logits_on_the_real_base(name: str) -> None:
    base = resolve_base("smollm2-135m")
    tokenizer = AutoTokenizer.from_pretrained(base.path)
    ids = tokenizer(prompts(name.partition("-")[0], 1)[0], return_tensors="pt").input_ids
    model, _ = load_base(base)
    with torch.no_grad():
        ours = load_adapter(model, folder(name))(input_ids=ids).logits
        theirs = peft.PeftModel.from_pretrained(detach(model), str(folder(name)))(input_ids=ids).logits
    assert attached(model) == []
    torch.testing.assert_close(ours, theirs[:, -ids.shape[1] :], atol=2e-3, rtol=1e-4)


@pytest.mark.parametrize("name", ["address-lora", "sentiment-prompt"])
def test_training_twice_with_one_seed_gives_the_same_bits(name: str, tmp_path: Path) -> None:
    uids = []
    for run in ("a", "b"):
        settings = ["train.max_steps=2", "train.batch_size=2", "data.valid=null", f"out={tmp_path / run}"]
        uids.append(train(load_recipe(f"recipes/{name}.yaml", settings)).uid)
    assert uids[0] == uids[1]


def test_the_engines_base_computes_what_transformers_computes() -> None:
    base = resolve_base("smollm2-135m")
    prompt = prompts("address", 1)[0]
    tokenizer = AutoTokenizer.from_pretrained(base.path)
    model = AutoModelForCausalLM.from_pretrained(base.path, dtype=torch.float32)
    ids = tokenizer(prompt, return_tensors="pt").input_ids
    expected = model.generate(ids, max_new_tokens=12, do_sample=False)[0, ids.shape[1] :].tolist()
    engine = Engine(base, num_pages=64)
    (output,) = engine.generate([Request(prompt=prompt, sampling=SamplingParams(max_tokens=12, temperature=0))])
    assert list(output.token_ids) == expected


@pytest.mark.parametrize("init", ["pissa", "loftq"])
def test_a_start_from_the_weights_has_nearly_the_loss_of_the_base(init: Literal["pissa", "loftq"]) -> None:
    lines = resources.find("example:address/test.jsonl").read_text(encoding="utf-8").splitlines()[:8]
    rows = [row["prompt"] + row["completion"] for row in map(json.loads, lines)]

    def loss(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> float:
        ids = [tokenizer(row, return_tensors="pt").input_ids for row in rows]
        with torch.no_grad():
            return sum(model(input_ids=one, labels=one).loss.item() for one in ids) / len(ids)

    model, tokenizer = load_base("smollm2-135m", quant="nf4")
    quantised = loss(model, tokenizer)
    started = loss(attach(model, LoraConfig(init=init), seed=0), tokenizer)
    if init == "pissa":
        assert started == pytest.approx(quantised, rel=1e-2)
    else:  # it makes up for some of what rounding cost
        assert loss(*load_base("smollm2-135m")) < started < quantised
