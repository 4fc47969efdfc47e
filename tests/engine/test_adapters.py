"""Adapters in the engine: names, loading, residency, removal."""

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors.torch
import torch
from transformers import AutoModelForCausalLM

from peftkit.artifact import save_adapter
from peftkit.errors import AdapterError, BaseMismatchError, InputError, UnsupportedError
from peftkit.methods import LoraConfig, attach
from peftkit_serve import Engine, Request, SamplingParams
from peftkit_serve.adapters.store import NameTaken

MakeEngine = Callable[..., Engine]
Folder = Callable[..., Path]


def answer(engine: Engine, adapter: str | None, prompt: tuple[int, ...] = (5, 6, 7)) -> tuple[int, ...]:
    sampling = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    (output,) = engine.generate([Request(list(prompt), adapter, sampling)])
    assert output.finish_reason == "length", output.error
    return output.token_ids


def test_an_added_adapter_is_ready_and_described(
    make_engine: MakeEngine, lora_folder: Folder, prompt_folder: Folder, seed: int
) -> None:
    engine = make_engine()
    lora = engine.adapters.add("a", lora_folder(seed, r=4, rank_pattern={"q_proj": 9}))
    prompt = engine.adapters.add("p", prompt_folder(seed, 20))
    assert (lora.state, lora.kind, lora.rank, lora.num_virtual) == ("ready", "lora", 9, 0)
    assert (prompt.state, prompt.kind, prompt.rank, prompt.num_virtual) == ("ready", "prompt", 0, 20)
    assert lora.record["uid"] == lora.uid == engine.adapters.uid("a")
    assert not lora.resident and lora.nbytes > 0 and prompt.nbytes == 20 * 32 * 4
    answer(engine, "a")
    assert engine.adapters.get("a").resident and engine.adapters.get("a").references == 0
    assert engine.adapters.names() == ["a", "p"]


def test_ranks_and_widths_that_the_kernels_have_no_room_for_are_refused(
    make_engine: MakeEngine, lora_folder: Folder, bottleneck_folder: Folder, seed: int
) -> None:
    engine = make_engine()
    with pytest.raises(AdapterError, match="rank 513, ranks up to 512"):
        engine.adapters.add("a", lora_folder(seed, rank_pattern={"q_proj": 513}))
    with pytest.raises(AdapterError, match="bottleneck of 513, sizes up to 512"):
        engine.adapters.add("a", bottleneck_folder(seed, bottleneck_size=513))
    assert engine.adapters.names() == []


def test_what_cannot_be_served_is_refused_by_folder_and_tensor(
    make_engine: MakeEngine, lora_folder: Folder, seed: int
) -> None:
    engine = make_engine()
    folder = lora_folder(seed, modules_to_save=["model.norm"])
    tensors = safetensors.torch.load_file(folder / "adapter_model.safetensors")
    tensors["base_model.model.model.norm.weight"] = torch.ones(32)
    safetensors.torch.save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "peftkit.json").unlink()
    with pytest.raises(UnsupportedError, match=r"model\.norm\.weight can't be served") as caught:
        engine.adapters.add("a", folder)
    assert str(caught.value).startswith(f"{folder}: ") and engine.adapters.names() == []


@pytest.mark.parametrize("name", ["", "a/b", "../a", "a b", "ä", "a" * 129, ".", "..", "a\n", "a@1", "base:a"])
def test_a_malformed_name_is_refused(make_engine: MakeEngine, lora_folder: Folder, seed: int, name: str) -> None:
    engine = make_engine()
    with pytest.raises(InputError, match="1 to 128") as caught:
        engine.adapters.add(name, lora_folder(seed))
    assert caught.value.field == "name" and engine.adapters.names() == []


def test_a_name_in_use_is_refused_and_keeps_its_adapter(
    make_engine: MakeEngine, lora_folder: Folder, seed: int
) -> None:
    engine = make_engine()
    uid = engine.adapters.add("a", lora_folder(seed)).uid
    with pytest.raises(NameTaken, match="'a'") as caught:
        engine.adapters.add("a", lora_folder(seed + 1))
    assert caught.value.field == "name" and engine.adapters.uid("a") == uid


def test_an_unknown_name_is_an_error_with_the_nearest_one(
    make_engine: MakeEngine, lora_folder: Folder, seed: int
) -> None:
    engine = make_engine()
    engine.adapters.add("sentiment", lora_folder(seed))
    for action, field in ((engine.adapters.get, "model"), (engine.adapters.remove, "name")):
        with pytest.raises(InputError, match="did you mean 'sentiment'") as caught:
            action("sentimnt")
        assert caught.value.field == field


def damage(folder: Path, **tensors: torch.Tensor) -> Path:
    """Overwrites tensors by the end of their key and forgets the record that would tell."""
    file = folder / "adapter_model.safetensors"
    content = safetensors.torch.load_file(file)
    for end, tensor in tensors.items():
        content[next(key for key in content if key.endswith(end))] = tensor
    safetensors.torch.save_file(content, file)
    (folder / "peftkit.json").unlink()
    return folder


def test_a_folder_that_cannot_be_served_registers_nothing_and_frees_its_name(
    make_engine: MakeEngine, lora_folder: Folder, prompt_folder: Folder, seed: int, tmp_path: Path
) -> None:
    engine = make_engine()
    bad = [
        (tmp_path / "missing", "missing"),
        (damage(lora_folder(seed), **{"q_proj.lora_A.weight": torch.full((4, 32), torch.nan)}), "finite"),
        (damage(lora_folder(seed + 1), **{"q_proj.lora_B.weight": torch.zeros(7, 4)}), "shape"),
        (damage(prompt_folder(seed, 4), prompt_embeddings=torch.zeros(4, 31)), "shape"),
        (prompt_folder(seed + 1, 159), "virtual tokens"),
    ]
    for folder, words in bad:
        with pytest.raises(AdapterError, match=words):
            engine.adapters.add("a", folder)
        assert engine.adapters.names() == [] and engine.stats()["adapters"] == 0
    engine.adapters.add("a", lora_folder(seed + 2))
    answer(engine, "a")


def test_an_adapter_of_another_base_is_refused(make_engine: MakeEngine, lora_folder: Folder, seed: int) -> None:
    folder = lora_folder(seed)
    record = folder / "peftkit.json"
    text = record.read_text().replace("{", '{"base": {"fingerprint": {"architecture": "gpt2"}, "id": "other"},', 1)
    record.write_text(text)
    with pytest.raises(BaseMismatchError, match="other"):
        make_engine().adapters.add("a", folder)


def test_a_lora_that_adapter_memory_can_never_hold_is_refused_with_numbers(
    make_engine: MakeEngine, lora_folder: Folder, seed: int
) -> None:
    engine = make_engine(adapter_bytes=2 * 64 * 1024)
    engine.adapters.add("a", lora_folder(seed, r=30))
    with pytest.raises(AdapterError, match="there are 131072"):
        engine.adapters.add("b", lora_folder(seed, r=40))
    answer(engine, "a")


def test_adapters_that_do_not_fit_together_take_turns(make_engine: MakeEngine, lora_folder: Folder, seed: int) -> None:
    engine, roomy = make_engine(adapter_bytes=6 * 64 * 1024, max_adapters=4), make_engine(max_adapters=4)
    for number, rank in enumerate((40, 70, 4, 36)):  # of two, three, one and two units a layer
        for one in (engine, roomy):
            one.adapters.add(str(number), lora_folder(seed + number, r=rank))
    sampling = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    requests = [Request([5, 6, 7], str(number % 4), sampling) for number in range(12)]
    outputs = {output.request_id: output.token_ids for output in engine.generate(requests)}
    assert engine.stats()["adapters_resident"] < 4
    alone = [answer(roomy, str(number)) for number in range(4)]
    assert [outputs[request.request_id] for request in requests] == [alone[number % 4] for number in range(12)]


def test_an_adapter_that_finds_no_place_yet_evicts_nobody(
    make_engine: MakeEngine, lora_folder: Folder, seed: int
) -> None:
    engine = make_engine(adapter_bytes=6 * 64 * 1024, max_adapters=4)
    for name, rank in (("small", 4), ("running", 40), ("large", 70)):
        engine.adapters.add(name, lora_folder(seed, r=rank))
    answer(engine, "small")
    engine.add_request(Request([1], "running", SamplingParams(max_tokens=20, ignore_eos=True)))
    engine.step()
    engine.add_request(Request([1], "large", SamplingParams(max_tokens=2, ignore_eos=True)))
    engine.step()
    assert engine.stats()["requests_waiting"] == 1
    assert engine.adapters.get("small").resident and engine.adapters.get("running").resident
    while engine.has_work():
        engine.step()
    assert engine.adapters.get("large").resident and not engine.adapters.get("small").resident


def test_a_name_that_comes_back_with_other_content_answers_with_it(
    make_engine: MakeEngine, lora_folder: Folder, prompt_folder: Folder, seed: int
) -> None:
    engine = make_engine()
    answers = []
    for version, folder in enumerate((lora_folder(seed), lora_folder(seed + 1), prompt_folder(seed)), start=1):
        assert engine.adapters.add("x", folder).version == version
        answers.append(answer(engine, "x"))
        assert engine.adapters.remove("x").state == "gone"
    assert len(set(answers)) == 3


def test_one_content_under_two_names_is_held_once_and_freed_with_the_last(
    make_engine: MakeEngine, lora_folder: Folder, seed: int
) -> None:
    engine, folder = make_engine(), lora_folder(seed)
    first, second = engine.adapters.add("a", folder), engine.adapters.add("b", folder)
    assert first.uid == second.uid and engine.adapters.find("a") is engine.adapters.find("b")
    assert answer(engine, "a") == answer(engine, "b")
    assert engine.stats()["adapters_resident"] == 1
    engine.adapters.remove("a")
    assert engine.adapters.get("b").resident
    engine.adapters.remove("b")
    assert engine.stats()["adapter_bytes"] == 0


def test_removal_takes_the_name_at_once_and_lets_running_requests_finish(
    make_engine: MakeEngine, lora_folder: Folder, prompt_folder: Folder, seed: int
) -> None:
    engine = make_engine()
    for name, folder in (("lora", lora_folder(seed)), ("prompt", prompt_folder(seed))):
        uid = engine.adapters.add(name, folder).uid
        expected = answer(engine, name)
        sampling = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
        requests = [Request([5, 6, 7], name, sampling) for _ in range(2)]
        engine.add_request(requests[0])
        engine.step()
        engine.add_request(requests[1])  # still waiting when the name goes
        entry = engine.adapters.remove(name)
        assert entry.state == "draining" and entry.references == 2 and engine.adapters.is_draining(uid)
        with pytest.raises(InputError):
            engine.add_request(Request([1], name))
        last = {}
        while engine.has_work():
            last |= {output.request_id: output.token_ids for output in engine.step()}
        assert [last[request.request_id] for request in requests] == [expected] * 2
        assert not engine.adapters.is_draining(uid)
        stats = engine.stats()
        assert stats["adapter_bytes"] == stats["pages_used"] == stats["adapters_resident"] == 0


def test_the_least_recently_used_adapter_leaves_its_slot_first(
    make_engine: MakeEngine, lora_folder: Folder, seed: int
) -> None:
    engine = make_engine(max_adapters=2)
    for index, name in enumerate("abc"):
        engine.adapters.add(name, lora_folder(seed + index))
    for name in ("a", "b", "a", "c"):
        answer(engine, name)
    assert [engine.adapters.get(name).resident for name in "abc"] == [True, False, True]


def queued(engine: Engine, name: str, max_tokens: int = 6) -> str:
    return engine.add_request(Request([5, 6], name, SamplingParams(max_tokens=max_tokens, ignore_eos=True)))


def test_a_queued_requests_adapter_sets_out_before_its_turn_and_takes_nobodys_place(
    make_engine: MakeEngine, lora_folder: Folder, prompt_folder: Folder, seed: int
) -> None:
    engine = make_engine(max_adapters=2, max_requests=1)
    for index, name in enumerate("abcd"):
        engine.adapters.add(name, lora_folder(seed + index))
    engine.adapters.add("prompt", prompt_folder(seed))

    def resident() -> str:
        return "".join(name for name in "abcd" if engine.adapters.get(name).resident)

    answer(engine, "d")
    first = queued(engine, "a")
    assert resident() == "ad", "there is a free slot"
    engine.step()
    queued(engine, "prompt")
    queued(engine, "b")
    assert resident() == "ab", "no request needs what was there"
    assert not engine.adapters.get("prompt").resident, "virtual tokens take pages, so they wait for their turn"
    queued(engine, "c")
    assert resident() == "ab", "what runs and what waits keep their slots"
    engine.check_integrity()
    engine.abort(first)
    assert resident() == "bc", "the place of what has ended"
    while engine.has_work():
        engine.step()
        engine.check_integrity()


def test_what_no_request_needs_is_evicted_before_what_a_waiting_one_does(
    make_engine: MakeEngine, lora_folder: Folder, seed: int
) -> None:
    engine = make_engine(max_adapters=2, max_requests=2)
    for index, name in enumerate("abc"):
        engine.adapters.add(name, lora_folder(seed + index))
    answer(engine, "a")
    answer(engine, "b")  # used later than a
    queued(engine, "a")
    queued(engine, "c")
    assert [engine.adapters.get(name).resident for name in "abc"] == [True, False, True]
    while engine.has_work():
        engine.step()


def test_a_load_ahead_of_its_turn_that_fails_is_tried_again_in_its_turn(
    make_engine: MakeEngine, lora_folder: Folder, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine()
    engine.adapters.add("a", lora_folder(seed))
    expected = answer(make_engine(), None)

    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError("no room")

    with monkeypatch.context() as patch:
        patch.setattr(engine._pool._memory, "load", fail)
        queued(engine, "a")
        assert engine.adapters.get("a").state == "failed"
    while engine.has_work():
        outputs = engine.step()
        assert all(output.finish_reason != "error" for output in outputs)
    assert engine.adapters.get("a").state == "ready" and answer(engine, None) == expected


def test_a_slot_with_running_requests_is_never_given_away(
    make_engine: MakeEngine, lora_folder: Folder, seed: int
) -> None:
    engine = make_engine(max_adapters=2)
    for index in range(4):
        engine.adapters.add(str(index), lora_folder(seed + index))
    alone = [answer(engine, str(index)) for index in range(4)]
    sampling = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    requests = [Request([5, 6, 7], str(index % 4), sampling) for index in range(12)]
    last = {}
    for request in requests:
        engine.add_request(request)
        last |= {output.request_id: output.token_ids for output in engine.step()}
        engine.check_integrity()
    while engine.has_work():
        last |= {output.request_id: output.token_ids for output in engine.step()}
    assert [last[request.request_id] for request in requests] == [alone[index % 4] for index in range(12)]


def test_a_folder_is_read_on_the_loaders_thread(
    make_engine: MakeEngine, lora_folder: Folder, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    import peftkit_serve.adapters.loader as loader

    threads: list[str] = []
    read = loader.read_adapter

    def watched(*args: object, **kwargs: object) -> object:
        threads.append(threading.current_thread().name)
        return read(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(loader, "read_adapter", watched)
    engine = make_engine()
    engine.adapters.add("a", lora_folder(seed))
    answer(engine, "a")
    assert len(threads) == 1 and threads[0].startswith("peftkit-adapter-loader")


def test_by_default_an_engine_for_one_adapter_holds_one_with_both_embeddings(
    make_engine: MakeEngine, base_folder: Path, tmp_path: Path
) -> None:
    model = AutoModelForCausalLM.from_pretrained(base_folder)
    attach(model, LoraConfig(r=64, modules_to_save=["embed_tokens", "lm_head"]))
    save_adapter(model, tmp_path / "whole")
    engine = make_engine(max_adapters=1)
    engine.adapters.add("whole", tmp_path / "whole")
    (output,) = engine.generate([Request([5, 6, 7], "whole", SamplingParams(max_tokens=2, ignore_eos=True))])
    assert output.finish_reason == "length"
