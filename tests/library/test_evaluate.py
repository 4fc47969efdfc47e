"""The metrics' definitions against small computations of their own, and nll against a plain loop over transformers."""

import json
import math
import random
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
import torch

import peftkit
from peftkit.base import load_base, load_tokenizer, resolve_base
from peftkit.chat import encode_completion
from peftkit.errors import DataError
from peftkit.evaluate import Answer, Example, Metric, max_answer_tokens, nll, read_examples, score
from peftkit.methods import AnyConfig, BottleneckConfig, LoraConfig, PromptTuningConfig, PTuningV2Config, attached


def example(reference: str, reference_ids: Sequence[int] = (1,)) -> Example:
    return Example("rows.jsonl:1", reference, (5, 6), tuple(reference_ids))


def answer(text: str, token_ids: Sequence[int] = ()) -> Answer:
    return Answer(text, tuple(token_ids))


def value(metric: Metric, pairs: Sequence[tuple[str, str]]) -> float:
    """The score of (reference, answer) pairs."""
    references, answers = [example(a) for a, _ in pairs], [answer(b) for _, b in pairs]
    return score(references, answers, metric).value


def write_rows(path: Path, rows: list[dict[str, object]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


@pytest.mark.parametrize(
    ("reference", "text", "same"),
    [
        (" positive", "positive\n", True),
        (" positive", " positive and more", False),
        (" positive", "", False),
        (' {"a": "1", "b": "2"}', '{"b":"2","a":"1"}', True),
        (' {"a": "1"}', '{"a": "1", "b": "2"}', False),
        (' {"a": "1"}', '{"a": "1"', False),
        ("[1, 2]", "[1,2]", False),
    ],
)
def test_exact_match_is_the_whole_answer_with_json_objects_compared_as_objects(
    reference: str, text: str, same: bool
) -> None:
    assert value("exact_match", [(reference, text)]) == same


@pytest.mark.parametrize(
    ("ids", "right"), [((7, 8), True), ((7, 8, 9), True), ((7,), False), ((8, 7), False), ((), False), ((7, 2), False)]
)
def test_accuracy_is_the_answer_cut_to_the_references_tokens(ids: tuple[int, ...], right: bool) -> None:
    assert score([example("x", (7, 8))], [answer("", ids)], "accuracy").value == right


def test_field_f1_counts_fields_over_all_rows() -> None:
    pairs = [
        ('{"city": "Salem", "zip": "1", "unit": null}', '{"city": "Salem", "zip": "2"}'),  # 1 right, 1 wrong, 2 missed
        ('{"city": "Troy"}', " City: Troy"),  # 1 missed
        ('{"city": "Rome"}', '{"city": "Rome", "state": "NY"}'),  # 1 right, 1 wrong
        ('{"city": "Ilion"}', '["city"]'),  # 1 missed
    ]
    precision, recall = 2 / 4, 2 / 6
    assert value("field_f1", pairs) == pytest.approx(2 * precision * recall / (precision + recall))


def test_field_f1_refuses_a_reference_that_is_no_json_object() -> None:
    with pytest.raises(DataError, match=r"rows\.jsonl:1: field_f1 needs a JSON object"):
        value("field_f1", [("positive", "positive")])


def brute_force_lcs(a: list[str], b: list[str]) -> int:
    def is_subsequence(words: tuple[str, ...]) -> bool:
        rest = iter(b)
        return all(word in rest for word in words)

    return max(n for n in range(len(a) + 1) for words in combinations(a, n) if is_subsequence(words))


def test_rouge_l_is_the_f_measure_of_the_longest_common_subsequence(seed: int) -> None:
    rng = random.Random(seed)
    pairs = [(rng.choices("abc", k=rng.randint(1, 7)), rng.choices("abcd", k=rng.randint(0, 7))) for _ in range(30)]
    wanted = []
    for a, b in pairs:
        common = brute_force_lcs(a, b)
        precision, recall = common / max(len(b), 1), common / len(a)
        wanted.append(2 * precision * recall / (precision + recall) if common else 0.0)
    found = value("rouge_l", [(" ".join(a), "\n".join(b)) for a, b in pairs])
    assert found == pytest.approx(float(np.mean(wanted)))


def test_standard_error_is_binomial_for_shares() -> None:
    texts = ["yes"] * 30 + ["no"] * 10
    result = score([example("yes")] * 40, [answer(text) for text in texts], "exact_match")
    assert (result.value, result.n) == (0.75, 40)
    assert result.stderr == pytest.approx(math.sqrt(0.75 * 0.25 / 40))


def test_standard_error_of_field_f1_is_about_that_of_resampled_rows(seed: int) -> None:
    rng = np.random.default_rng(seed)
    references, answers = [], []
    for _ in range(300):
        names = [f"f{i}" for i in range(rng.integers(1, 8))]
        references.append(example(json.dumps(dict.fromkeys(names, 1))))
        answers.append(answer(json.dumps({name: int(rng.random() < 0.7) for name in names if rng.random() < 0.9})))
    result = score(references, answers, "field_f1")
    draws = [rng.integers(0, 300, 300) for _ in range(300)]
    resampled = [score([references[i] for i in d], [answers[i] for i in d], "field_f1").value for d in draws]
    assert result.stderr == pytest.approx(np.std(resampled), rel=0.25)


def test_examples_are_tokenised_as_in_training(tiny_base: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(resolve_base(tiny_base))
    name = write_rows(
        tmp_path / "rows.jsonl", [{"prompt": "2 + 2 =", "completion": " 4"}, {"prompt": "a", "completion": "b"}]
    )
    first, second = read_examples(name, tokenizer, max_length=64)
    ids, num_prompt = encode_completion(tokenizer, "2 + 2 =", " 4")
    assert (list(first.prompt_ids), list(first.reference_ids)) == (ids[:num_prompt], ids[num_prompt:-1])
    assert (first.reference, second.where) == (" 4", f"{name}:2")
    assert read_examples(name, tokenizer, max_length=64, limit=1) == [first]
    assert read_examples(name, tokenizer, max_length=64, limit=10**20)[0] == first


def test_a_chats_reference_is_its_last_answer(tiny_base: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(resolve_base(tiny_base))
    turns = [("user", "hi"), ("assistant", "hello"), ("user", "bye"), ("assistant", "see you")]
    rows: list[dict[str, object]] = [{"messages": [{"role": role, "content": text} for role, text in turns]}]
    (one,) = read_examples(write_rows(tmp_path / "rows.jsonl", rows), tokenizer, max_length=250)
    assert one.reference == tokenizer.decode(list(one.reference_ids)) == "see you"
    assert str(tokenizer.decode(list(one.prompt_ids))).endswith(
        "hello<|im_end|>\n<|im_start|>user\nbye<|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_turn_that_is_not_trained_is_answered_all_the_same(tiny_base: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(resolve_base(tiny_base))
    turns = [("user", "hi"), ("assistant", "hello"), ("user", "bye"), ("assistant", "see you")]
    messages: list[dict[str, object]] = [{"role": role, "content": text} for role, text in turns]
    messages[-1]["train"] = False
    (one,) = read_examples(write_rows(tmp_path / "a.jsonl", [{"messages": messages}]), tokenizer, max_length=250)
    assert one.reference == tokenizer.decode(list(one.reference_ids)) == "see you"


def test_the_reference_of_a_turn_is_what_the_template_makes_of_it(tiny_base: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(resolve_base(tiny_base))
    tokenizer.chat_template = (
        "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
        "{% for call in m.tool_calls %}{{ call.function | tojson }}{% endfor %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    call = {"name": "add", "arguments": {"a": 1}}
    turns = [
        {"role": "user", "content": "1 + 0?"},
        {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": call}]},
    ]
    row = {"messages": turns, "tools": [{"type": "function", "function": {"name": "add"}}]}
    (one,) = read_examples(write_rows(tmp_path / "a.jsonl", [row]), tokenizer, max_length=250)
    assert json.loads(one.reference) == call


def test_rows_are_read_and_left_out_as_in_training(tiny_base: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(resolve_base(tiny_base))
    both: dict[str, object] = {"prompt": "p", "completion": " c", "messages": [{"role": "user", "content": "u"}]}
    rows = [both, {**both, "completion": " c" * 40}, {**both, "prompt": "q"}]
    name = write_rows(tmp_path / "a.jsonl", rows)
    with pytest.raises(DataError, match=r"a\.jsonl:2: the completion is 81 tokens and would be cut away"):
        read_examples(name, tokenizer, max_length=32, format="completion")
    kept = read_examples(name, tokenizer, max_length=32, limit=2, format="completion", drop_too_long=True)
    assert [tokenizer.decode(list(one.prompt_ids)) for one in kept] == ["p", "q"]


def test_of_a_long_text_no_more_parts_are_answered_than_rows_are_asked_for(tiny_base: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(resolve_base(tiny_base))
    (tmp_path / "a.txt").write_text("abcdefgh" * 100)
    assert len(read_examples(str(tmp_path / "a.txt"), tokenizer, max_length=32)) == -(-800 // 31)
    assert len(read_examples(str(tmp_path / "a.txt"), tokenizer, max_length=32, limit=3)) == 3


def test_a_broken_line_is_named(tiny_base: Path, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "completion": "b"}\n{"prompt": "a"\n')
    with pytest.raises(DataError, match=r"rows\.jsonl:2: "):
        read_examples(str(tmp_path / "rows.jsonl"), load_tokenizer(resolve_base(tiny_base)), max_length=64)


def test_accuracy_alone_generates_no_more_than_the_reference() -> None:
    rows = [example("a", (1,)), example("bcd", (1, 2, 3))]
    assert max_answer_tokens(rows, ["accuracy"]) == [1, 3]
    assert max_answer_tokens(rows, ["accuracy", "rouge_l"]) == [19, 19]


def some_examples(count: int) -> list[Example]:
    def ids(low: int, high: int) -> tuple[int, ...]:
        return tuple(torch.randint(3, 259, (int(torch.randint(low, high, ())),)).tolist())

    return [Example(f"rows.jsonl:{i}", "", ids(1, 20), ids(1, 12)) for i in range(count)]


@pytest.mark.parametrize(
    "config",
    [
        None,
        LoraConfig(r=4),
        PromptTuningConfig(num_virtual_tokens=5),
        PTuningV2Config(num_virtual_tokens=5),
        BottleneckConfig(),
    ],
)
def test_nll_is_that_of_transformers_loss_row_by_row(config: AnyConfig | None, seed: int, tiny_base: Path) -> None:
    model, _ = load_base(tiny_base)
    if config is not None:
        peftkit.attach(model, config, seed=seed)
        for parameter in attached(model)[0].parameters().values():
            torch.nn.init.normal_(parameter, std=0.2)
    rows = some_examples(13)
    sums, counts = [], []
    with torch.no_grad():
        for row in rows:
            ids = torch.tensor([[*row.prompt_ids, *row.reference_ids]])
            labels = ids.clone()
            labels[:, : len(row.prompt_ids)] = -100
            counts.append(len(row.reference_ids))
            sums.append(float(model(ids, labels=labels).loss) * counts[-1])
    done: list[int] = []
    result = nll(model, rows, batch_tokens=70, on_rows=done.append)
    wanted = sum(sums) / sum(counts)
    residuals = np.array(sums) - wanted * np.array(counts)
    assert result.value == pytest.approx(wanted, rel=1e-5)
    assert result.stderr == pytest.approx(math.sqrt((residuals**2).sum()) / sum(counts), rel=1e-3)
    assert (result.n, sum(done)) == (13, 13) and len(done) > 2


def test_nll_does_not_depend_on_the_batch(seed: int, tiny_base: Path) -> None:
    model, _ = load_base(tiny_base)
    rows = some_examples(40)
    values = [nll(model, rows, batch_tokens=size).value for size in (1, 100, 100_000)]
    assert values == pytest.approx([values[0]] * 3, rel=1e-6)


@pytest.mark.parametrize(
    ("reference", "text", "same"),
    [
        ('{"a": true}', '{"a": 1}', False),
        ('{"a": 0}', '{"a": false}', False),
        ('{"a": [1, {"b": true}]}', '{"a": [1, {"b": 1}]}', False),
        ('{"a": [1, {"b": true}]}', '{"a":[1.0,{"b":true}]}', True),
        ('{"a": 1, "b": null}', '{"b": null, "a": 1.0}', True),
    ],
)
def test_true_is_not_one(reference: str, text: str, same: bool) -> None:
    assert score([example(reference)], [answer(text)], "exact_match").value == float(same)
    assert (score([example(reference)], [answer(text)], "field_f1").value == 1.0) is same


def test_rouge_l_of_two_answers_without_words_is_one() -> None:
    assert score([example(" ")], [answer("")], "rouge_l").value == 1.0
    assert score([example(" ")], [answer("a")], "rouge_l").value == 0.0
