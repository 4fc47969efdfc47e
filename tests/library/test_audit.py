"""The label auditor: its figures, what it shows, and what it refuses."""

import hashlib
import json
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from peftkit.artifact import read_adapter
from peftkit.base import resolve_base
from peftkit.chat import render_chat
from peftkit.cli.chosen import choose
from peftkit.cli.main import run as cli
from peftkit.data import audit, check_overlap, load_dataset, open_stream
from peftkit.data.audit import audit_source
from peftkit.data.dataset import Encoding
from peftkit.data.sources import open_source
from peftkit.errors import DataError
from peftkit.recipe import Recipe
from peftkit.train import train

Capture = pytest.CaptureFixture[str]
MakeRecipe = Callable[..., Recipe]


@pytest.fixture(scope="module")
def tokenizer(tiny_base: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(tiny_base)


def write(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def some_rows(count: int, seed: int = 0) -> list[dict[str, Any]]:
    rng = random.Random(seed)
    return [{"prompt": f"{seed}/{i} " + "x" * rng.randint(0, 40), "completion": " yes"} for i in range(count)]


# figures -------------------------------------------------------------------------------------------------------------


def test_the_figures_are_those_of_the_samples(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    rows = some_rows(50)
    long = {"prompt": "y" * 80, "completion": " no"}
    path = write(tmp_path / "a.jsonl", *rows, rows[0], long, {"prompt": "z", "completion": "w" * 80})
    data = load_dataset(str(path), tokenizer, max_length=64, drop_too_long=True)
    found = audit(data, tokenizer)
    assert (found.rows, found.samples, found.truncated, found.dropped, found.repeated) == (53, 52, 1, 1, 1)
    tokens = [len(row["prompt"]) + len(row["completion"]) + 1 for row in [*rows, rows[0]]] + [64]
    assert found.tokens == sum(tokens)
    assert found.target_tokens == 51 * 5 + 4
    assert found.trained_share == pytest.approx((51 * 5 + 4) / sum(tokens))
    assert sum(bar.samples for bar in found.lengths) == 52
    for bar in found.lengths:
        assert bar.samples == sum(bar.shortest <= length <= bar.longest for length in tokens)
    assert (found.lengths[0].shortest, found.lengths[-1].longest) == (min(tokens), max(tokens))


def test_what_is_trained_is_marked_and_coloured(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    path = write(tmp_path / "a.jsonl", {"prompt": "word:", "completion": " yes [b]"})
    found = audit(load_dataset(str(path), tokenizer, max_length=64), tokenizer)
    assert found.text().endswith("a.jsonl:1, what is trained in [[ ]]:\nword:[[ yes [b]<|im_end|>]]")
    colored = found.text(color=True)
    trained = re.search(r"\x1b\[30;42m(.*?)\x1b\[0m", colored)
    assert trained is not None and trained[1] == " yes [b]<|im_end|>"
    assert re.sub(r"\x1b\[[\d;]*m", "", colored).endswith("word: yes [b]<|im_end|>")


def test_a_large_set_is_read_whole_and_encoded_in_part(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    path = write(tmp_path / "a.jsonl", *some_rows(500))
    encoding = Encoding(tokenizer, 64)
    found, keys = audit_source(open_source(path), encoding, max_rows=40)
    assert (found.rows, found.encoded_rows, found.samples, len(keys)) == (500, 40, 40, 500)
    assert "500 rows, of which 40 drawn at random were encoded" in found.text()
    again, _ = audit_source(open_source(path), encoding, max_rows=40)
    assert found == again
    other, _ = audit_source(open_source(path), encoding, max_rows=40, seed=1)
    assert found.tokens != other.tokens or found.lengths != other.lengths
    whole, _ = audit_source(open_source(path), encoding, max_rows=None)
    assert whole.samples == 500


def test_a_row_that_was_not_drawn_is_checked_all_the_same(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    path = write(tmp_path / "a.jsonl", *some_rows(300), {"prompt": "a"})
    with pytest.raises(DataError, match=r"a.jsonl:301: completion is missing"):
        audit_source(open_source(path), Encoding(tokenizer, 64), max_rows=5)


# refusals ------------------------------------------------------------------------------------------------------------


def test_rows_of_both_sets_are_refused_and_named(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    rows = some_rows(20)
    held_out = some_rows(3, seed=1)
    one, two = (write(tmp_path / "train.jsonl", *rows), write(tmp_path / "valid.jsonl", *held_out, rows[4], rows[7]))
    train_set = load_dataset(str(one), tokenizer, max_length=64)
    valid_set = load_dataset(str(two), tokenizer, max_length=64)
    with pytest.raises(DataError, match=r"valid.jsonl:4: .* trained on too, at .*train.jsonl:5, and so are 1 more"):
        check_overlap(train_set.keys, valid_set.keys)
    with pytest.raises(DataError, match=r"train.jsonl:5"):
        check_overlap(open_stream(str(one), tokenizer, max_length=64).keys, valid_set.keys)
    write(two, *held_out)
    check_overlap(train_set.keys, load_dataset(str(two), tokenizer, max_length=64).keys)


def test_a_run_with_rows_in_both_sets_is_refused_unless_it_is_allowed(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    rows = some_rows(12)
    data = {
        "train": str(write(tmp_path / "train.jsonl", *rows)),
        "valid": str(write(tmp_path / "valid.jsonl", rows[3])),
    }
    with pytest.raises(DataError, match=r"data.allow_overlap") as refused:
        train(make_recipe(data=data))
    assert refused.value.field == "data.valid"
    assert train(make_recipe(data={**data, "allow_overlap": True}, train={"max_steps": 1})).steps == 1


def test_a_second_bos_is_refused(tmp_path: Path, tiny_base: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_base, bos_token="<|endoftext|>")
    tokenizer.chat_template = "<|endoftext|>" + tokenizer.chat_template
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    path = write(tmp_path / "a.jsonl", {"messages": turns})
    assert len(load_dataset(str(path), tokenizer, max_length=200).samples) == 1
    tokenizer.chat_template = "<|endoftext|>" + tokenizer.chat_template
    with pytest.raises(
        DataError, match=r"a.jsonl:1: two '<\|endoftext\|>' \(BOS\) in a row: .*chat template writes one"
    ):
        load_dataset(str(path), tokenizer, max_length=200)
    path = write(tmp_path / "b.jsonl", {"prompt": "<|endoftext|><|endoftext|>a", "completion": "b"})
    with pytest.raises(DataError, match=r"b.jsonl:1: two '<\|endoftext\|>'"):
        load_dataset(str(path), tokenizer, max_length=200)


def test_a_base_without_a_template_is_refused_with_the_row(tmp_path: Path, tiny_base: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_base)
    tokenizer.chat_template = None
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    with pytest.raises(DataError, match=r"a.jsonl:1: messages: .*no chat template"):
        load_dataset(str(write(tmp_path / "a.jsonl", {"messages": turns})), tokenizer, max_length=64)


def test_a_template_whose_turns_have_no_end_is_refused_with_the_row(tmp_path: Path, tiny_base: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_base)
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    with pytest.raises(DataError, match=r"a.jsonl:1: .*never stop"):
        load_dataset(str(write(tmp_path / "a.jsonl", {"messages": turns})), tokenizer, max_length=64)


def test_a_set_of_which_nothing_is_left_is_refused(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    path = write(tmp_path / "a.jsonl", {"prompt": "a", "completion": "b" * 70}, {"prompt": "a", "completion": "c" * 70})
    with pytest.raises(DataError, match=r"a.jsonl:1: the completion is 71 tokens .* or set data.too_long to drop"):
        load_dataset(str(path), tokenizer, max_length=64)
    with pytest.raises(
        DataError, match=r"no row is left: the answers of all 2 rows are longer than data.max_length 64"
    ):
        load_dataset(str(path), tokenizer, max_length=64, drop_too_long=True)


# the command ---------------------------------------------------------------------------------------------------------


def answer(capsys: Capture, *argv: str, code: int = 0) -> dict[str, Any]:
    assert cli(["data", "check", *argv, "--json"]) == code
    return json.loads(capsys.readouterr().out)


CHAT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]


@pytest.mark.parametrize(
    "turn", [{"messages": CHAT}, {"instruction": "hi", "output": "ho"}], ids=["chat", "instruction"]
)
def test_a_template_that_is_served_otherwise_than_trained_is_named(
    tmp_path: Path, tiny_base: Path, caplog: pytest.LogCaptureFixture, turn: dict[str, object]
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_base)
    path = str(write(tmp_path / "a.jsonl", turn, turn))
    load_dataset(path, tokenizer, max_length=128)
    assert "trained otherwise" not in caplog.text
    # as DeepSeek's distilled models: thoughts are begun for the model, and are no part of a conversation
    tokenizer.chat_template = tokenizer.chat_template.replace(
        "assistant\n{% endif %}", "assistant\n<think>\n{% endif %}"
    )
    load_dataset(path, tokenizer, max_length=128)
    audit_source(open_source(path), Encoding(tokenizer, 128), max_rows=None)
    said = [record.getMessage() for record in caplog.records if "trained otherwise" in record.getMessage()]
    assert len(said) == 2 and all(r"begin after '<think>\n'" in line and "a.jsonl:1" in line for line in said)


def test_the_command_checks_a_file(tmp_path: Path, tiny_base: Path, capsys: Capture) -> None:
    path = write(tmp_path / "a.jsonl", *some_rows(30))
    found = answer(capsys, str(path), "--base", str(tiny_base), "--rows", "10", "--show", "2")["train"]
    assert (found["rows"], found["encoded_rows"], len(found["shown"])) == (30, 10, 2)
    assert [piece["trained"] for piece in found["shown"][0]["pieces"]] == [False, True]
    assert cli(["data", "check", str(path), "--base", str(tiny_base)]) == 0
    assert "30 rows, 30 samples" in capsys.readouterr().out


def test_the_command_checks_a_recipe_with_both_its_sets(tmp_path: Path, tiny_base: Path, capsys: Capture) -> None:
    rows = some_rows(30)
    train_file, valid_file = write(tmp_path / "a.jsonl", *rows), write(tmp_path / "b.jsonl", *some_rows(4, seed=1))
    recipe = tmp_path / "r.yaml"
    recipe.write_text(f"base: {tiny_base}\ndata: {{train: {train_file}, valid: {valid_file}, max_length: 64}}\n")
    found = answer(capsys, str(recipe))
    assert (found["train"]["rows"], found["valid"]["rows"]) == (30, 4)
    write(valid_file, rows[0])
    error = answer(capsys, str(recipe), code=2)["error"]
    assert error["field"] == "data.valid" and "trained on too" in error["message"]


def test_the_command_checks_the_data_of_each_run_of_a_recipe(tmp_path: Path, tiny_base: Path, capsys: Capture) -> None:
    one, other = (write(tmp_path / f"{name}.jsonl", *some_rows(3 + name, seed=name)) for name in (1, 2))
    runs = [{"out": "a"}, {"out": "b", "data": {"train": str(other)}}, {"out": "c", "optim": {"lr": 1e-3}}]
    recipe = {"base": str(tiny_base), "data": {"train": str(one)}, "runs": runs}
    (tmp_path / "runs.yaml").write_text(json.dumps(recipe))
    found = answer(capsys, str(tmp_path / "runs.yaml"))
    assert [run["train"]["rows"] for run in found["runs"]] == [4, 5]


def test_the_command_needs_a_base_for_a_file(tmp_path: Path, capsys: Capture) -> None:
    assert "--base" in answer(capsys, str(write(tmp_path / "a.jsonl", *some_rows(1))), code=2)["error"]["message"]


def test_a_run_shows_its_audit_before_it_trains(
    make_recipe: MakeRecipe, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    caplog.set_level("INFO", "peftkit")
    train(make_recipe(train={"max_steps": 1}))
    assert "24 rows, 24 samples" in caplog.text and "what is trained in [[ ]]" in caplog.text


# from training to serving --------------------------------------------------------------------------------------------


def test_the_template_travels_with_the_adapter_and_serving_renders_what_was_trained(
    make_recipe: MakeRecipe, tmp_path: Path, tiny_base: Path
) -> None:
    base = tmp_path / "base"
    shutil.copytree(tiny_base, base)
    tokenizer = AutoTokenizer.from_pretrained(base)
    own = tokenizer.chat_template.replace("<|im_start|>", "<|endoftext|>")
    tokenizer.chat_template = own
    tokenizer.save_pretrained(base)
    turns = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "first"},
        {"role": "assistant", "content": "one"},
        {"role": "user", "content": "second"},
        {"role": "assistant", "content": "two"},
    ]
    path = write(tmp_path / "chat.jsonl", {"messages": turns})
    summary = train(make_recipe(base=str(base), data={"train": str(path)}, train={"max_steps": 1}))
    record = read_adapter(summary.out).record
    assert record["chat_template"] == {"text": own, "sha256": hashlib.sha256(own.encode()).hexdigest()}
    assert record["tokenizer_sha256"] == resolve_base(str(base)).fingerprint.tokenizer
    (sample,) = load_dataset(str(path), tokenizer, max_length=128).samples
    served_by = choose(str(summary.out), str(tiny_base), None).tokenizer()
    for turn in (2, 4):
        served = render_chat(served_by, turns[:turn])
        assert sample.ids[: len(served)].tolist() == served
        assert sample.trained[len(served)] and not sample.trained[len(served) - 1]
    assert render_chat(AutoTokenizer.from_pretrained(tiny_base), turns[:2]) != render_chat(served_by, turns[:2])
