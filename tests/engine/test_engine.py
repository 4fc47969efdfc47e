"""The engine over a tiny random Llama: what it generates, what it refuses, what it gives back."""

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from peftkit.artifact import read_adapter, write_adapter
from peftkit.base import resolve_base
from peftkit.errors import BaseModelError, InputError, RunError
from peftkit_serve import Engine, Request, RequestOutput, SamplingParams
from peftkit_serve.plan import StepPlan, StepResult

MakeEngine = Callable[..., Engine]
Folder = Callable[..., Path]
EveryKind = Callable[..., dict[str, Path]]
Logits = dict[tuple[str, int], torch.Tensor]
Record = Callable[[Engine], Logits]


def ask(prompt: list[int] | str, adapter: str | None = None, max_tokens: int = 12, **sampling: object) -> Request:
    fields = {"temperature": 0.0, "ignore_eos": True, "max_tokens": max_tokens} | sampling
    return Request(prompt, adapter, SamplingParams(**fields))  # type: ignore[arg-type]


def random_prompt(rng: random.Random, low: int = 1, high: int = 40) -> list[int]:
    return [rng.randrange(256) for _ in range(rng.randint(low, high))]


def solo(engine: Engine, request: Request) -> RequestOutput:
    """The same request again, alone."""
    (output,) = engine.generate([Request(request.prompt, request.adapter, request.sampling)])
    return output


def add_all(engine: Engine, folders: dict[str, Path]) -> list[str | None]:
    """Registers adapters of every kind; returns their names, and None."""
    for name, folder in folders.items():
        engine.adapters.add(name, folder)
    return [*engine.adapters.names(), None]


def assert_same_logits(ours: tuple[Logits, Request], theirs: tuple[Logits, Request]) -> None:
    """Bit for bit, at every token of a request."""
    (left, one), (right, other) = ours, theirs
    for step in range(one.sampling.max_tokens):
        assert torch.equal(left[one.request_id, step], right[other.request_id, step]), (one.adapter, step)


def drain(engine: Engine) -> dict[str, RequestOutput]:
    """Steps until nothing is left; the last output of each request."""
    last: dict[str, RequestOutput] = {}
    while engine.has_work():
        last |= {output.request_id: output for output in engine.step()}
        engine.check_integrity()
    return last


def assert_nothing_held(engine: Engine) -> None:
    """Removes the adapters too: then every page is free."""
    engine.check_integrity()
    for name in engine.adapters.names():
        assert engine.adapters.get(name).references == 0
        engine.adapters.remove(name)
    stats = engine.stats()
    assert stats["pages_free"] == stats["pages_total"] and stats["pages_used"] == 0
    assert stats["adapter_bytes"] == stats["adapters_resident"] == stats["adapters"] == 0
    engine.check_integrity()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_mixed_batch_gives_each_request_bit_for_bit_its_solo_run(
    make_engine: MakeEngine, every_kind: EveryKind, record_logits: Record, seed: int, temperature: float
) -> None:
    engine, rng = make_engine(), random.Random(seed)
    names = add_all(engine, every_kind(seed))
    logits = record_logits(engine)
    requests: list[Request] = []
    outputs: dict[str, RequestOutput] = {}
    for number in range(25):  # they join while others run, and leave at different steps
        request = ask(
            random_prompt(rng), names[number % len(names)], rng.randint(1, 20), temperature=temperature, seed=number
        )
        requests.append(request)
        engine.add_request(request)
        for _ in range(rng.randint(0, 3)):
            outputs |= {output.request_id: output for output in engine.step()}
    outputs |= drain(engine)
    for request in requests:
        alone = Request(request.prompt, request.adapter, request.sampling)
        (output,) = engine.generate([alone])
        assert outputs[request.request_id].token_ids == output.token_ids, request.adapter
        assert_same_logits((logits, request), (logits, alone))
    assert len({output.token_ids for output in outputs.values()}) > 5
    assert_nothing_held(engine)


@pytest.mark.parametrize("deterministic", [False, True])
def test_requests_without_an_adapter_are_bit_for_bit_the_same_in_an_engine_with_adapters(
    make_engine: MakeEngine, every_kind: EveryKind, record_logits: Record, seed: int, deterministic: bool
) -> None:
    rng = random.Random(seed)
    bare, full = make_engine(deterministic=deterministic), make_engine(deterministic=deterministic)
    names = add_all(full, every_kind(seed))
    requests = [ask(random_prompt(rng), None, 30, temperature=1.0, seed=n) for n in range(3)]
    neighbours = [ask(random_prompt(rng), name, 30) for name in names]
    if not deterministic:  # the same batch, beside adapters that have answered already
        list(full.generate(neighbours))
        neighbours = []
    left, right = record_logits(bare), record_logits(full)
    expected = {output.request_id: output for output in bare.generate(requests)}
    got = {output.request_id: output for output in full.generate([*requests, *neighbours])}
    for request in requests:
        assert got[request.request_id] == expected[request.request_id]
        assert_same_logits((left, request), (right, request))


def test_more_adapters_than_slots_are_all_served_with_their_own_weights(
    make_engine: MakeEngine, lora_folder: Folder, seed: int
) -> None:
    engine, rng = make_engine(max_adapters=2), random.Random(seed)
    for number in range(6):
        engine.adapters.add(f"lora-{number}", lora_folder(seed + number))
    prompt = random_prompt(rng, 10)
    requests = [ask(prompt, f"lora-{number % 6}", 10) for number in range(18)]
    outputs = {output.request_id: output.token_ids for output in engine.generate(requests)}
    by_adapter = {r.adapter: {outputs[q.request_id] for q in requests if q.adapter == r.adapter} for r in requests}
    assert all(len(tokens) == 1 for tokens in by_adapter.values())
    assert len(set().union(*by_adapter.values())) == 6
    assert engine.stats()["adapters_resident"] == 2
    assert_nothing_held(engine)


def test_tight_memory_preempts_and_changes_no_token(make_engine: MakeEngine, every_kind: EveryKind, seed: int) -> None:
    tight, roomy, rng = make_engine(num_pages=12), make_engine(), random.Random(seed)
    folders = every_kind(seed)
    names = add_all(tight, folders)
    add_all(roomy, folders)
    requests = [ask(random_prompt(rng, 5, 20), names[n % len(names)], 40, temperature=1.0, seed=n) for n in range(20)]
    outputs = {output.request_id: output for output in tight.generate(requests)}
    assert tight.stats()["preemptions"] > 0 and roomy.stats()["preemptions"] == 0
    for request in requests:
        assert outputs[request.request_id].token_ids == solo(roomy, request).token_ids
    assert_nothing_held(tight)


def test_a_seed_fixes_the_draws_and_no_seed_draws_anew(make_engine: MakeEngine, seed: int) -> None:
    engine, prompt = make_engine(), random_prompt(random.Random(seed))
    requests = [ask(prompt, None, 30, temperature=1.5, seed=s) for s in (7, 7, 7 + 2**63, -5, None, None)]
    outputs = {output.request_id: output.token_ids for output in engine.generate(requests)}
    same, again, wrapped, negative, fresh, other = (outputs[request.request_id] for request in requests)
    assert same == again == wrapped
    assert len({same, negative, fresh, other}) == 4


def test_text_and_ids_of_the_same_prompt_generate_the_same(make_engine: MakeEngine) -> None:
    engine = make_engine()
    ids = list(engine.tokenizer.encode("Grüße, world"))
    by_text, by_ids = solo(engine, ask("Grüße, world")), solo(engine, ask(ids))
    assert by_text.token_ids == by_ids.token_ids and by_text.num_prompt_tokens == len(ids)


def test_text_is_what_decoding_all_tokens_gives_and_deltas_join_to_it(make_engine: MakeEngine, seed: int) -> None:
    engine, rng = make_engine(), random.Random(seed)
    for number in range(4):
        engine.add_request(ask(random_prompt(rng), None, 40, temperature=2.0, seed=number))
    deltas: dict[str, str] = {}
    finals: list[RequestOutput] = []
    while engine.has_work():
        for output in engine.step():
            deltas[output.request_id] = deltas.get(output.request_id, "") + output.delta
            assert deltas[output.request_id] == output.text
            finals += [output] if output.finish_reason else []
    assert len(finals) == 4
    for output in finals:
        assert output.text == engine.tokenizer.decode(list(output.token_ids), skip_special_tokens=True)
        assert output.finish_reason == "length" and len(output.token_ids) == 40


def test_the_end_token_ends_the_text_unless_it_is_ignored(
    make_engine: MakeEngine, base_folder: Path, tmp_path: Path, seed: int
) -> None:
    prompt = random_prompt(random.Random(seed))
    tokens = solo(make_engine(), ask(prompt, None, 30, temperature=1.0, seed=seed)).token_ids
    end = tokens[6]
    num_tokens = 1 + next(index for index, token in enumerate(tokens) if token in (end, 256))
    folder = shutil.copytree(base_folder, tmp_path / "base")
    for file in ("config.json", "generation_config.json"):
        content = json.loads((folder / file).read_text())
        (folder / file).write_text(json.dumps(content | {"eos_token_id": [256, end]}))
    engine = make_engine(folder)
    output = solo(engine, ask(prompt, None, 30, temperature=1.0, seed=seed, ignore_eos=False))
    assert output.finish_reason == "stop" and output.token_ids == tokens[:num_tokens]
    assert output.text == engine.tokenizer.decode(list(output.token_ids[:-1]), skip_special_tokens=True)
    assert solo(engine, ask(prompt, None, 30, temperature=1.0, seed=seed)).token_ids == tokens
    assert_nothing_held(engine)


def test_a_stop_string_ends_the_text_before_it(make_engine: MakeEngine, seed: int) -> None:
    engine, prompt = make_engine(), random_prompt(random.Random(seed))
    whole = solo(engine, ask(prompt, None, 60, temperature=1.0, seed=seed)).text
    stop = whole[len(whole) // 2 :][:3]
    output = solo(engine, ask(prompt, None, 60, temperature=1.0, seed=seed, stop=(stop,)))
    assert output.finish_reason == "stop" and output.text == whole[: whole.index(stop)]
    assert_nothing_held(engine)


@pytest.mark.parametrize("num_steps", [0, 1, 2, 5])
def test_aborting_at_any_moment_gives_back_everything(
    make_engine: MakeEngine, every_kind: EveryKind, seed: int, num_steps: int
) -> None:
    engine, rng = make_engine(max_tokens_per_step=8), random.Random(seed)
    names = add_all(engine, every_kind(seed))
    ids = [engine.add_request(ask(random_prompt(rng, 10), name, 50)) for name in names]
    for _ in range(num_steps):
        engine.step()
    for request_id in ids:
        output = engine.abort(request_id)
        assert output is not None and output.finish_reason == "abort"
        engine.check_integrity()
    assert engine.abort(ids[0]) is None and not engine.has_work()
    assert_nothing_held(engine)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_failing_step_ends_its_requests_and_the_engine_goes_on(
    make_engine: MakeEngine, prompt_folder: Folder, seed: int, monkeypatch: pytest.MonkeyPatch, overlap: bool
) -> None:
    engine, rng = make_engine(max_requests=2, overlap=overlap), random.Random(seed)
    engine.adapters.add("p", prompt_folder(seed))
    expected = [solo(engine, ask([5, 6, 7], name)).token_ids for name in (None, "p")]
    failing = [engine.add_request(ask(random_prompt(rng, high=9), name)) for name in (None, "p")]
    waiting = [engine.add_request(ask([5, 6, 7], name)) for name in (None, "p")]

    def launch(plan: StepPlan) -> StepResult:
        raise torch.OutOfMemoryError("no room")

    with monkeypatch.context() as patch:
        patch.setattr(engine._runner, "launch", launch)
        outputs = engine.step()
    assert [(output.request_id, output.finish_reason) for output in outputs] == [(one, "error") for one in failing]
    assert all(output.error and "OutOfMemoryError" in output.error for output in outputs)
    last = drain(engine)
    assert [last[one].token_ids for one in waiting] == expected
    assert_nothing_held(engine)


def test_an_adapter_that_overflows_fails_its_own_request_and_spoils_no_page(
    make_engine: MakeEngine, lora_folder: Folder, seed: int
) -> None:
    engine = make_engine(num_pages=6)
    usual = read_adapter(lora_folder(seed, r=4))
    tensors = {name: tensor * 1e20 for name, tensor in usual.tensors.items()}
    engine.adapters.add("huge", write_adapter(usual.path, usual.config, tensors).path)
    request = ask([5, 6, 7], None, 60)
    expected = solo(engine, request).token_ids
    huge, fine = ask(list(range(40)), "huge", 5), ask([5, 6, 7])
    outputs = {output.request_id: output for output in engine.generate([huge, fine])}
    assert outputs[huge.request_id].finish_reason == "error" and outputs[huge.request_id].token_ids == ()
    assert "not finite" in (outputs[huge.request_id].error or "")
    assert outputs[fine.request_id].token_ids == expected[:12]
    assert solo(engine, request).token_ids == expected, "pages that held what is not finite are as good as new"
    assert_nothing_held(engine)


def test_a_prompt_adapter_that_cannot_be_computed_fails_its_request_only_and_is_tried_again(
    make_engine: MakeEngine, prompt_folder: Folder, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine()
    engine.adapters.add("p", prompt_folder(seed))

    def compute(*_: object) -> None:
        raise torch.OutOfMemoryError("no room")

    with monkeypatch.context() as patch:
        patch.setattr(engine._runner, "compute_prefix", compute)
        broken, fine = ask([1, 2], "p"), ask([1, 2])
        outputs = {output.request_id: output for output in engine.generate([broken, fine])}
    assert outputs[broken.request_id].finish_reason == "error" and outputs[fine.request_id].finish_reason == "length"
    assert engine.adapters.get("p").state == "failed"
    assert solo(engine, broken).finish_reason == "length" and engine.adapters.get("p").state == "ready"
    assert_nothing_held(engine)


def test_bad_requests_are_refused_by_field_and_leave_no_trace(
    make_engine: MakeEngine, prompt_folder: Folder, seed: int
) -> None:
    engine = make_engine()
    engine.adapters.add("sentiment", prompt_folder(seed, 20))
    assert (engine.room(), engine.room("sentiment")) == (160, 140)
    cases = [
        (ask([1], "sentimant"), "model", "did you mean 'sentiment'"),
        (ask([]), "prompt", "empty"),
        (ask(""), "prompt", "empty"),
        (ask("a\ud800"), "prompt", "surrogate"),
        (ask([1, 260]), "prompt", "260"),
        (ask([-1]), "prompt", "-1"),
        (ask([1] * 160), "prompt", "160"),
        (ask([1] * 140, "sentiment"), "prompt", "140"),
    ]
    for request, field, words in cases:
        with pytest.raises(InputError, match=words) as caught:
            engine.add_request(request)
        assert caught.value.field == field
    assert not engine.has_work()
    assert_nothing_held(engine)


@pytest.mark.parametrize("field", ["max_requests", "max_adapters", "num_pages", "max_tokens_per_step"])
def test_a_setting_that_is_too_small_is_refused_by_name(make_engine: MakeEngine, field: str) -> None:
    with pytest.raises(InputError, match=field) as caught:
        make_engine(**{field: 0})
    assert caught.value.field == field


def test_a_request_id_in_use_is_refused_and_the_first_request_unharmed(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.add_request(Request([1], request_id="x"))
    with pytest.raises(InputError, match="in use") as caught:
        engine.add_request(Request([2], request_id="x"))
    assert caught.value.field == "request_id"
    assert drain(engine)["x"].finish_reason in ("length", "stop")
    engine.add_request(Request([1], request_id="x"))
    engine.abort("x")


@pytest.mark.parametrize(("adapter", "longest"), [(None, 159), ("p", 139)])
def test_max_tokens_is_cut_to_what_the_context_leaves(
    make_engine: MakeEngine, prompt_folder: Folder, seed: int, adapter: str | None, longest: int
) -> None:
    engine = make_engine()
    engine.adapters.add("p", prompt_folder(seed, 20))
    one, nine = (solo(engine, ask([3] * size, adapter, 500)) for size in (longest, longest - 8))
    assert (len(one.token_ids), len(nine.token_ids)) == (1, 9)
    assert one.finish_reason == nine.finish_reason == "length"


def test_the_kv_memory_bounds_the_context_too(make_engine: MakeEngine) -> None:
    engine = make_engine(num_pages=4)
    assert engine.room() == 64
    assert len(solo(engine, ask([3] * 60, None, 50)).token_ids) == 4
    with pytest.raises(InputError, match="64"):
        engine.add_request(ask([3] * 64))


def test_requests_that_end_are_yielded_in_order_of_ending(make_engine: MakeEngine) -> None:
    engine = make_engine()
    long, short = ask([1], None, 9), ask([2], None, 2)
    assert [output.request_id for output in engine.generate([long, short])] == [short.request_id, long.request_id]


def test_generate_runs_none_when_one_is_refused_and_aborts_when_closed(make_engine: MakeEngine) -> None:
    engine = make_engine()
    with pytest.raises(InputError):
        next(iter(engine.generate([ask([1]), ask([])])))
    assert not engine.has_work()
    outputs = engine.generate([ask([1], None, 2), ask([2], None, 90)])
    next(outputs)
    with pytest.raises(RunError, match="alone"):
        next(engine.generate([ask([1])]))
    outputs.close()
    assert not engine.has_work()
    assert_nothing_held(engine)


def test_a_base_that_bitsandbytes_has_saved_in_nf4_answers_as_one_that_is_quantised_when_it_is_loaded(
    make_engine: MakeEngine, tiny_base: Path, own_cache: None, tmp_path: Path, seed: int
) -> None:
    settings = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
    model = AutoModelForCausalLM.from_pretrained(tiny_base, dtype=torch.float32, quantization_config=settings)
    stored = shutil.copytree(tiny_base, tmp_path / "stored")
    model.save_pretrained(stored)
    prompt = random_prompt(random.Random(seed), 5)
    (wanted, got) = (
        solo(make_engine(base, **fields), ask(prompt)) for base, fields in ((tiny_base, {"quant": "nf4"}), (stored, {}))
    )
    assert got.token_ids == wanted.token_ids
    with pytest.raises(BaseModelError, match="quantised already"):
        resolve_base(stored)


def test_texts_that_begin_alike_are_computed_once_and_answered_as_if_they_were_not(
    make_engine: MakeEngine, every_kind: EveryKind, record_logits: Record, seed: int
) -> None:
    rng, engine, plain = random.Random(seed), make_engine(), make_engine(prefix_cache=False)
    folders = every_kind(seed)
    names = add_all(engine, folders)
    add_all(plain, folders)
    head = random_prompt(rng, 40)
    requests = [ask([*head, *random_prompt(rng, 1, 20)], name, 6) for name in names for _ in range(3)]
    ours, theirs = record_logits(engine), record_logits(plain)
    outputs = {output.request_id: output for output in engine.generate(requests)}
    assert {output.request_id: output for output in plain.generate(requests)} == outputs
    for request in requests:
        assert_same_logits((ours, request), (theirs, request))
    assert engine.stats()["cached_tokens"] >= len(names) * 2 * 16 and plain.stats()["cached_tokens"] == 0
    assert_nothing_held(engine)


def test_what_was_computed_for_one_content_is_not_found_for_another_of_the_same_name_or_another_tenant(
    make_engine: MakeEngine, lora_folder: Folder, seed: int
) -> None:
    engine, prompt = make_engine(), random_prompt(random.Random(seed), 40)
    answers: list[tuple[int, ...]] = []
    for number in range(2):
        engine.adapters.add("x", lora_folder(seed + number))
        for tenant in ("a", "b"):
            request = Request(prompt, "x", ask(prompt).sampling, tenant=tenant)
            answers += [output.token_ids for output in engine.generate([request])]
        assert engine.stats()["cached_tokens"] == 0
        engine.adapters.remove("x")
    assert answers[0] == answers[1] != answers[2] == answers[3]
    engine.adapters.add("y", lora_folder(seed))
    (again,) = engine.generate([Request(prompt, "y", ask(prompt).sampling, tenant="a")])
    assert again.token_ids == answers[0] and engine.stats()["cached_tokens"] >= 32, "the same content by another name"


def test_a_prompts_pages_are_computed_once_shared_and_freed_with_its_name(
    make_engine: MakeEngine, prompt_folder: Folder, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine()
    engine.adapters.add("p", prompt_folder(seed, 40))
    computed = []
    compute = engine._runner.compute_prefix
    monkeypatch.setattr(engine._runner, "compute_prefix", lambda *args: (computed.append(1), compute(*args)))
    for _ in range(4):
        engine.add_request(ask([1, 2], "p", 3))
    engine.step()
    assert engine.stats()["pages_used"] == 3 + 4 * 1, "40 virtual tokens: two shared pages, the third copied for each"
    drain(engine)
    solo(engine, ask([1], "p"))
    assert len(computed) == 1 and engine.stats()["pages_used"] == 3
    engine.adapters.remove("p")
    assert engine.stats()["pages_used"] == 0


def test_counts_in_stats_follow_the_work(make_engine: MakeEngine, lora_folder: Folder, seed: int) -> None:
    engine = make_engine(max_requests=1)
    uid = engine.adapters.add("a", lora_folder(seed)).uid
    for adapter in ("a", None):
        engine.add_request(ask([1, 2, 3], adapter, 4))
    engine.step()
    stats = engine.stats()
    assert (stats["requests_running"], stats["requests_waiting"], stats["adapters"]) == (1, 1, 1)
    assert stats["running_adapters"] == [uid] and stats["waiting_adapters"] == []
    assert (
        stats["adapter_bytes"] > 0 and stats["pages_used"] == 1 and stats["weight_bytes"] > 0 and stats["kv_bytes"] > 0
    )
    drain(engine)
    stats = engine.stats()
    assert (stats["prompt_tokens"], stats["generated_tokens"], stats["steps"]) == (6, 8, 8)


def test_any_mixture_of_joining_leaving_loading_and_removing_keeps_tokens_and_counts(
    make_engine: MakeEngine, lora_folder: Folder, every_kind: EveryKind, seed: int
) -> None:
    rng = random.Random(seed)
    engine = make_engine(num_pages=14, max_requests=5, max_adapters=3, adapter_bytes=8 * 64 * 1024)
    oracle = make_engine(max_adapters=8)
    folders = [lora_folder(seed + n, r=rng.choice([1, 20, 40, 70])) for n in range(3)]  # one to three units a layer
    folders += every_kind(seed + 10).values()
    for number, folder in enumerate(folders):
        oracle.adapters.add(str(number), folder)
    known: dict[str, Request] = {}  # what the oracle is asked for each request
    last: dict[str, RequestOutput] = {}
    for _ in range(200):
        action = rng.choices(["request", "step", "abort", "add", "remove"], [4, 6, 1, 3, 1])[0]
        names = engine.adapters.names()
        if action == "request":
            name = rng.choice([*names, None])
            request = ask(random_prompt(rng, 1, 30), name, rng.randint(1, 20), temperature=1.0, seed=rng.randrange(99))
            known[engine.add_request(request)] = Request(request.prompt, name and name.split("-")[0], request.sampling)
        elif action == "step":
            last |= {output.request_id: output for output in engine.step()}
        elif action == "abort" and known:
            request_id = rng.choice(list(known))
            output = engine.abort(request_id)
            last |= {request_id: output} if output else {}
        elif action == "add":
            number = rng.randrange(len(folders))
            name = f"{number}-{rng.randrange(3)}"  # several names for one content, and names that come back
            if name not in names:
                engine.adapters.add(name, folders[number])
        elif action == "remove" and names:
            engine.adapters.remove(rng.choice(names))
        engine.check_integrity()
    last |= drain(engine)
    assert set(last) == set(known)
    for request_id, output in last.items():
        expected = solo(oracle, known[request_id]).token_ids
        assert output.finish_reason in ("length", "abort")
        assert output.token_ids == expected[: len(output.token_ids)]
        assert output.finish_reason == "abort" or len(output.token_ids) == len(expected)
    assert_nothing_held(engine)
