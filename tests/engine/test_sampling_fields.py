"""Penalties, biases, log-probabilities and constraints: each against its formula or an independent reader."""

import json
import random
from collections.abc import Callable
from typing import Any

import jsonschema_rs
import pytest
import torch
from transformers import AutoModelForCausalLM

from peftkit.errors import InputError
from peftkit_serve import Engine, Request, SamplingParams
from peftkit_serve.adjust import Late, adjusted
from peftkit_serve.plan import Sample, StepPlan, StepResult
from peftkit_serve.request import RequestOutput
from peftkit_serve.runner import Launched
from peftkit_serve.sampler import draw

MakeEngine = Callable[..., Engine]
GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}


def ask(engine: Engine, prompt: Any, adapter: str | None = None, **fields: Any) -> RequestOutput:
    return next(iter(engine.generate([Request(prompt, adapter, SamplingParams(**GREEDY | fields))])))


def test_penalties_and_biases_are_those_of_the_formula(seed: int) -> None:
    rng = random.Random(seed)
    for num_rows in (1, 1, 2, 9, 30):
        logits_NV = torch.randn(num_rows, 50) * 2
        samples: list[Sample] = []
        late: dict[int, int] = {}
        expected_NV = logits_NV.double().tolist()
        for row, expected in enumerate(expected_NV):
            params = SamplingParams(
                temperature=0.0,
                presence_penalty=rng.choice((0.0, rng.uniform(-2, 2))),
                frequency_penalty=rng.choice((0.0, rng.uniform(-2, 2))),
                repetition_penalty=rng.choice((1.0, rng.uniform(0.5, 2))),
                logit_bias=tuple((token, rng.uniform(-3, 3)) for token in rng.sample(range(50), rng.choice((0, 4)))),
            )
            history = [rng.randrange(50) for _ in range(12)]
            step = rng.randint(0, 8)
            for token, value in params.logit_bias:
                expected[token] += value
            generated = history[len(history) - step :]
            for token in range(50):
                if token in history:
                    expected[token] *= params.repetition_penalty ** (-1 if expected[token] > 0 else 1)
                if token in generated:
                    expected[token] -= params.presence_penalty + params.frequency_penalty * generated.count(token)
            if params.has_penalties and step and rng.random() < 0.5:
                late[row] = history.pop()
            samples.append(Sample(params, 0, step, tuple(history) if params.has_penalties else ()))
        before = logits_NV.clone()
        known = Late(tuple(late), torch.tensor([*late.values()], dtype=torch.int64)) if late else None
        found_NV = adjusted(logits_NV, samples, known)
        torch.testing.assert_close(
            found_NV.double(), torch.tensor(expected_NV, dtype=torch.float64), atol=1e-5, rtol=1e-5
        )
        assert draw(logits_NV, samples, known).tolist() == found_NV.argmax(1).tolist()
        assert torch.equal(logits_NV, before), "the caller's logits are changed"


def test_a_strong_bias_decides_and_a_token_outside_the_vocabulary_is_refused(make_engine: MakeEngine) -> None:
    engine = make_engine()
    assert ask(engine, [1, 2], max_tokens=5, logit_bias=((77, 100.0),)).token_ids == (77,) * 5
    with pytest.raises(InputError) as caught:
        ask(engine, [1], logit_bias=((260, 1.0),))
    assert caught.value.field == "logit_bias" and not engine.has_work()


def test_a_frequency_penalty_makes_a_loop_end(make_engine: MakeEngine) -> None:
    engine = make_engine()
    loop = ask(engine, [1, 2], max_tokens=40, logit_bias=((77, 30.0),), frequency_penalty=2.0, presence_penalty=2.0)
    assert len(set(loop.token_ids)) > 1


@pytest.mark.parametrize("chunk", [5, 32])
def test_logprobs_of_prompt_and_answer_are_those_of_transformers(
    make_engine: MakeEngine, base_folder: Any, seed: int, chunk: int
) -> None:
    prompt = torch.randint(0, 256, (13,)).tolist()
    engine = make_engine(max_tokens_per_step=chunk, max_requests=4)
    params: dict[str, Any] = {"logprobs": 3, "prompt_logprobs": 2, "frequency_penalty": 0.7}
    answer = ask(engine, prompt, max_tokens=6, **params)
    ids = [*prompt, *answer.token_ids]
    with torch.inference_mode():
        logits = AutoModelForCausalLM.from_pretrained(base_folder)(torch.tensor([ids])).logits[0]
    expected = logits.double().log_softmax(-1)
    assert len(answer.prompt_logprobs) == 12 and len(answer.logprobs) == 6
    for position, one in enumerate((*answer.prompt_logprobs, *answer.logprobs)):
        assert one.token_id == ids[position + 1]
        assert one.logprob == pytest.approx(float(expected[position, one.token_id]), abs=1e-4)
        values, tokens = expected[position].topk(2 if position < 12 else 3)
        assert [token for token, _ in one.top] == tokens.tolist()
        assert [value for _, value in one.top] == pytest.approx(values.tolist(), abs=1e-4)


def test_logprobs_change_no_token_and_survive_preemption(make_engine: MakeEngine) -> None:
    plain = {prompt: ask(make_engine(), [prompt] * 15, max_tokens=30).token_ids for prompt in (1, 2)}
    engine = make_engine(num_pages=4)
    params = SamplingParams(max_tokens=30, logprobs=1, prompt_logprobs=0, **GREEDY)
    outputs = list(engine.generate([Request([prompt] * 15, None, params) for prompt in (1, 2)]))
    assert engine.stats()["preemptions"] >= 1
    for output in outputs:
        assert output.token_ids in plain.values()
        assert [one.token_id for one in output.logprobs] == list(output.token_ids)
        assert len(output.prompt_logprobs) == 14


SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 5},
        "kind": {"enum": ["red", "blue"]},
        "counts": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 3},
    },
    "required": ["name", "kind", "counts"],
    "additionalProperties": False,
}


def test_constrained_answers_are_valid_by_an_independent_validator(make_engine: MakeEngine, seed: int) -> None:
    engine = make_engine()
    params = [
        SamplingParams(max_tokens=120, temperature=1.5, seed=seed + n, json_schema=json.dumps(SCHEMA)) for n in range(6)
    ]
    free = SamplingParams(max_tokens=20, seed=seed)
    outputs = list(engine.generate([*(Request([65], None, one) for one in params), Request([65], None, free)]))
    constrained = [output for output in outputs if output.text.startswith("{")]
    assert len(constrained) >= 6
    for output in constrained[:6]:
        assert output.finish_reason == "stop"
        assert jsonschema_rs.is_valid(SCHEMA, json.loads(output.text)), output.text
    assert len({output.text for output in constrained}) > 1


@pytest.mark.parametrize(
    "schema", ["{", '{"type": "nonsense"}', '{"not": {"type": "string"}}', '{"$ref": "http://x/y"}', " " * 300_000]
)
def test_a_schema_that_cant_be_kept_is_refused_and_leaves_no_trace(make_engine: MakeEngine, schema: str) -> None:
    engine = make_engine()
    with pytest.raises(InputError) as caught:
        ask(engine, [1], json_schema=schema)
    assert caught.value.field == "json_schema" and len(str(caught.value)) < 400
    assert not engine.has_work()


def wide(num_properties: int) -> dict[str, Any]:
    return {"type": "object", "properties": {f"k{n}": {"type": "boolean"} for n in range(num_properties)}}


def behind_a_string(schema: dict[str, Any]) -> str:
    """The text of a schema whose answers have a short string of any text before `schema`."""
    properties = {"a": {"type": "string", "maxLength": 3}, "b": schema}
    return json.dumps(
        {"type": "object", "properties": properties, "required": ["a", "b"], "additionalProperties": False}
    )


@pytest.mark.parametrize("overlap", [False, True])
def test_a_schema_that_passes_a_limit_on_the_way_ends_its_own_request_only(
    make_engine: MakeEngine, overlap: bool
) -> None:
    engine = make_engine(overlap=overlap)
    expected = ask(engine, [1, 2, 3], max_tokens=20).token_ids
    large = Request([65], None, SamplingParams(max_tokens=40, json_schema=behind_a_string(wide(2700))), "large")
    free = Request([1, 2, 3], None, SamplingParams(max_tokens=20, **GREEDY), "free")
    outputs = {output.request_id: output for output in engine.generate([large, free])}
    assert outputs["large"].finish_reason == "error"
    assert outputs["large"].error == "the schema is too large to hold an answer to"
    assert outputs["large"].text.startswith('{"a": ')
    assert outputs["free"].finish_reason == "length" and outputs["free"].token_ids == expected


def test_a_schema_that_is_too_large_from_the_first_token_on_is_refused(make_engine: MakeEngine) -> None:
    engine = make_engine()
    with pytest.raises(InputError, match="too large to hold an answer to") as caught:
        ask(engine, [1], json_schema=json.dumps(wide(2700)))
    assert caught.value.field == "json_schema" and not engine.has_work()


def test_an_object_of_hundreds_of_optional_properties_is_answered(make_engine: MakeEngine, seed: int) -> None:
    schema = {**wide(600), "additionalProperties": False}
    output = ask(make_engine(), [65], json_schema=json.dumps(schema), max_tokens=100, temperature=1.5, seed=seed)
    assert output.finish_reason in ("stop", "length"), output.error
    if output.finish_reason == "stop":
        assert jsonschema_rs.is_valid(schema, json.loads(output.text)), output.text
    else:
        assert output.text.startswith('{"k')


@pytest.mark.parametrize("overlap", [False, True])
def test_whatever_fails_in_booking_one_request_ends_that_one_only(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, overlap: bool
) -> None:
    engine = make_engine(overlap=overlap)
    expected = ask(engine, [1, 2, 3], max_tokens=8).token_ids
    params = SamplingParams(max_tokens=8, **GREEDY)
    for name in ("bad", "good"):
        engine.add_request(Request([1, 2, 3], None, params, name))
    monkeypatch.setattr(engine._texts["bad"], "push", lambda token_id: 1 / 0)
    outputs = [output for _ in range(20) for output in engine.step()]
    last = {output.request_id: output for output in outputs if output.finish_reason is not None}
    assert last["bad"].finish_reason == "error" and "ZeroDivisionError" in (last["bad"].error or "")
    assert last["good"].finish_reason == "length" and last["good"].token_ids == expected
    assert "ZeroDivisionError" in caplog.text
    assert not engine.has_work()
    engine.check_integrity()


def test_answers_of_one_schema_share_its_compilation_and_no_state(make_engine: MakeEngine, seed: int) -> None:
    engine = make_engine()
    schemas = [json.dumps({"enum": [word]}) for word in ("red", "blue")]
    requests = [
        Request([65], None, SamplingParams(max_tokens=30, seed=seed + n, json_schema=schemas[n % 2])) for n in range(6)
    ]
    texts = {output.request_id: output.text for output in engine.generate(requests)}
    assert [texts[request.request_id] for request in requests] == ['"red"', '"blue"'] * 3
    assert engine.grammars._compiled.cache_info().misses == 2


@pytest.mark.parametrize("overlap", [False, True])
def test_a_request_that_makes_a_step_fail_ends_alone(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, overlap: bool
) -> None:
    prompts = {"good": [1, 2, 3], "bad": [9, 9, 9], "fine": [4, 5]}
    alone = {name: ask(make_engine(), prompt, max_tokens=8).token_ids for name, prompt in prompts.items()}
    engine = make_engine(overlap=overlap)
    launch = engine._runner.launch

    def fail_on_nines(plan: StepPlan) -> Launched | StepResult:
        if any(9 in chunk.token_ids and chunk.start == 0 for chunk in plan.chunks):
            raise RuntimeError("device")
        return launch(plan)

    monkeypatch.setattr(engine._runner, "launch", fail_on_nines)
    params = SamplingParams(max_tokens=8, **GREEDY)
    outputs = {
        output.request_id: output
        for output in engine.generate([Request(prompt, None, params, name) for name, prompt in prompts.items()])
    }
    assert outputs["bad"].finish_reason == "error" and outputs["bad"].error
    for name in ("good", "fine"):
        assert outputs[name].token_ids == alone[name] and outputs[name].finish_reason == "length"
