"""Prompts, completions and conversations → token ids: the same in training, evaluation and serving.

A text prompt gets one BOS where the tokenizer's own rule adds it and nothing else. A conversation is rendered by the
base's chat template and tokenised as it stands, for the template writes its own special tokens. Spans are found in the
rendered text by offsets, never by looking for ids. Messages and tools have the OpenAI API's shapes.
"""

import hashlib
import json
import re
from bisect import bisect_right
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from itertools import takewhile
from operator import itemgetter
from typing import Any, NamedTuple

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from peftkit.errors import DataError, did_you_mean

Messages = Sequence[Mapping[str, Any]]
Message = dict[str, Any]

ROLES = ("system", "user", "assistant", "tool")
_OF_ROLE = {"assistant": ("tool_calls",), "tool": ("tool_call_id",)}
"""What a message may have beyond role, content and name."""
_GENERATION_BLOCK = re.compile(r"\{%-?\s*generation\s*-?%\}")
_MARK = "zqPeftkitContentqz"
"""Stands in for a message's content to see where the template puts it: letters only, so that no filter changes it."""


class ChatTemplate(NamedTuple):
    """A chat template and the SHA-256 of its text as hex."""

    text: str
    sha256: str


def chat_template_of(tokenizer: PreTrainedTokenizerBase) -> ChatTemplate | None:
    """The template a tokenizer renders conversations with, or None where it has none."""
    if not tokenizer.chat_template:
        return None
    text = tokenizer.get_chat_template()
    return ChatTemplate(text, hashlib.sha256(text.encode()).hexdigest())


def encode_prompt(tokenizer: PreTrainedTokenizerBase, prompt: str) -> list[int]:
    """Token ids of a text that is to be continued: one BOS where the tokenizer adds it, never an EOS."""
    ids = _plain_ids(tokenizer, prompt, "prompt")
    bos = tokenizer.bos_token_id
    if not isinstance(bos, int) or ids[:1] == [bos] or tokenizer.encode("a")[:1] != [bos]:
        return ids
    return [bos, *ids]


def encode_text(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Token ids of a text that stands by itself: one BOS where the tokenizer adds it, and the end token."""
    ids, end = encode_prompt(tokenizer, text), end_of_turn(tokenizer)
    return ids if ids[-1:] == [end] else [*ids, end]


def encode_completion(tokenizer: PreTrainedTokenizerBase, prompt: str, completion: str) -> tuple[list[int], int]:
    """Token ids of prompt + completion + end of turn, and how many of them are the prompt's.

    The prompt's ids are those of `encode_prompt`, so a model is trained on what it will be served: where tokenising
    the two together would merge across the border, they are tokenised apart.
    """
    prompt_ids = encode_prompt(tokenizer, prompt)
    together = encode_prompt(tokenizer, prompt + completion)
    num_prompt = len(prompt_ids)
    if together[:num_prompt] == prompt_ids:
        ids = together
    else:
        ids = prompt_ids + _plain_ids(tokenizer, completion, "completion")
    end = end_of_turn(tokenizer)
    return (ids if ids[num_prompt:][-1:] == [end] else [*ids, end]), num_prompt


def end_of_turn(tokenizer: PreTrainedTokenizerBase) -> int:
    """The token that ends an answer: the tokenizer's EOS."""
    end = tokenizer.eos_token_id
    if not isinstance(end, int):
        raise DataError("the base's tokenizer has no EOS token, so a model could not learn to stop")
    return end


def render_chat(
    tokenizer: PreTrainedTokenizerBase, messages: Messages, add_generation_prompt: bool = True, *, tools: object = None
) -> list[int]:
    """Token ids of a conversation, by default up to where the assistant's next answer begins.

    Messages have `role` (system, user, assistant, tool) and `content`, a string or a list of text parts; an assistant's
    may have `tool_calls` and `tools` are their definitions. Raises `DataError` (its `field` names the message) for
    anything else, where the template refuses the conversation, and where it leaves out calls, tools or their results.
    """
    return encode_rendered(tokenizer, render_text(tokenizer, messages, add_generation_prompt, tools=tools))


def render_text(
    tokenizer: PreTrainedTokenizerBase, messages: Messages, add_generation_prompt: bool = True, *, tools: object = None
) -> str:
    """The text whose tokens `render_chat` returns, by the template and the special tokens of a tokenizer alone. Raises
    as that does."""
    checked, known = check_messages(messages), check_tools(tools)
    check_tools_shown(tokenizer, checked, known)
    return _render(tokenizer, checked, known, add_generation_prompt=add_generation_prompt)


def encode_rendered(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Token ids of a conversation's text as it stands: the template has written its own special tokens."""
    return _plain_ids(tokenizer, text, "messages")


def encode_chat(
    tokenizer: PreTrainedTokenizerBase,
    messages: Messages,
    *,
    tools: object = None,
    turns: Collection[int] | None = None,
) -> tuple[list[int], list[bool]]:
    """Token ids of a whole conversation, and for each whether it is trained on.

    Trained are the assistant's turns from the place where generation would begin, each with its end-of-turn token: all
    of them, or those whose message's index is among `turns`. Spans are the template's `{% generation %}` blocks, else
    they are found by rendering the conversation up to each turn. Raises `DataError` where they can't be found, or where
    no end-of-turn token follows a turn.
    """
    checked, known = check_messages(messages), check_tools(tools)
    answers = [i for i, message in enumerate(checked) if message["role"] == "assistant"]
    chosen = [i for i in answers if turns is None or i in turns]
    if not chosen:
        raise DataError("messages: there is no assistant message to train on", field="messages")
    check_tools_shown(tokenizer, checked, known)
    text = _render(tokenizer, checked, known)
    if _GENERATION_BLOCK.search(tokenizer.get_chat_template()):
        spans = _chosen(_marked_spans(tokenizer, checked, known), answers, chosen)
    else:
        spans = [_span(tokenizer, checked, known, turn, text) for turn in chosen]
    ids, offsets = _tokenise(tokenizer, text, [start for start, _ in spans])
    trained = [False] * len(ids)
    for start, end in spans:
        end = _end_with_turn(tokenizer, text, ids, offsets, (start, end))
        for i, (first, last) in enumerate(offsets):
            trained[i] = trained[i] or (start <= first and last <= end)
    return ids, trained


def unlike_served(tokenizer: PreTrainedTokenizerBase, messages: Messages, *, tools: object = None) -> str | None:
    """What the template has an assistant's answer begin after when it is served, where that isn't how a conversation
    that ends with the answer goes: a model would be asked otherwise than it was trained. None where they agree."""
    checked, known = check_messages(messages), check_tools(tools)
    served = _render(tokenizer, checked[:-1], known, add_generation_prompt=True)
    whole = _render(tokenizer, checked, known)
    if whole.startswith(served):
        return None
    same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(served, whole, strict=False)))
    return served[same:]


def check_messages(messages: object) -> list[Message]:
    """Messages with content as one string each and calls' arguments as objects; raises `DataError` whose `field` names
    what is wrong."""
    if not isinstance(messages, (list, tuple)) or not messages:
        raise DataError("messages: must be a list of at least one message", field="messages")
    return [_check_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def check_tools(tools: object) -> list[Message]:
    """Tool definitions, [] for none; raises `DataError` whose `field` names what is wrong."""
    if tools is None:
        return []
    if not isinstance(tools, (list, tuple)):
        raise DataError(f"tools: must be a list of tools, not {tools!r}", field="tools")
    for i, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise DataError(f"tools[{i}].function: must be an object with a name", field=f"tools[{i}].function")
    return [dict(tool) for tool in tools]


def check_tools_shown(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], tools: list[Message]) -> None:
    """Raises `DataError` where the template leaves out a call, a tool's result or a tool that it is given."""
    marks: dict[str, str] = {}

    def mark(field: str) -> str:
        marks[field] = f"{_MARK}{len(marks)}{_MARK}"
        return marks[field]

    def named(call: Message, field: str) -> Message:
        return {**call, "function": {**call["function"], "name": mark(field)}}

    marked = []
    for i, message in enumerate(messages):
        if calls := message.get("tool_calls"):
            message = {**message, "tool_calls": [named(call, f"messages[{i}].tool_calls") for call in calls]}
        elif message["role"] == "tool":
            message = {**message, "content": mark(f"messages[{i}].content")}
        marked.append(message)
    marked_tools = [named(tool, "tools") for tool in tools]
    if not marks:
        return
    text = _render(tokenizer, marked, marked_tools)
    for field, wanted in marks.items():
        if wanted not in text:
            raise DataError(
                f"{field}: the base's chat template leaves this out, so the model would never see it: take it out, or "
                "use a base whose template has it",
                field=field,
            )


def _check_message(message: object, where: str) -> Message:
    if not isinstance(message, Mapping):
        raise DataError(f"{where}: must be an object with role and content, not {message!r}", field=where)
    role = message.get("role")
    if role not in ROLES:
        hint = did_you_mean(str(role), ROLES) or f"; it must be one of {', '.join(ROLES)}"
        raise DataError(f"{where}.role: {role!r}{hint}", field=f"{where}.role")
    known = ("role", "content", "name", *_OF_ROLE.get(role, ()))
    for key in message:
        # an absent tool call is often written as null
        if key not in known and message[key] is not None:
            raise DataError(
                f"{where}.{key}: isn't supported; a message of role {role} has {', '.join(known)}",
                field=f"{where}.{key}",
            )
    calls = _check_calls(message.get("tool_calls"), f"{where}.tool_calls")
    content = message.get("content")
    checked: Message = {
        "role": str(role),
        "content": "" if content is None and calls else _text(content, f"{where}.content"),
    }
    if calls:
        checked["tool_calls"] = calls
    for key in ("name", "tool_call_id"):
        if isinstance(message.get(key), str):
            checked[key] = message[key]
    return checked


def _check_calls(calls: object, where: str) -> list[Message]:
    """Tool calls with their arguments as objects, which is how templates print them; [] for none."""
    if calls is None:
        return []
    if not isinstance(calls, (list, tuple)):
        raise DataError(f"{where}: must be a list of calls, not {calls!r}", field=where)
    checked = []
    for call in calls:
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise DataError(f"{where}: each call needs a function with a name and arguments", field=where)
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments or "{}")
            except (ValueError, RecursionError) as error:
                raise DataError(f"{where}: the arguments aren't JSON: {error}", field=where) from error
        if not isinstance(arguments, Mapping):
            raise DataError(f"{where}: the arguments must be a JSON object", field=where)
        checked.append({**call, "type": "function", "function": {**function, "arguments": dict(arguments)}})
    return checked


def _text(content: object, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, (list, tuple)):
        raise DataError(f"{where}: must be a string or a list of text parts, not {content!r}", field=where)
    texts = []
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind != "text" or not isinstance(part.get("text"), str):
            raise DataError(f"{where}[{i}]: only parts of type text are supported, not {kind or part!r}", field=where)
        texts.append(part["text"])
    return "".join(texts)


def _plain_ids(tokenizer: PreTrainedTokenizerBase, text: str, field: str) -> list[int]:
    try:
        text.encode()
    except UnicodeEncodeError:
        message = f"{field}: the text holds half of a surrogate pair, which is no character"
        raise DataError(message, field=field) from None
    return tokenizer.encode(text, add_special_tokens=False)


def _render(
    tokenizer: PreTrainedTokenizerBase,
    messages: list[Message],
    tools: list[Message],
    *,
    add_generation_prompt: bool = False,
) -> str:
    if not tokenizer.chat_template:
        raise DataError("messages: the base's tokenizer has no chat template; give prompt and completion instead")
    given: list[Any] | None = tools or None
    rendered: Any = partial(
        tokenizer.apply_chat_template, tools=given, tokenize=False, add_generation_prompt=add_generation_prompt
    )
    try:
        try:
            return rendered(messages)
        except TypeError:  # from a template that joins a call's arguments to its text
            return rendered([_with_arguments_as_text(message) for message in messages])
    except (TemplateError, TypeError) as error:
        raise DataError(f"messages: the chat template refuses them ({error})", field="messages") from None


def _with_arguments_as_text(message: Message) -> Message:
    if "tool_calls" not in message:
        return message
    functions = [call["function"] for call in message["tool_calls"]]
    texts = [{**function, "arguments": json.dumps(function["arguments"])} for function in functions]
    calls = [{**call, "function": text} for call, text in zip(message["tool_calls"], texts, strict=True)]
    return {**message, "tool_calls": calls}


def _tokenise(
    tokenizer: PreTrainedTokenizerBase, text: str, starts: list[int]
) -> tuple[list[int], list[tuple[int, int]]]:
    """Ids of `text` and each token's characters, cut at a start where the text before it, which is what is served,
    would have other ids by itself.

    Added tokens divide a text for good, so only what follows the last of them before a start can have other ids.
    """
    encode: Any = partial(tokenizer, add_special_tokens=False, return_offsets_mapping=True)
    added = {id: token.content for id, token in tokenizer.added_tokens_decoder.items()}
    ids: list[int] = []
    offsets: list[tuple[int, int]] = []
    begin = 0
    rest = encode(text)
    for start in starts:
        before = bisect_right(rest.offset_mapping, start - begin, key=itemgetter(1))
        divides = (i for i in reversed(range(before)) if _written(text, rest, i, begin) == added.get(rest.input_ids[i]))
        kept = next(divides, 0)
        where = begin + rest.offset_mapping[kept][0] if kept else begin
        served = encode(text[where:start])
        if rest.input_ids[kept : kept + len(served.input_ids)] != served.input_ids:
            ids += rest.input_ids[:kept] + served.input_ids
            offsets += _moved(rest.offset_mapping[:kept], begin) + _moved(served.offset_mapping, where)
            begin = start
            rest = encode(text[begin:])
    return ids + rest.input_ids, offsets + _moved(rest.offset_mapping, begin)


def _written(text: str, encoded: Any, place: int, begin: int) -> str:
    first, last = encoded.offset_mapping[place]
    return text[begin + first : begin + last]


def _moved(offsets: list[tuple[int, int]], by: int) -> list[tuple[int, int]]:
    return [(first + by, last + by) for first, last in offsets]


def _chosen(spans: list[tuple[int, int]], answers: list[int], chosen: list[int]) -> list[tuple[int, int]]:
    """Those of a template's marked spans that belong to the chosen turns."""
    if len(chosen) == len(answers):
        return spans
    if len(spans) != len(answers):
        raise DataError(
            f"messages: the chat template marks {len(spans)} answers of {len(answers)}, so it can't be told which of "
            "them train",
            field="messages",
        )
    return [span for span, turn in zip(spans, answers, strict=True) if turn in chosen]


def _marked_spans(
    tokenizer: PreTrainedTokenizerBase, messages: list[Message], tools: list[Message]
) -> list[tuple[int, int]]:
    """Characters that the template's generation blocks cover, one span a block."""
    given: list[Any] | None = tools or None
    encoded: Any = tokenizer.apply_chat_template(
        messages,
        tools=given,
        return_dict=True,
        return_assistant_tokens_mask=True,
        tokenizer_kwargs={"return_offsets_mapping": True},
    )
    spans: list[tuple[int, int]] = []
    before = False
    for mark, (first, last) in zip(encoded["assistant_masks"], encoded["offset_mapping"], strict=True):
        if mark:
            spans = [*spans[:-1], (spans[-1][0], last)] if before else [*spans, (first, last)]
        before = bool(mark)
    if not spans:
        raise DataError("messages: the chat template marks no assistant token", field="messages")
    return spans


def _span(
    tokenizer: PreTrainedTokenizerBase, messages: list[Message], tools: list[Message], turn: int, text: str
) -> tuple[int, int]:
    """First and one past the last character in `text` of what the assistant generates in one turn, without its end.

    … <|im_start|>assistant\n | The answer. | <|im_end|>\n<|im_start|>user …
         rendered up to here ^             ^ from here on as with another answer
    """
    prompt = _render(tokenizer, messages[:turn], tools, add_generation_prompt=True) if turn else ""
    before, found, after = _render(
        tokenizer, _replaced(messages, turn, {**messages[turn], "content": _MARK}), tools
    ).partition(_MARK)
    calls = bool(messages[turn].get("tool_calls"))
    if calls and messages[turn]["content"] and not found:
        raise DataError(
            f"messages[{turn}].content: the base's chat template leaves out what is said beside a call: take it out",
            field=f"messages[{turn}].content",
        )
    if not calls and (not found or _MARK in after or not text.endswith(after)):
        raise DataError(f"messages[{turn}]: where the chat template puts this answer can't be found", field="messages")
    end = _end_of_calls(tokenizer, messages, tools, turn, text) if calls else len(text) - len(after)
    # some templates render a conversation's start differently once it goes on: then the answer itself is all there is
    heads = (prompt, before if found else "")
    start = next((len(head) for head in heads if head and text.startswith(head) and len(head) <= end), None)
    if start is None:
        raise DataError(
            f"messages[{turn}]: where this answer begins in the chat template can't be found", field="messages"
        )
    return start, end


def _end_of_calls(
    tokenizer: PreTrainedTokenizerBase, messages: list[Message], tools: list[Message], turn: int, text: str
) -> int:
    """Where in `text` the end-of-turn token of a turn that calls tools stands: the first after its last arguments.

    … <call>{"name": "f", "arguments": {"a": 1}}</call><|im_end|>\n<|im_start|>tool …
                    from here on as with other arguments ^          ^ before the next turn's content
    """
    *calls, last = messages[turn]["tool_calls"]
    last = {**last, "function": {**last["function"], "arguments": {_MARK: _MARK}}}
    other = _render(tokenizer, _replaced(messages, turn, {**messages[turn], "tool_calls": [*calls, last]}), tools)
    if _MARK not in other:
        raise DataError(f"messages[{turn}]: where the chat template puts these calls can't be found", field="messages")
    same = zip(reversed(text), reversed(other), strict=False)
    after = len(text) - sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], same))
    limit = len(text)
    if turn + 1 < len(messages):
        next_marked = _replaced(messages, turn + 1, {**messages[turn + 1], "content": _MARK})
        limit = len(_render(tokenizer, next_marked, tools).partition(_MARK)[0])
    end = text.find(str(tokenizer.eos_token), after, limit)
    return after if end < 0 else end


def _replaced(messages: list[Message], turn: int, message: Message) -> list[Message]:
    return [*messages[:turn], message, *messages[turn + 1 :]]


def _end_with_turn(
    tokenizer: PreTrainedTokenizerBase,
    text: str,
    ids: list[int],
    offsets: list[tuple[int, int]],
    span: tuple[int, int],
) -> int:
    """Where a span ends once its end-of-turn token is in it; nothing but white space may stand between."""
    token = end_of_turn(tokenizer)
    for i, (first, last) in enumerate(offsets):
        if ids[i] != token or first < span[0]:
            continue
        # either the block holds the token, then only white space follows it there, or it stands right after
        between = text[last : span[1]] if last <= span[1] else text[span[1] : first]
        if not between.strip():
            return max(last, span[1])
    own = _token_at_end(tokenizer, text, ids, offsets, span)
    remedy = f': write "eos_token": "{own}" into its tokenizer_config.json if that is what ends a turn' if own else ""
    raise DataError(
        f"messages: the chat template doesn't end an assistant turn with {tokenizer.eos_token!r}, the tokenizer's "
        f"EOS, so a model trained with it would never stop{remedy}",
        field="messages",
    )


def _token_at_end(
    tokenizer: PreTrainedTokenizerBase,
    text: str,
    ids: list[int],
    offsets: list[tuple[int, int]],
    span: tuple[int, int],
) -> str | None:
    """The special token with which a span ends, or that stands right after it."""
    words = [i for i, (first, last) in enumerate(offsets) if first >= span[0] and text[first:last].strip()]
    inside = [i for i in words if offsets[i][1] <= span[1]]
    for i in (*inside[-1:], *words[len(inside) : len(inside) + 1]):
        if ids[i] in tokenizer.added_tokens_decoder:
            return str(tokenizer.convert_ids_to_tokens(ids[i]))
    return None
