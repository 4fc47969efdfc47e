"""Rows of a JSONL file: `{"prompt", "completion"}` or `{"messages": [{"role", "content"}, …]}`, read strictly.

Other fields of a row are carried by many data sets and are ignored. Each error names the file and the line.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from peftkit.chat import check_messages
from peftkit.errors import DataError, did_you_mean

Format = Literal["auto", "completion", "chat"]
_HALF_PAIR = "holds half of a surrogate pair, which is no character"
_FIELDS = {"completion": ("prompt", "completion"), "chat": ("messages",)}


@dataclass(frozen=True, slots=True)
class CompletionRow:
    """A text and how it goes on; the completion is what is trained."""

    where: str
    """File and line, for messages."""
    prompt: str
    completion: str


@dataclass(frozen=True, slots=True)
class ChatRow:
    """A conversation that ends with an assistant's turn; the assistant's turns are what is trained."""

    where: str
    """File and line, for messages."""
    messages: tuple[dict[str, str], ...]


Row = CompletionRow | ChatRow


def read_rows(path: Path, format: Format = "auto", *, name: str | None = None) -> Iterator[Row]:
    """Yields the rows of a JSONL file. `auto` takes the format from the first row; all rows must share it.

    `name` stands for the file in messages. Raises DataError: no such file, broken JSON, a missing or misspelt field,
    an empty completion, no rows at all.
    """
    name = name or str(path)
    rows = 0
    for number, line in _lines(path, name):
        where = f"{name}:{number}"
        fields = _parse(line, where)
        if format == "auto":
            format = _detect(fields, where)
        yield _chat_row(fields, where) if format == "chat" else _completion_row(fields, where)
        rows += 1
    if not rows:
        raise DataError(f"{name}: no rows: the file is empty")


def _lines(path: Path, name: str) -> Iterator[tuple[int, str]]:
    """Line numbers from 1 and lines that hold something."""
    try:
        with path.open("rb") as file:
            for number, raw in enumerate(file, start=1):
                try:
                    line = raw.decode("utf-8-sig" if number == 1 else "utf-8")
                except UnicodeDecodeError as error:
                    raise DataError(f"{name}:{number}: not UTF-8 text: {error.reason}") from error
                if line.strip():
                    yield number, line
    except OSError as error:
        raise DataError(f"{name}: can't read the data file: {error.strerror}") from error


def _parse(line: str, where: str) -> dict[str, Any]:
    try:
        fields = json.loads(line)
    except json.JSONDecodeError as error:
        raise DataError(f"{where}: broken JSON at column {error.colno}: {error.msg}") from error
    except RecursionError as error:
        raise DataError(f"{where}: JSON nested too deep") from error
    if not isinstance(fields, dict):
        raise DataError(f"{where}: a row is a JSON object, not {_kind(fields)}")
    return fields


def _detect(fields: dict[str, Any], where: str) -> Literal["completion", "chat"]:
    if "messages" in fields and "completion" in fields:
        raise DataError(f"{where}: the row has both messages and completion: set data.format to chat or completion")
    if "messages" in fields:
        return "chat"
    if "prompt" in fields or "completion" in fields:
        return "completion"
    known = [name for names in _FIELDS.values() for name in names]
    near = next((f" ('{key}'{did_you_mean(key, known)})" for key in fields if did_you_mean(key, known)), "")
    raise DataError(f"{where}: the row has neither prompt and completion nor messages{near}")


def _text(fields: dict[str, Any], field: str, where: str) -> str:
    if field not in fields:
        near = did_you_mean(field, fields)
        raise DataError(f"{where}: {field} is missing{near}")
    value = fields[field]
    if not isinstance(value, str):
        raise DataError(f"{where}: {field} must be text, not {_kind(value)}")
    if not _encodable(value):
        raise DataError(f"{where}: {field} {_HALF_PAIR}")
    return value


def _completion_row(fields: dict[str, Any], where: str) -> CompletionRow:
    prompt, completion = _text(fields, "prompt", where), _text(fields, "completion", where)
    if not completion.strip():
        raise DataError(f"{where}: completion is empty: there is nothing to train on")
    return CompletionRow(where, prompt, completion)


def _chat_row(fields: dict[str, Any], where: str) -> ChatRow:
    if "messages" not in fields:
        raise DataError(f"{where}: messages is missing{did_you_mean('messages', fields)}")
    try:
        turns = tuple(check_messages(fields["messages"]))
    except DataError as error:
        raise DataError(f"{where}: {error}", field=error.field) from error
    for index, turn in enumerate(turns):
        if not _encodable(turn["content"]):
            raise DataError(f"{where}: messages[{index}] {_HALF_PAIR}")
        if turn["role"] == "assistant" and not turn["content"].strip():
            raise DataError(f"{where}: messages[{index}]: the answer is empty: there is nothing to train on")
    if turns[0]["role"] == "assistant":
        raise DataError(f"{where}: messages[0] is the assistant's: a chat starts with a system or user turn")
    if turns[-1]["role"] != "assistant":
        raise DataError(f"{where}: the last turn must be the assistant's, not the {turns[-1]['role']}'s")
    return ChatRow(where, turns)


def _encodable(text: str) -> bool:
    return not any("\ud800" <= character <= "\udfff" for character in text)


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "text", bool: "true or false", type(None): "null"}
    if value == []:
        return "an empty list"
    return names.get(type(value), "a number")
