"""Rows, ids, batches and their order."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from peftkit.data import (
    IGNORED,
    Batch,
    Batching,
    Dataset,
    Sample,
    Sampler,
    collate,
    load_dataset,
    plan_epoch,
    plan_evaluation,
    read_rows,
)
from peftkit.data.formats import ChatRow, CompletionRow
from peftkit.errors import DataError

EXAMPLES = ["sentiment", "address"]


@pytest.fixture(scope="module")
def tokenizer(tiny_base: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(tiny_base)


@pytest.fixture
def lines(tmp_path: Path) -> Callable[..., Path]:
    def write(*rows: Any) -> Path:
        path = tmp_path / "rows.jsonl"
        path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows), encoding="utf-8")
        return path

    return write


def load(path: Path, tokenizer: PreTrainedTokenizerBase, max_length: int = 64) -> Dataset:
    return load_dataset(str(path), tokenizer, max_length=max_length)


def trained_text(sample: Sample, tokenizer: PreTrainedTokenizerBase) -> str:
    return str(tokenizer.decode(sample.ids[sample.trained].tolist()))


def text(sample: Sample, tokenizer: PreTrainedTokenizerBase) -> str:
    return str(tokenizer.decode(sample.ids.tolist()))


# rows ----------------------------------------------------------------------------------------------------------------


def test_format_is_told_by_the_first_row(lines: Callable[..., Path]) -> None:
    path = lines({"prompt": "a", "completion": " b", "domain": "x"}, "", {"prompt": "c", "completion": " d"})
    assert list(read_rows(path)) == [
        CompletionRow(f"{path}:1", "a", " b"),
        CompletionRow(f"{path}:3", "c", " d"),
    ]
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    path = lines({"messages": turns})
    assert list(read_rows(path)) == [ChatRow(f"{path}:1", tuple(turns))]


GOOD = {"prompt": "a", "completion": " b"}
USER = {"role": "user", "content": "a"}


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([GOOD, '{"prompt": "a", "completion": '], ":2: broken JSON at column 31: Expecting value"),
        ([GOOD, "", "[1]"], ":3: a row is a JSON object, not a list"),
        ([GOOD, {"prompt": "a"}], ":2: completion is missing"),
        ([GOOD, {"prompt": "a", "label": "b"}], ":2: completion is missing: the row has 'prompt', 'label'"),
        ([GOOD, {"prompt": "a", "compeltion": "b"}], ":2: completion is missing; did you mean 'compeltion'?"),
        ([GOOD, {"prompt": "a", "completion": ""}], ":2: completion is empty"),
        ([GOOD, {"prompt": "a", "completion": " \n"}], ":2: completion is empty"),
        ([GOOD, {"prompt": None, "completion": "b"}], ":2: prompt must be text, not null"),
        ([GOOD, {"prompt": "a", "completion": 3}], ":2: completion must be text, not a number"),
        ([GOOD, '{"prompt": "a", "completion": "\\ud83d"}'], ":2: completion holds half of a surrogate pair"),
        ([GOOD, {"messages": []}], ":2: prompt is missing"),
        (["[" * 100_000], ":1: JSON nested too deep"),
        ([{"promt": "a", "label": "b"}], ":1: the row has neither prompt and completion nor messages, instruction and"),
        ([{"question": "a", "answer": "b"}], ":1: the row has neither prompt and completion nor messages, instruction "
            "and output, or text: the row has 'question', 'answer'; rename what is meant"),
        ([{"prompt": "a", "completion": "b", "messages": []}], ":1: the row has both messages and completion"),
        ([{"messages": []}], ":1: messages: must be a list of at least one message"),
        ([{"messages": [{"role": "usr", "content": "a"}]}], ":1: messages[0].role: 'usr'; did you mean 'user'?"),
        ([{"messages": [USER]}], ":1: the last turn must be the assistant's, not the user"),
        ([{"messages": [USER, {"role": "assistant", "content": " "}]}], ":1: messages[1]: the answer is empty"),
        ([{"messages": [{"role": "assistant", "content": "a"}]}], ":1: messages[0] is the assistant's: a chat starts"),
        ([], ": no rows: the file is empty"),
        (["", "  "], ": no rows: the file is empty"),
    ],
)  # fmt: skip
def test_a_bad_row_is_named_with_file_and_line(lines: Callable[..., Path], rows: list[Any], message: str) -> None:
    path = lines(*rows)
    with pytest.raises(DataError) as caught:
        list(read_rows(path))
    assert str(caught.value).startswith(f"{path}{message}")
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_there_or_not_text_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nowhere.jsonl: there is no such data file: name a file, a folder of"):
        list(read_rows(tmp_path / "nowhere.jsonl"))
    (tmp_path / "train.jsonl").touch()
    with pytest.raises(DataError, match=r"trian.jsonl: there is no such data file; did you mean 'train.jsonl'\?"):
        list(read_rows(tmp_path / "trian.jsonl"))
    (tmp_path / "latin.jsonl").write_bytes(b'{"prompt": "a", "completion": "b"}\n{"prompt": "\xe9"}\n')
    with pytest.raises(DataError, match=r"latin.jsonl:2: not UTF-8 text"):
        list(read_rows(tmp_path / "latin.jsonl"))


def test_a_byte_order_mark_is_no_part_of_the_first_row(tmp_path: Path) -> None:
    path = tmp_path / "bom.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps(GOOD).encode())
    assert len(list(read_rows(path))) == 1


@pytest.mark.parametrize("name", EXAMPLES)
@pytest.mark.parametrize("split", ["train", "valid", "test"])
def test_the_example_sets_are_read_by_name(name: str, split: str, tokenizer: PreTrainedTokenizerBase) -> None:
    data = load_dataset(f"example:{name}/{split}.jsonl", tokenizer, max_length=4096)
    assert len(data.samples) >= 100
    assert data.num_truncated == 0


def test_an_unknown_example_set_is_refused(tokenizer: PreTrainedTokenizerBase) -> None:
    with pytest.raises(DataError, match=r"example:sentimnt/train.jsonl: no such example data"):
        load_dataset("example:sentimnt/train.jsonl", tokenizer, max_length=64)


# ids -----------------------------------------------------------------------------------------------------------------


def test_the_completion_and_its_end_are_trained_and_the_prompt_is_not(
    lines: Callable[..., Path], tokenizer: PreTrainedTokenizerBase
) -> None:
    (sample,) = load(lines({"prompt": "word:", "completion": " yes"}), tokenizer).samples
    assert text(sample, tokenizer) == "word: yes<|im_end|>"
    assert trained_text(sample, tokenizer) == " yes<|im_end|>"
    assert not sample.truncated


def test_a_long_prompt_is_cut_from_the_left_and_counted(
    lines: Callable[..., Path], tokenizer: PreTrainedTokenizerBase
) -> None:
    path = lines({"prompt": "0123456789", "completion": " yes"}, {"prompt": "9", "completion": " yes"})
    data = load(path, tokenizer, max_length=8)
    assert text(data.samples[0], tokenizer) == "789 yes<|im_end|>"
    assert trained_text(data.samples[0], tokenizer) == " yes<|im_end|>"
    assert [sample.truncated for sample in data.samples] == [True, False]
    assert data.num_truncated == 1
    assert data.facts()["truncated_rows"] == 1


def test_a_cut_prompt_keeps_its_bos(lines: Callable[..., Path], tiny_base: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_base, bos_token="<|im_start|>")
    path = lines({"prompt": "<|im_start|>0123456789", "completion": " yes"})
    (sample,) = load(path, tokenizer, max_length=8).samples
    assert text(sample, tokenizer) == "<|im_start|>89 yes<|im_end|>"


def test_a_completion_that_would_be_cut_away_is_refused(
    lines: Callable[..., Path], tokenizer: PreTrainedTokenizerBase
) -> None:
    path = lines({"prompt": "a", "completion": "b"}, {"prompt": "a", "completion": "1234567"})
    assert len(load(path, tokenizer, max_length=9).samples) == 2
    with pytest.raises(DataError, match=r"rows.jsonl:2: the completion is 8 tokens .* data.max_length to 9 or more"):
        load(path, tokenizer, max_length=8)


def test_an_empty_prompt_is_refused(lines: Callable[..., Path], tokenizer: PreTrainedTokenizerBase) -> None:
    with pytest.raises(DataError, match=r"rows.jsonl:1: prompt is empty"):
        load(lines({"prompt": "", "completion": "b"}), tokenizer)


CHAT = [
    {"role": "system", "content": "S"},
    {"role": "user", "content": "first"},
    {"role": "assistant", "content": "one"},
    {"role": "user", "content": "second"},
    {"role": "assistant", "content": "two"},
]


def test_every_answer_of_a_chat_is_trained_with_its_end_of_turn(
    lines: Callable[..., Path], tokenizer: PreTrainedTokenizerBase
) -> None:
    (sample,) = load(lines({"messages": CHAT}), tokenizer, max_length=200).samples
    assert trained_text(sample, tokenizer) == "one<|im_end|>two<|im_end|>"
    assert text(sample, tokenizer).startswith("<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nfirst")


def test_a_long_chat_loses_whole_turns_and_keeps_its_system_turn(
    lines: Callable[..., Path], tokenizer: PreTrainedTokenizerBase
) -> None:
    path = lines({"messages": CHAT})
    whole = len(load(path, tokenizer, max_length=200).samples[0].ids)
    (sample,) = load(path, tokenizer, max_length=whole - 1).samples
    assert sample.truncated
    assert text(sample, tokenizer) == (
        "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nsecond<|im_end|>\n<|im_start|>assistant\ntwo<|im_end|>\n"
    )
    assert trained_text(sample, tokenizer) == "two<|im_end|>"
    with pytest.raises(DataError, match=r"rows.jsonl:1: the last exchange alone is \d+ tokens"):
        load(path, tokenizer, max_length=len(sample.ids) - 1)


# batches -------------------------------------------------------------------------------------------------------------


def test_padding_is_known_by_position_and_an_end_of_turn_is_trained_though_it_is_the_pad_token(
    lines: Callable[..., Path], tokenizer: PreTrainedTokenizerBase
) -> None:
    assert tokenizer.pad_token_id == tokenizer.eos_token_id
    path = lines({"prompt": "ab", "completion": "c"}, {"prompt": "a", "completion": "bcde"})
    data = load(path, tokenizer)
    batch = collate(data.samples)
    assert batch.attention_mask_BT.tolist() == [[1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1]]
    assert batch.position_ids_BT.tolist() == [[0, 1, 2, 3, 3, 3], [0, 1, 2, 3, 4, 5]]
    end = tokenizer.eos_token_id
    assert batch.labels_BT[0].tolist()[3:] == [end, IGNORED, IGNORED]
    assert batch.labels_BT[1].tolist()[5] == end
    assert batch.labels_BT[:, 0].tolist() == [IGNORED, IGNORED]
    assert (batch.num_tokens, batch.num_target_tokens) == (10, 7)
    assert batch.num_target_tokens == int((batch.labels_BT != IGNORED).sum()) == data.num_target_tokens
    kept = batch.labels_BT != IGNORED
    assert torch.equal(batch.labels_BT[kept], batch.input_ids_BT[kept])


def lengths_of(seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.choice([3, 9, 40, 200]) + rng.randrange(5) for _ in range(rng.randint(1, 300))]


@pytest.mark.parametrize("batch_size", [None, 1, 7])
def test_an_epoch_has_every_row_once_and_keeps_to_its_limits(seed: int, batch_size: int | None) -> None:
    lengths = lengths_of(seed)
    plan = plan_epoch(lengths, seed=seed, epoch=0, batch_tokens=128, batch_size=batch_size)
    assert sorted(row for batch in plan for row in batch) == list(range(len(lengths)))
    if batch_size is None:
        assert all(len(batch) == 1 or len(batch) * max(lengths[row] for row in batch) <= 128 for batch in plan)
    else:
        assert sorted(len(batch) for batch in plan)[1:] == [batch_size] * (len(plan) - 1)


def test_the_order_depends_on_seed_and_epoch_alone(seed: int) -> None:
    lengths = [*lengths_of(seed), *range(1, 50)]

    def order(seed: int, epoch: int) -> list[list[int]]:
        return plan_epoch(lengths, seed=seed, epoch=epoch, batch_tokens=64, batch_size=None)

    assert order(3, 1) == order(3, 1)
    assert order(3, 1) != order(3, 2)
    assert order(3, 1) != order(4, 1)


def test_rows_of_like_length_share_a_batch_of_tokens_so_that_little_is_padding(seed: int) -> None:
    rng = random.Random(seed)
    lengths = [rng.randint(5, 100) for _ in range(800)]
    plan = plan_epoch(lengths, seed=seed, epoch=0, batch_tokens=800, batch_size=None)
    assert sum(len(batch) * max(lengths[row] for row in batch) for batch in plan) < 1.15 * sum(lengths)


def test_a_batch_of_rows_is_a_random_sample_of_the_data(seed: int) -> None:
    rng = random.Random(seed)
    lengths = [rng.randint(5, 100) for _ in range(800)]
    plan = plan_epoch(lengths, seed=seed, epoch=0, batch_tokens=0, batch_size=8)
    means = torch.tensor([sum(lengths[row] for row in batch) / len(batch) for batch in plan])
    # means of 8 independent rows spread by σ/√8 = 9.7; those of rows of one length would by σ = 27.4
    assert means.std() < 14


def test_evaluation_takes_every_row_once_within_the_limit(seed: int) -> None:
    lengths = lengths_of(seed)
    plan = plan_evaluation(lengths, batch_tokens=256)
    assert sorted(row for batch in plan for row in batch) == list(range(len(lengths)))
    assert all(len(batch) * max(lengths[row] for row in batch) <= 256 for batch in plan)


def sample(index: int, length: int) -> Sample:
    """One whose first id tells it from the others."""
    ids = np.full(length, index, dtype=np.int32)
    return Sample(f"rows:{index}", ids, np.arange(length) > 0)


def sampler(window: int = 2) -> Sampler:
    samples = [sample(index, 5) for index in range(11)]
    return Sampler(samples, Batching(seed=1, batch_tokens=0, batch_size=2), window=window)


def rows_of(window: list[Batch]) -> list[list[int]]:
    return [batch.input_ids_BT[:, 0].tolist() for batch in window]


def test_windows_end_with_their_epoch_and_the_last_is_partial() -> None:
    walk = sampler(window=4)
    assert walk.num_windows(3) == 6
    windows = [rows_of(walk.next_window()) for _ in range(6)]
    assert [len(window) for window in windows] == [4, 2, 4, 2, 4, 2]
    for epoch in range(3):
        rows = [row for window in windows[2 * epoch : 2 * epoch + 2] for batch in window for row in batch]
        assert sorted(rows) == list(range(11))


def test_a_sampler_goes_on_from_a_saved_position() -> None:
    whole = sampler()
    all_windows = [rows_of(whole.next_window()) for _ in range(9)]
    for taken in range(9):
        first = sampler()
        for _ in range(taken):
            first.next_window()
        second = sampler()
        second.position = first.position
        assert [rows_of(second.next_window()) for _ in range(9 - taken)] == all_windows[taken:]
