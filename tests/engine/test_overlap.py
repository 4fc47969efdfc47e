"""Steps that start before the last one's tokens are known: what they compute, drop, and leave when they fail."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from peftkit_serve import Engine, Request, RequestOutput, SamplingParams
from peftkit_serve.plan import UNKNOWN, StepPlan, StepResult
from peftkit_serve.runner import Launched

MakeEngine = Callable[..., Engine]
EveryKind = Callable[..., dict[str, Path]]


def ask(
    prompt: list[int], adapter: str | None = None, max_tokens: int = 9, name: str | None = None, **ways: Any
) -> Request:
    params = SamplingParams(**({"temperature": 0.0, "ignore_eos": True, "max_tokens": max_tokens} | ways))
    return Request(prompt, adapter, params) if name is None else Request(prompt, adapter, params, name)


def drain(engine: Engine) -> dict[str, RequestOutput]:
    """The last output of each request."""
    last: dict[str, RequestOutput] = {}
    while engine.has_work():
        last |= {output.request_id: output for output in engine.step()}
        engine.check_integrity()
    return last


def watch(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The calls of the runner from now on; a step with tokens that are not known is "ahead"."""
    calls: list[str] = []
    launch, collect = engine._runner.launch, engine._runner.collect

    def launched(plan: StepPlan) -> Launched | StepResult:
        calls.append("ahead" if any(UNKNOWN in chunk.token_ids for chunk in plan.chunks) else "known")
        return launch(plan)

    def collected(one: Launched) -> StepResult:
        calls.append("wait")
        return collect(one)

    monkeypatch.setattr(engine._runner, "launch", launched)
    monkeypatch.setattr(engine._runner, "collect", collected)
    return calls


def test_a_step_starts_before_the_host_waits_for_the_one_before(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(overlap=True)
    calls = watch(engine, monkeypatch)
    engine.add_request(ask([5, 6, 7], max_tokens=4))
    drain(engine)
    assert calls == ["known", "ahead", "wait", "ahead", "wait", "ahead", "wait", "wait"]
    assert engine.stats()["steps"] == 4, "none is computed in vain when the number of tokens is known"


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize(
    "ways",
    [{"repetition_penalty": 1.5}, {"frequency_penalty": 0.5}, {"presence_penalty": 1.0, "logit_bias": ((9, 3.0),)}],
)
def test_a_penalty_takes_the_token_before_where_the_device_has_it(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, ways: dict[str, Any], graphs: bool
) -> None:
    engine = make_engine(overlap=True, graphs=graphs)
    calls = watch(engine, monkeypatch)
    requests = [ask([5, 6, 7], max_tokens=12, **ways), ask([8, 9], max_tokens=9), ask([9] * 40, max_tokens=11, **ways)]
    for request in requests:
        engine.add_request(request)
    found = drain(engine)
    for request in requests:
        alone = next(make_engine(overlap=False).generate([request]))
        assert found[request.request_id].token_ids == alone.token_ids
    assert calls.count("ahead") >= 10, "no step is waited for"


def test_a_draw_that_is_held_to_a_schema_waits_for_the_tokens_before_it(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(overlap=True)
    calls = watch(engine, monkeypatch)
    request = ask([5, 6, 7], max_tokens=6, json_schema='{"type": "boolean"}')
    engine.add_request(request)
    assert drain(engine)[request.request_id].token_ids == next(make_engine().generate([request])).token_ids
    assert set(calls) == {"known"}, "such a step is waited for where it is launched"


@pytest.mark.parametrize("graphs", [False, True])
def test_answers_and_counts_are_those_of_steps_one_after_the_other(
    make_engine: MakeEngine, every_kind: EveryKind, seed: int, graphs: bool
) -> None:
    rng, folders = random.Random(seed), every_kind(seed)
    engines = [make_engine(overlap=overlap, graphs=graphs, num_pages=30, max_adapters=3) for overlap in (True, False)]
    for engine in engines:
        for name, folder in folders.items():
            engine.adapters.add(name, folder)
    ways: list[dict[str, Any]] = [{"ignore_eos": False}, {"stop": ("a", "e")}, {"logprobs": 1}, {"prompt_logprobs": 1}]
    requests = [
        ask(
            [rng.randrange(256) for _ in range(rng.randint(1, 30))], rng.choice([None, *folders]), rng.randint(1, 25),
            str(n), temperature=1.0, seed=n, **rng.choice([{}, {}, *ways]),
        )
        for n in range(30)
    ]  # fmt: skip
    ahead, plain = ({output.request_id: output for output in engine.generate(requests)} for engine in engines)
    assert ahead == plain
    counts = ("prompt_tokens", "generated_tokens")
    assert [engines[0].stats()[name] for name in counts] == [engines[1].stats()[name] for name in counts]


def test_a_request_that_is_aborted_while_it_is_computed_leaves_its_id_to_another(make_engine: MakeEngine) -> None:
    engine = make_engine(overlap=True)
    expected = next(make_engine().generate([ask([9, 8], name="x")])).token_ids
    for num_steps in range(4):
        engine.add_request(ask([1, 2, 3], name="x", max_tokens=40))
        for _ in range(num_steps):
            engine.step()
        aborted = engine.abort("x")
        assert aborted is not None and len(aborted.token_ids) == max(0, num_steps - 1)
        engine.add_request(ask([9, 8], name="x"))
        assert drain(engine)["x"].token_ids == expected


def test_a_start_that_fails_costs_only_those_that_fail_alone(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    rng = random.Random(seed)
    requests = [ask([rng.randrange(256) for _ in range(5)], name=str(n), max_tokens=12) for n in range(4)]
    expected = {output.request_id: output.token_ids for output in make_engine().generate(requests)}
    engine = make_engine(overlap=True)
    launch, number = engine._runner.launch, 0

    def fail(plan: StepPlan) -> Launched | StepResult:
        nonlocal number
        number += 1
        alone = len(plan.chunks) == 1
        if (number % 3 == 2 and not alone) or (alone and number > 6 and plan.chunks[0].request_id == "2"):
            raise RuntimeError("device")
        return launch(plan)

    monkeypatch.setattr(engine._runner, "launch", fail)
    for request in requests:
        engine.add_request(request)
    last = drain(engine)
    assert last["2"].finish_reason == "error" and "RuntimeError" in (last["2"].error or "")
    assert last["2"].token_ids == expected["2"][: len(last["2"].token_ids)]
    assert all(last[name].token_ids == expected[name] for name in "013")


def test_a_step_that_fails_under_way_ends_its_requests_and_the_engine_goes_on(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(overlap=True, max_requests=2)
    expected = next(make_engine().generate([ask([1, 2])])).token_ids
    for name in "abc":
        engine.add_request(ask([1, 2], name=name))
    engine.step()
    engine.step()

    def fail(_: Launched) -> StepResult:
        raise RuntimeError("device")

    with monkeypatch.context() as patch:
        patch.setattr(engine._runner, "collect", fail)
        outputs = engine.step()
    assert {(output.request_id, output.finish_reason) for output in outputs} == {("a", "error"), ("b", "error")}
    assert drain(engine)["c"].token_ids == expected
    assert engine.stats()["pages_used"] == 0
