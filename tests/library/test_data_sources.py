"""Sources of rows: the same rows from every kind of file and table, and what is said of a broken one."""

import csv
import errno
import json
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from peftkit.base import resolve_base
from peftkit.cli.main import run as cli
from peftkit.data import ChatRow, CompletionRow, Dataset, InstructionRow, Stream, TextRow, load_dataset, read_rows
from peftkit.data.sources import open_source
from peftkit.errors import BaseModelError, DataError
from peftkit.recipe import Recipe
from peftkit.train import dry_run, train

ROWS = [{"prompt": f'p{i}, "quoted"\nline', "completion": f" c{i}"} for i in range(600)]
BROKEN = [{"function": {"name": "f", "arguments": "{"}}]


@pytest.fixture(scope="module")
def tokenizer(tiny_base: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(tiny_base)


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def write_csv(path: Path, rows: list[dict[str, Any]], delimiter: str = ",") -> Path:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), delimiter=delimiter)
        writer.writeheader()
        writer.writerows(rows)
    return path


def write_parquet(path: Path, rows: list[dict[str, Any]]) -> Path:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=250)
    return path


def write_folder(path: Path, rows: list[dict[str, Any]]) -> Path:
    import datasets

    datasets.Dataset.from_list(rows).save_to_disk(str(path))
    return path


def write_json(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text(json.dumps(rows, indent=1), encoding="utf-8-sig")
    return path


WRITERS: dict[str, Callable[[Path], Path]] = {
    "jsonl": lambda folder: write_jsonl(folder / "rows.jsonl", ROWS),
    "json": lambda folder: write_json(folder / "rows.json", ROWS),
    "json lines": lambda folder: write_jsonl(folder / "rows.json", ROWS),
    "csv": lambda folder: write_csv(folder / "rows.csv", ROWS),
    "tsv": lambda folder: write_csv(folder / "rows.tsv", ROWS, "\t"),
    "parquet": lambda folder: write_parquet(folder / "rows.parquet", ROWS),
    "datasets": lambda folder: write_folder(folder / "rows", ROWS),
}


@pytest.mark.parametrize("kind", WRITERS)
def test_every_kind_of_source_gives_the_same_rows_from_any_row_on(kind: str, tmp_path: Path) -> None:
    path = WRITERS[kind](tmp_path)
    for start in (0, 1, 249, 250, 599, 600):
        rows = list(read_rows(path, start=start))
        assert [(row.prompt, row.completion) for row in rows if isinstance(row, CompletionRow)] == [
            (row["prompt"], row["completion"]) for row in ROWS[start:]
        ]
        whole = list(open_source(path).read(0))
        assert [row.where for row in rows] == [where for where, _ in whole[start:]]


@pytest.mark.parametrize("kind", WRITERS)
def test_every_kind_of_source_is_encoded_alike(kind: str, tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    wanted = load_dataset(str(WRITERS["jsonl"](tmp_path)), tokenizer, max_length=64)
    found = load_dataset(str(WRITERS[kind](tmp_path)), tokenizer, max_length=64)
    assert [sample.ids.tolist() for sample in found.samples] == [sample.ids.tolist() for sample in wanted.samples]
    assert list(found.keys) == list(wanted.keys)


def calling(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """A chat that calls a tool whose parameters are no other row's."""
    turns = [
        {"role": "user", "content": "1 + 2?"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"type": "function", "function": {"name": name, "arguments": arguments}}],
        },
        {"role": "tool", "content": "3", "tool_call_id": "x"},
        {"role": "assistant", "content": "3", "train": True},
    ]
    properties = {key: {"type": "string", "enum": [str(value)]} for key, value in arguments.items()}
    parameters = {"type": "object", "properties": {**properties, "unit": {"type": "string"}}}
    return {"messages": turns, "tools": [{"type": "function", "function": {"name": name, "parameters": parameters}}]}


def test_chats_with_tools_are_the_same_rows_from_a_table_and_from_lines(tmp_path: Path) -> None:
    rows = [calling("add", {"a": 1, "b": 2}), calling("weather", {"city": "Paris"})]
    lines = list(read_rows(write_jsonl(tmp_path / "a.jsonl", rows)))
    texts = [{name: json.dumps(value) for name, value in row.items()} for row in rows]
    for path in (
        write_parquet(tmp_path / "a.parquet", rows),
        write_folder(tmp_path / "a", rows),
        write_csv(tmp_path / "a.csv", texts),
    ):
        for line, row, written in zip(lines, read_rows(path), rows, strict=True):
            assert isinstance(line, ChatRow) and isinstance(row, ChatRow)
            assert row.messages == line.messages, path
            assert row.tools == line.tools == tuple(written["tools"]), path


def test_the_splits_of_a_folder_are_named_with_a_hash(tmp_path: Path) -> None:
    import datasets

    folder = tmp_path / "rows"
    table = datasets.Dataset.from_list(ROWS[:3])
    datasets.DatasetDict({"train": table, "validation": table.select([2])}).save_to_disk(str(folder))
    assert len(list(read_rows(f"{folder}#train"))) == 3
    assert len(list(read_rows(f"{folder}#validation"))) == 1
    with pytest.raises(DataError, match=r"no split 'valid'; did you mean 'validation'\?"):
        open_source(f"{folder}#valid")
    with pytest.raises(DataError, match=r"which split is meant isn't said: write .*#train"):
        open_source(folder)
    with pytest.raises(DataError, match=r"a file has no splits"):
        open_source(f"{write_jsonl(tmp_path / 'a.jsonl', ROWS[:1])}#train")


def test_a_hub_data_set_in_the_cache_is_read_without_the_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import datasets

    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    made = datasets.load_dataset(
        "json", data_files=str(WRITERS["jsonl"](tmp_path)), split="train", cache_dir=str(tmp_path / "made")
    )
    assert isinstance(made, datasets.Dataset)
    folder = Path(made.cache_files[0]["filename"]).parent
    cached = tmp_path / "cache" / "someone___some-rows" / "default" / "0.0.0" / "0123456789abcdef"
    shutil.copytree(folder, cached)
    (cached / "json-train.arrow").rename(cached / "some-rows-train.arrow")
    rows = list(read_rows("someone/some-rows"))
    assert [row.prompt for row in rows if isinstance(row, CompletionRow)] == [row["prompt"] for row in ROWS]
    wanted = r"someone/no-rows: there is no such file, and the hub's .* can't be reached \(.*\): name a local file"
    with pytest.raises(DataError, match=wanted):
        open_source("someone/no-rows")


@pytest.mark.parametrize("streaming", [False, True])
def test_a_hub_that_does_not_answer_is_asked_once_and_told_in_one_line(
    streaming: bool, make_recipe: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, int]] = []

    def unreachable(sock: socket.socket, address: tuple[str, int]) -> None:
        asked.append(address)
        raise ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("datasets.config.HF_ENDPOINT", "http://127.0.0.1:9")
    for proxy in ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(proxy, raising=False)
    monkeypatch.setattr(socket.socket, "connect", unreachable)
    recipe = make_recipe(data={"train": "someone/no-rows", "streaming": streaming})
    with pytest.raises(DataError, match=r"hub can't be reached \(http://127.0.0.1:9 doesn't answer: .*refused\)"):
        train(recipe)
    assert len(asked) == 1
    with pytest.raises(BaseModelError, match=r"doesn't answer: .*run peftkit base fetch someone/no-base where it can"):
        resolve_base("someone/no-base")
    assert len(asked) == 2


# other formats -------------------------------------------------------------------------------------------------------


def texts(path: Path, tokenizer: PreTrainedTokenizerBase, **settings: Any) -> list[tuple[str, str]]:
    """Of each sample, its whole text and what of it is trained."""
    data = load_dataset(str(path), tokenizer, **{"max_length": 512, **settings})
    return [
        (str(tokenizer.decode(sample.ids.tolist())), str(tokenizer.decode(sample.ids[sample.trained].tolist())))
        for sample in data.samples
    ]


def test_an_instruction_is_a_chat(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    row = {"instruction": "Add.", "input": "1 2", "output": "3", "system": "Be brief.", "history": [["Hi", "Ho"]]}
    chat = [("system", "Be brief."), ("user", "Hi"), ("assistant", "Ho"), ("user", "Add.\n\n1 2"), ("assistant", "3")]
    one = write_jsonl(tmp_path / "a.jsonl", [row])
    other = write_jsonl(tmp_path / "b.jsonl", [{"messages": [{"role": role, "content": text} for role, text in chat]}])
    assert texts(one, tokenizer) == texts(other, tokenizer)
    assert isinstance(next(read_rows(one)), InstructionRow)


def test_earlier_exchanges_are_json_text_in_a_csv_file(tmp_path: Path) -> None:
    row = {"instruction": "Add.", "output": "3", "history": [["Hi", "Ho"], ["1 + 1?", "2"]]}
    (line,) = read_rows(write_jsonl(tmp_path / "a.jsonl", [row]))
    (text,) = read_rows(write_csv(tmp_path / "a.csv", [{**row, "history": json.dumps(row["history"])}]))
    assert isinstance(line, InstructionRow) and isinstance(text, InstructionRow)
    assert text.history == line.history == (("Hi", "Ho"), ("1 + 1?", "2"))


def test_an_instruction_for_a_base_without_a_template_is_alpacas_prompt(tmp_path: Path, tiny_base: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_base)
    tokenizer.chat_template = None
    path = write_jsonl(tmp_path / "a.jsonl", [{"instruction": "Add.", "input": "1 2", "output": "3"}])
    ((whole, trained),) = texts(path, tokenizer)
    assert whole.endswith("### Instruction:\nAdd.\n\n### Input:\n1 2\n\n### Response:\n3<|im_end|>")
    assert trained == "3<|im_end|>"
    path = write_jsonl(tmp_path / "b.jsonl", [{"instruction": "Add.", "output": "3", "system": "x"}])
    with pytest.raises(DataError, match=r"b.jsonl:1: system needs a base with a chat template"):
        texts(path, tokenizer)


def test_a_text_is_trained_whole_and_a_long_one_goes_on_in_further_samples(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": "0123456789"}])
    assert isinstance(next(read_rows(path)), TextRow)
    assert texts(path, tokenizer) == [("0123456789<|im_end|>", "123456789<|im_end|>")]
    parts = texts(path, tokenizer, max_length=5)
    assert [whole for whole, _ in parts] == ["01234", "45678", "89<|im_end|>"]
    assert "".join(trained for _, trained in parts) == "123456789<|im_end|>"


def test_a_text_file_is_one_text(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    path = tmp_path / "book.txt"
    path.write_text("One line.\n\nAnother.\n", encoding="utf-8")
    assert texts(path, tokenizer) == [("One line.\n\nAnother.\n<|im_end|>", "ne line.\n\nAnother.\n<|im_end|>")]


CHAT = [
    {"role": "user", "content": "first"},
    {"role": "assistant", "content": "one"},
    {"role": "user", "content": "second"},
    {"role": "assistant", "content": "two"},
]


def test_which_turns_are_trained_is_chosen_for_all_rows_and_for_each_message(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    def trained(turns: str, **marks: Any) -> str:
        row = {"messages": [CHAT[0], {**CHAT[1], **marks}, *CHAT[2:]]}
        return texts(write_jsonl(tmp_path / "a.jsonl", [row]), tokenizer, turns=turns)[0][1]

    assert trained("all") == trained("all", train=True) == trained("all", weight=1) == "one<|im_end|>two<|im_end|>"
    assert trained("last") == trained("all", train=False) == trained("all", weight=0) == "two<|im_end|>"
    whole, _ = texts(tmp_path / "a.jsonl", tokenizer)[0]
    assert "one<|im_end|>" in whole
    path = write_jsonl(tmp_path / "b.jsonl", [{"messages": [*CHAT[:3], {**CHAT[3], "train": False}]}])
    with pytest.raises(DataError, match=r"b.jsonl:1: .* by turns last no other is: set data.turns to all"):
        texts(path, tokenizer, turns="last")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"messages": [CHAT[0], {**CHAT[1], "weight": 0.5}]}, "messages[1].weight must be 0 or 1, not 0.5"),
        ({"messages": [CHAT[0], {**CHAT[1], "train": 1}]}, "messages[1].train must be true or false, not 1"),
        ({"messages": [CHAT[0], {**CHAT[1], "train": False}]}, "messages: none of the assistant's turns"),
        ({"messages": [{**CHAT[0], "train": True}, CHAT[1]]}, "messages[0].train: only the assistant's turns"),
        ({"instruction": "a", "output": ""}, "output is empty"),
        ({"instruction": "a", "output": "b", "history": ["c"]}, "history must be a list of pairs"),
        ({"text": " "}, "text is empty"),
        ({"messages": "[{"}, "messages is no JSON list"),
        ({"messages": CHAT, "tools": [{"name": "f"}]}, "tools[0].function: must be an object with a name"),
        ({"messages": [CHAT[0], {**CHAT[1], "tool_calls": BROKEN}]}, "messages[1].tool_calls: the arguments aren't"),
    ],
)  # fmt: skip
def test_a_bad_row_of_the_other_formats_is_named(row: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [row])
    with pytest.raises(DataError) as caught:
        list(read_rows(path))
    assert str(caught.value).startswith(f"{path}:1: {message}")


# broken sources ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"prompt": ' + b"1" * 5000 + b"}", ":1: a number has too many digits"),
        ("a.json", b'[{"prompt": "a"', ": broken JSON at column 16"),
        ("a.json", b"[1]", ": row 1: a row is a JSON object, not a number"),
        ("a.json", b"[]", ": no rows: the file is empty"),
        ("a.json", b'{\n "data": [\n  {}\n ]\n}', ": one JSON object over many lines: rows are a list of objects"),
        ("a.json", b'{"data": [\n  {}\n ]\n}', ": one JSON object over many lines: rows are a list of objects"),
        ("a.csv", b"prompt;completion\na;b\n", ":1: the header is one name, 'prompt;completion': write commas where"),
        ("a.csv", b"", ": no rows: the file is empty"),
        ("a.csv", b"prompt,completion\n", ": no rows: the file is empty"),
        ("a.csv", b"prompt,completion\na,b\nc\n", ":3: the record has 1 values, the header 2 names"),
        ("a.csv", b"prompt,prompt\na,b\n", ":1: the header names 'prompt' twice"),
        ("a.csv", b'prompt,completion\na,"b"x\n', ":2: not valid CSV"),
        ("a.csv", b"prompt,completion\na,\xff\n", ": not UTF-8 text"),
        ("a.csv", b"prompt,completoin\na,b\n", ":2: completion is missing; did you mean 'completoin'?"),
        ("a.parquet", b"no table", ": not a Parquet file that can be read"),
        ("a.jsonl.gz", b"\x1f\x8b", ": .gz files aren't read: unpack it, or write it as JSONL, CSV or Parquet"),
        ("a.yaml", b"base: b", ":1: broken JSON at column 1: Expecting value (an ending '.yaml' is read as one JSON"),
        ("a.txt", b"\xff", ": not UTF-8 text"),
        ("a.txt", b" \n", ": no rows: the file is empty"),
        ("a.jsonl", b'{"prompt": "a\\ud83d"}', ":1: prompt holds half of a surrogate pair, \\ud83d at character 2, "),
        ("a.jsonl", b'{"messages": [{"role": "user", "content": "\\udc00"}]}', ":1: messages[0].content holds half of"),
        ("a.jsonl", b'{"\\ud800": "a"}', ":1: a field's name holds half of a surrogate pair"),
    ],
)  # fmt: skip
def test_a_broken_source_is_named(name: str, content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(DataError) as caught:
        list(read_rows(path))
    text = str(caught.value)
    if "UTF-8" in message:
        assert text.startswith(str(path)) and "not UTF-8 text" in text
    else:
        assert text.startswith(f"{path}{message}")
    assert "\n" not in text
    text.encode()


def test_whole_surrogate_pairs_are_characters(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"prompt": "\\ud83d\\ude00", "completion": "b"}')
    assert next(read_rows(path)) == CompletionRow(f"{path}:1", "😀", "b")


def test_a_long_value_of_a_csv_file_is_read(tmp_path: Path) -> None:
    path = write_csv(tmp_path / "a.csv", [{"prompt": "a" * 300_000, "completion": "b"}])
    (row,) = read_rows(path)
    assert isinstance(row, CompletionRow) and len(row.prompt) == 300_000


@pytest.mark.parametrize(("name", "message"), [("a\0b.jsonl", "NUL"), ("~nosuch-user/a.jsonl", "no such user")])
def test_what_is_no_path_is_an_error_of_one_line(
    name: str, message: str, tiny_base: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(DataError, match=message):
        open_source(name)
    assert cli(["data", "check", name, "--base", str(tiny_base)]) == 2
    shown = capsys.readouterr().err
    assert message in shown and shown.count("\n") == 1 and "\0" not in shown


def test_a_folder_of_something_else_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"a folder that `datasets` didn't write with save_to_disk"):
        open_source(tmp_path)


# hashes --------------------------------------------------------------------------------------------------------------


def test_the_hash_is_of_the_content_and_not_of_the_name(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    def sha256(name: str, rows: list[dict[str, Any]]) -> str:
        return load_dataset(str(write_jsonl(tmp_path / name, rows)), tokenizer, max_length=64).sha256

    assert sha256("a.jsonl", ROWS) == sha256("b.jsonl", ROWS) != sha256("c.jsonl", ROWS[1:])


def test_another_template_or_length_is_never_read_from_a_cache(tmp_path: Path, tiny_base: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_base)
    path = write_jsonl(tmp_path / "a.jsonl", [{"messages": CHAT}])
    before = texts(path, tokenizer)
    tokenizer.chat_template = tokenizer.chat_template.replace("<|im_start|>", "<|endoftext|>")
    after = texts(path, tokenizer)
    assert before != after and "<|endoftext|>" in after[0][0]
    assert texts(path, tokenizer, max_length=40) != after


# without the network -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["jsonl", "csv", "parquet", "datasets"])
@pytest.mark.parametrize("streaming", [False, True])
def test_training_on_local_files_opens_no_socket(
    kind: str,
    streaming: bool,
    tmp_path: Path,
    make_recipe: Callable[..., Recipe],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError(f"a socket was opened: {args}")

    path = WRITERS[kind](tmp_path)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("datasets.config.HF_DATASETS_OFFLINE", False)
    for name in ("connect", "connect_ex", "sendto"):
        monkeypatch.setattr(socket.socket, name, refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    recipe = make_recipe(data={"train": str(path), "streaming": streaming}, train={"max_steps": 2})
    assert cli(["data", "check", str(path), "--base", recipe.base]) == 0
    assert dry_run(recipe).steps == 2
    summary = train(recipe)
    assert summary.steps == 2
    assert train(recipe, resume=True).steps == 2
    assert cli(["report", str(summary.out), "--out", str(tmp_path / "report.html")]) == 0


def test_a_stream_and_a_data_set_say_what_they_are(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    from peftkit.data import open_stream

    path = str(WRITERS["jsonl"](tmp_path))
    stream, data = open_stream(path, tokenizer, max_length=64), load_dataset(path, tokenizer, max_length=64)
    assert isinstance(stream, Stream) and isinstance(data, Dataset)
    assert stream.facts() == {**data.facts(), "streamed": True}


@pytest.mark.parametrize("end", ["\n", "\r\n", ""])
def test_a_row_that_is_cut_off_is_named_by_its_own_line(tmp_path: Path, end: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"text": "a"}\n{"text": ' + end.encode())
    with pytest.raises(DataError, match=r"rows\.jsonl:2: broken JSON at column \d+: "):
        list(read_rows(str(path)))
