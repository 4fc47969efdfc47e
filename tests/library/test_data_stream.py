"""Streams: the order of a stream, where it goes on, and runs on one."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from peftkit.data import Batch, Batching, StreamSampler, open_stream
from peftkit.errors import DataError
from peftkit.recipe import Recipe
from peftkit.train import dry_run, train
from peftkit.train.interrupt import Interrupted
from peftkit.train.loop import Trainer

POOL_ROWS = 100
COUNT = 2 * POOL_ROWS + 30
MakeRecipe = Callable[..., Recipe]


@pytest.fixture(autouse=True)
def _small_pools(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("peftkit.data.sampler.POOL_ROWS", POOL_ROWS)
    monkeypatch.setattr("peftkit.data.dataset.POOL_ROWS", POOL_ROWS)


@pytest.fixture(scope="module")
def tokenizer(tiny_base: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(tiny_base)


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """More than two pools of rows, each with its number as the completion."""
    rng = random.Random(0)
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    lines = ({"prompt": "x" * rng.randint(1, 20), "completion": f" {index}"} for index in range(COUNT))
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def sampler(rows: Path, tokenizer: PreTrainedTokenizerBase, batching: Batching, window: int = 3) -> StreamSampler:
    return StreamSampler(open_stream(str(rows), tokenizer, max_length=64), batching, window=window)


def numbers(batches: list[Batch], tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The rows in some batches by their completions."""
    text = "".join(
        str(tokenizer.decode([token for token in row if token != -100]))
        for batch in batches
        for row in batch.labels_BT.tolist()
    )
    return [int(part) for part in text.split("<|im_end|>") if part]


BATCHINGS = {
    "rows": Batching(1, 8192, batch_size=8),
    "tokens": Batching(1, 256),
    "packed": Batching(1, 256, width=64),
}


@pytest.mark.parametrize("kind", BATCHINGS)
def test_an_epoch_of_a_stream_has_every_row_once_and_the_next_has_another_order(
    kind: str, rows: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    walk = sampler(rows, tokenizer, BATCHINGS[kind])
    epochs: list[list[int]] = [[], []]
    while walk.position.epoch < 2:
        window = walk.next_window()
        if walk.position.epoch < 2:
            epochs[walk.position.epoch] += numbers(window, tokenizer)
    for epoch in epochs:
        assert sorted(epoch) == list(range(COUNT))
        assert sorted(epoch[:POOL_ROWS]) == list(range(POOL_ROWS))
    assert epochs[0] != epochs[1]


@pytest.mark.parametrize("kind", BATCHINGS)
def test_a_stream_goes_on_from_a_saved_position(
    kind: str, rows: Path, tokenizer: PreTrainedTokenizerBase, seed: int
) -> None:
    whole = sampler(rows, tokenizer, BATCHINGS[kind], window=5)
    places, windows = [], []
    while whole.position.epoch < 1 or len(windows) % 7:
        places.append(whole.position)
        windows.append(whole.next_window())
    for taken in [0, 1, len(windows) - 1, *random.Random(seed).sample(range(len(windows)), 4)]:
        other = sampler(rows, tokenizer, BATCHINGS[kind], window=5)
        other.position = places[taken]
        for expected in windows[taken : taken + 3]:
            found = other.next_window()
            assert len(found) == len(expected)
            for one, two in zip(found, expected, strict=True):
                assert torch.equal(one.input_ids_BT, two.input_ids_BT)


def test_only_the_pool_at_hand_is_encoded(
    rows: Path, tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    import peftkit.data.dataset as module

    encoded = []
    whole = module.encode_row

    def counted(row: Any, *args: Any, **kwargs: Any) -> Any:
        encoded.append(row.where)
        return whole(row, *args, **kwargs)

    walk = sampler(rows, tokenizer, BATCHINGS["rows"])
    place = walk.position._replace(row=POOL_ROWS)
    monkeypatch.setattr(module, "encode_row", counted)
    walk.position = place
    assert encoded == [f"{rows}:{number}" for number in range(POOL_ROWS + 1, 2 * POOL_ROWS + 1)]


def test_a_broken_row_far_down_is_named_when_it_comes(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "a", "completion": "b"}\n' * POOL_ROWS + '{"prompt": "a"}\n')
    walk = sampler(path, tokenizer, BATCHINGS["rows"], window=100)
    with pytest.raises(DataError, match=rf"rows.jsonl:{POOL_ROWS + 1}: completion is missing"):
        walk.next_window()


@pytest.mark.parametrize("allowed", [False, True])
def test_a_held_out_row_far_down_a_stream_is_refused_when_it_comes(
    rows: Path, make_recipe: MakeRecipe, tmp_path: Path, allowed: bool
) -> None:
    lines = rows.read_text().splitlines()
    valid = tmp_path / "valid.jsonl"
    valid.write_text('{"prompt": "a", "completion": "b"}\n' + lines[POOL_ROWS + 7] + "\n")
    recipe = make_recipe(
        data={"train": str(rows), "valid": str(valid), "streaming": True, "allow_overlap": allowed},
        train={"max_steps": 6, "batch_size": 40},
    )
    if allowed:
        assert train(recipe).steps == 6
        return
    with pytest.raises(DataError, match=rf"valid\.jsonl:2: .* trained on too, at {rows}:{POOL_ROWS + 8}: "):
        train(recipe)


def test_rows_that_do_not_fit_are_dropped_from_a_stream_too(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    path = tmp_path / "rows.jsonl"
    lines = [{"prompt": "a", "completion": f" {index}" + " " * 70 * (index % 2)} for index in range(10)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    stream = open_stream(str(path), tokenizer, max_length=64, drop_too_long=True)
    assert (stream.head.num_dropped, stream.facts()["dropped_rows"]) == (5, 5)
    walk = StreamSampler(stream, BATCHINGS["rows"], window=1)
    assert sorted(numbers(walk.next_window(), tokenizer)) == [0, 2, 4, 6, 8]


# runs ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("packing", [False, True])
def test_a_streamed_run_that_was_interrupted_ends_with_the_same_bits(
    packing: bool, make_recipe: MakeRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("peftkit.data.sampler.POOL_ROWS", 10)
    settings: dict[str, Any] = {
        "data": {"streaming": True, "packing": packing},
        "train": {"max_steps": 10, "batch_size": 3, "save_every": 4},
    }
    whole, parted = (make_recipe(**settings, out=str(tmp_path / name)) for name in ("whole", "parted"))
    summary = train(whole)
    done = Trainer._report

    def report(self: Trainer, *args: Any) -> None:
        done(self, *args)
        if self.state.step == 5:
            raise Interrupted("stopped by the test")

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_report", report)
        with pytest.raises(Interrupted):
            train(parted)
    again = train(parted, resume=True)
    assert again.tokens == summary.tokens
    one, other = (load_file(Path(recipe.out) / "adapter_model.safetensors") for recipe in (whole, parted))
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name])


def test_a_streamed_run_needs_its_number_of_steps(make_recipe: MakeRecipe) -> None:
    with pytest.raises(ValueError, match=r"data.streaming needs train.max_steps"):
        make_recipe(data={"streaming": True}, train={"max_steps": None})


def test_the_dry_run_of_a_stream_shows_its_first_rows(make_recipe: MakeRecipe) -> None:
    streamed = dry_run(make_recipe(data={"streaming": True}))
    assert (streamed.steps, streamed.train["streamed"], streamed.train["rows"]) == (6, True, 24)
