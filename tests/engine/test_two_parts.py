"""Adapters with weights and virtual tokens both: one slot and one prefix that come, serve and go together."""

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from peftkit.artifact import load_adapter, read_adapter, write_parts
from peftkit_serve import Engine, Request, RequestOutput, SamplingParams

Record = Callable[[Engine], dict[tuple[str, int], torch.Tensor]]
EveryKind = Callable[..., dict[str, Path]]

PAIRS = [
    ("lora", "prompt"),
    ("lora-some", "prefix"),
    ("dora", "prompt"),
    ("houlsby", "ptuning"),
    ("pfeiffer", "ptuning_v2"),
]


def add_pairs(engine: Engine, folders: dict[str, Path]) -> list[str]:
    base = {"layers": engine.spec.num_layers, "kv_heads": engine.spec.num_kv_heads}
    for weights, virtual in PAIRS:
        parts = [read_adapter(folders[name]).parts[0] for name in (weights, virtual)]
        path = folders[weights].parent / f"{weights}+{virtual}"
        write_parts(path, [(part.config, part.tensors) for part in parts], {"base": base})
        engine.adapters.add(f"{weights}.{virtual}", path)
    return engine.adapters.names()


def ask(rng: random.Random, adapter: str | None, max_tokens: int = 8) -> Request:
    prompt = [rng.randrange(256) for _ in range(rng.randint(1, 40))]
    return Request(prompt, adapter, SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True))


def run(engine: Engine, requests: list[Request]) -> dict[str, RequestOutput]:
    return {output.request_id: output for output in engine.generate(requests)}


@pytest.mark.parametrize("deterministic", [False, True])
def test_both_parts_are_applied_as_transformers_applies_them(
    make_engine: Callable[..., Engine],
    base_folder: Path,
    every_kind: EveryKind,
    record_logits: Record,
    seed: int,
    deterministic: bool,
) -> None:
    engine, rng, folders = (
        make_engine(deterministic=deterministic, max_adapters=4),
        random.Random(seed),
        every_kind(seed),
    )
    names = add_pairs(engine, folders)
    logits, requests = record_logits(engine), [ask(rng, name) for name in [*names, None]]
    outputs = run(engine, requests)
    for request in requests:
        model = AutoModelForCausalLM.from_pretrained(base_folder, dtype=torch.float32)
        for part in request.adapter.split(".") if request.adapter else ():
            load_adapter(model, folders[part])
        answer = list(outputs[request.request_id].token_ids)
        with torch.no_grad():
            exact = model(input_ids=torch.tensor([[*request.prompt, *answer]])).logits[0][-len(answer) - 1 : -1]
        ours = torch.stack([logits[request.request_id, step] for step in range(len(answer))])
        torch.testing.assert_close(ours, exact, atol=1e-4, rtol=0)


def test_slots_and_pages_come_and_go_together_and_change_no_bit(
    make_engine: Callable[..., Engine], every_kind: EveryKind, record_logits: Record, seed: int
) -> None:
    rng, folders = random.Random(seed), every_kind(seed)
    engine, roomy = make_engine(num_pages=16, max_adapters=2), make_engine(max_adapters=9)
    names: list[str | None] = []
    for one in (engine, roomy):
        for name, folder in folders.items():
            one.adapters.add(name, folder)
        names = [*add_pairs(one, folders), None]
    logits, alone = record_logits(engine), record_logits(roomy)
    requests = [ask(rng, rng.choice(names), rng.randint(1, 12)) for _ in range(30)]
    outputs = run(engine, requests)
    for request in requests:
        again = replace(request, request_id=f"again-{request.request_id}")
        assert run(roomy, [again])[again.request_id].token_ids == outputs[request.request_id].token_ids
        for step in range(request.sampling.max_tokens):
            assert torch.equal(logits[request.request_id, step], alone[again.request_id, step]), request.adapter
    for name in names:
        if name is not None:
            engine.adapters.remove(name)
    stats = engine.stats()
    assert stats["pages_used"] == stats["adapter_bytes"] == stats["adapters_resident"] == 0


def test_a_prefix_that_fails_gives_its_slot_back(
    make_engine: Callable[..., Engine], every_kind: EveryKind, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, rng = make_engine(), random.Random(seed)
    add_pairs(engine, every_kind(seed))

    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError("no room")

    requests = [ask(rng, "lora.prompt"), ask(rng, "lora-some.prefix"), ask(rng, None)]
    with monkeypatch.context() as patch:
        patch.setattr(engine._runner, "compute_prefix", fail)
        patch.setattr(engine._runner, "write_prefix", fail)
        reasons = [run(engine, requests)[request.request_id].finish_reason for request in requests]
    assert reasons == ["error", "error", "length"]
    engine.check_integrity()
    assert engine.stats()["adapter_bytes"] == engine.stats()["pages_used"] == 0
    assert all(output.finish_reason == "length" for output in run(engine, requests).values())
