"""Rows of a data source, read strictly. Four formats, told by a row's fields:

    completion   prompt, completion
    chat         messages: [{role, content, tool_calls?, train?}, …], tools?
    instruction  instruction, input?, output, system?, history?   as Alpaca has them
    text         text

Other fields of a row are carried by many data sets and are ignored. Each error names the source and the row.
"""

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from dataclasses import fields as fields_of
from pathlib import Path
from typing import Any, Literal

from peftkit.chat import check_messages, check_tools
from peftkit.data.sources import Source, kind_of, open_source
from peftkit.errors import DataError, did_you_mean

Format = Literal["auto", "completion", "chat", "instruction", "text"]
_FIELDS: dict[Format, tuple[str, ...]] = {
    "completion": ("prompt", "completion"),
    "chat": ("messages",),
    "instruction": ("instruction", "output"),
    "text": ("text",),
}
_ALPACA = (
    "Below is an instruction that describes a task{with_input}. "
    "Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n{input}### Response:\n"
)
"""The prompt of Stanford Alpaca, for bases without a chat template."""


@dataclass(frozen=True, slots=True)
class CompletionRow:
    """A text and how it goes on; the completion is what is trained."""

    where: str
    """File and line, for messages."""
    prompt: str
    completion: str

    @property
    def reference(self) -> str:
        """The right answer."""
        return self.completion


@dataclass(frozen=True, slots=True)
class ChatRow:
    """A conversation that ends with an assistant's turn; the assistant's turns are what is trained."""

    where: str
    """File and line, for messages."""
    messages: tuple[dict[str, Any], ...]
    tools: tuple[dict[str, Any], ...] = ()
    """Definitions of the tools that the assistant may call."""
    untrained: tuple[int, ...] = ()
    """Indices of the assistant's messages that the row says aren't to be trained."""

    @property
    def reference(self) -> str:
        """The right last answer."""
        return str(self.messages[-1]["content"])


@dataclass(frozen=True, slots=True)
class InstructionRow:
    """An Alpaca row: a chat where the base has a chat template, else Alpaca's own prompt; the output is trained."""

    where: str
    """File and line, for messages."""
    instruction: str
    input: str
    output: str
    system: str = ""
    history: tuple[tuple[str, str], ...] = ()
    """Earlier exchanges: what was asked and answered."""

    @property
    def reference(self) -> str:
        """The right answer."""
        return self.output

    def as_chat(self) -> ChatRow:
        """The row as a conversation; the input follows the instruction after an empty line."""
        asked = f"{self.instruction}\n\n{self.input}" if self.input else self.instruction
        turns = [("system", self.system)] if self.system else []
        for question, answer in self.history:
            turns += [("user", question), ("assistant", answer)]
        turns += [("user", asked), ("assistant", self.output)]
        return ChatRow(self.where, tuple({"role": role, "content": content} for role, content in turns))

    def as_completion(self) -> CompletionRow:
        """The row as Alpaca's prompt. Raises DataError for what that prompt has no place for."""
        for field in ("system", "history"):
            if getattr(self, field):
                raise DataError(f"{self.where}: {field} needs a base with a chat template, and this one has none")
        prompt = _ALPACA.format(
            with_input=", paired with an input that provides further context" if self.input else "",
            instruction=self.instruction,
            input=f"### Input:\n{self.input}\n\n" if self.input else "",
        )
        return CompletionRow(self.where, prompt, self.output)


@dataclass(frozen=True, slots=True)
class TextRow:
    """A text; all of it is trained."""

    where: str
    """File and line, for messages."""
    text: str

    @property
    def reference(self) -> str:
        """The text."""
        return self.text


Row = CompletionRow | ChatRow | InstructionRow | TextRow


def row_key(row: Row) -> bytes:
    """16 bytes that rows of the same content share."""
    content = [getattr(row, field.name) for field in fields_of(row) if field.name != "where"]
    text = type(row).__name__ + json.dumps(content, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


def read_rows(
    source: str | Path | Source, format: Format = "auto", *, name: str | None = None, start: int = 0
) -> Iterator[Row]:
    """Yields a source's rows, from row `start` on. `auto` takes the format from the first row; all rows must share it.

    `name` stands for the source in messages. Raises DataError: no such source, broken content, a missing or misspelt
    field, an empty answer, no rows at all.
    """
    opened = source if isinstance(source, Source) else open_source(source, shown=name)
    if format == "auto" and start:
        for where, fields in opened.read(0):
            format = _detect(fields, where)
            break
    rows = 0
    for where, fields in opened.read(start):
        if format == "auto":
            format = _detect(fields, where)
        yield _MAKERS[format](fields, where)
        rows += 1
    if not rows and not start:
        raise DataError(f"{opened.name}: no rows: the file is empty")


def _detect(fields: dict[str, Any], where: str) -> Format:
    if "messages" in fields and "completion" in fields:
        raise DataError(f"{where}: the row has both messages and completion: set data.format to chat or completion")
    if "messages" in fields:
        return "chat"
    if "prompt" in fields or "completion" in fields:
        return "completion"
    if "instruction" in fields:
        return "instruction"
    if "text" in fields:
        return "text"
    known = [name for names in _FIELDS.values() for name in names]
    meant = ((key, did_you_mean(key, known, likeness=0.7)) for key in fields)
    near = next((f" ('{key}'{hint})" for key, hint in meant if hint), "")
    raise DataError(
        f"{where}: the row has neither prompt and completion nor messages, instruction and output, or text{near}"
        f"{_there(fields)}; rename what is meant"
    )


def _there(fields: dict[str, Any]) -> str:
    return f": the row has {', '.join(map(repr, fields)) or 'no fields'}"


def _text(fields: dict[str, Any], field: str, where: str, default: str | None = None) -> str:
    if default is not None and fields.get(field) is None:
        return default
    if field not in fields:
        known = {name for names in _FIELDS.values() for name in names}
        near = did_you_mean(field, set(fields) - known)
        raise DataError(f"{where}: {field} is missing{near or _there(fields)}")
    value = fields[field]
    if not isinstance(value, str):
        raise DataError(f"{where}: {field} must be text, not {kind_of(value)}")
    return value


def _answer(fields: dict[str, Any], field: str, where: str) -> str:
    answer = _text(fields, field, where)
    if not answer.strip():
        raise DataError(f"{where}: {field} is empty: there is nothing to train on")
    return answer


def _completion_row(fields: dict[str, Any], where: str) -> CompletionRow:
    return CompletionRow(where, _text(fields, "prompt", where), _answer(fields, "completion", where))


def _text_row(fields: dict[str, Any], where: str) -> TextRow:
    return TextRow(where, _answer(fields, "text", where))


def _instruction_row(fields: dict[str, Any], where: str) -> InstructionRow:
    history = _json_value(fields.get("history"), "history", where) or []
    if not isinstance(history, (list, tuple)) or not all(
        isinstance(pair, (list, tuple)) and len(pair) == 2 and all(isinstance(part, str) for part in pair)
        for pair in history
    ):
        raise DataError(f"{where}: history must be a list of pairs of texts: what was asked and answered")
    return InstructionRow(
        where,
        _answer(fields, "instruction", where),
        _text(fields, "input", where, ""),
        _answer(fields, "output", where),
        _text(fields, "system", where, ""),
        tuple((question, answer) for question, answer in history),
    )


def _chat_row(fields: dict[str, Any], where: str) -> ChatRow:
    if "messages" not in fields:
        raise DataError(f"{where}: messages is missing{did_you_mean('messages', fields) or _there(fields)}")
    messages = _json_value(fields["messages"], "messages", where)
    tools = _json_value(fields.get("tools"), "tools", where)
    untrained: list[int] = []
    bare = messages
    if isinstance(messages, (list, tuple)):
        bare = [_without_marks(turn, index, where, untrained) for index, turn in enumerate(messages)]
    try:
        turns, known = tuple(check_messages(bare)), tuple(check_tools(tools))
    except DataError as error:
        raise DataError(f"{where}: {error}", field=error.field) from error
    for index, turn in enumerate(turns):
        if turn["role"] == "assistant" and not turn["content"].strip() and "tool_calls" not in turn:
            raise DataError(f"{where}: messages[{index}]: the answer is empty: there is nothing to train on")
    if turns[0]["role"] == "assistant":
        raise DataError(f"{where}: messages[0] is the assistant's: a chat starts with a system or user turn")
    if turns[-1]["role"] != "assistant":
        raise DataError(f"{where}: the last turn must be the assistant's, not the {turns[-1]['role']}'s")
    if all(index in untrained for index, turn in enumerate(turns) if turn["role"] == "assistant"):
        raise DataError(f"{where}: messages: none of the assistant's turns is to be trained")
    return ChatRow(where, turns, known, tuple(untrained))


def _json_value(value: Any, field: str, where: str) -> Any:
    """A value, or what it is as JSON text: a CSV file has no other way to hold a list."""
    if not isinstance(value, str) or value.strip()[:1] not in ("[", ""):
        return value
    try:
        return json.loads(value) if value.strip() else None
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: {field} is no JSON list: {error}") from error


def _without_marks(turn: Any, index: int, where: str, untrained: list[int]) -> Any:
    """A message without `train` (true or false) and `weight` (0 or 1, as OpenAI has it), which are for training."""
    if not isinstance(turn, dict):
        return turn
    marks = {field: turn[field] for field in ("train", "weight") if turn.get(field) is not None}
    for field, mark in marks.items():
        if (field == "train") != isinstance(mark, bool) or mark not in (0, 1):
            wanted = "true or false" if field == "train" else "0 or 1"
            raise DataError(f"{where}: messages[{index}].{field} must be {wanted}, not {mark!r}")
        if turn.get("role") != "assistant" and mark:
            raise DataError(f"{where}: messages[{index}].{field}: only the assistant's turns are trained")
    if turn.get("role") == "assistant" and not all(marks.values()):
        untrained.append(index)
    return {key: value for key, value in turn.items() if key not in ("train", "weight") and value is not None}


_MAKERS: dict[str, Callable[[dict[str, Any], str], Row]] = {
    "completion": _completion_row,
    "chat": _chat_row,
    "instruction": _instruction_row,
    "text": _text_row,
}
