"""The bodies of the OpenAI-compatible routes: what a client may send, and what it gets.

Every field of OpenAI's two completion routes is named here. A field that would change the answer and can't be honoured
is declared with `only(...)`, the values that leave the answer as it is: any other value is refused by name.
"""

import json
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    ValidationError,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_serializer,
    model_validator,
)
from pydantic_core import PydanticCustomError

from peftkit.errors import did_you_mean
from peftkit_serve.request import FinishReason, SamplingParams

MAX_PROMPTS = 256
"""Most prompts in one completions request."""


def only(*values: object) -> AfterValidator:
    """Refuses every value of a field but `values` and null."""
    allowed = " or ".join(json.dumps(value) for value in (*values, None))

    def check(value: object, info: ValidationInfo) -> object:
        if value is None or value in values:
            return value
        message = f"{info.field_name} is not supported by this server: leave it out, or send {allowed}"
        raise PydanticCustomError("unsupported_parameter", "{message}", {"message": message})

    return AfterValidator(check)


def _said(message: str) -> WrapValidator:
    """One sentence in place of an error for each member of a union."""

    def validate(value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
        try:
            return handler(value)
        except ValidationError:
            raise PydanticCustomError("invalid_type", "{message}", {"message": message}) from None

    return WrapValidator(validate)


def _whole_characters(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise PydanticCustomError(
            "invalid_value", "the text holds half of a surrogate pair, which is no character"
        ) from None
    return text


Text = Annotated[str, AfterValidator(_whole_characters)]


class Body(BaseModel):
    """A request body: nothing is coerced, and an unknown field is refused with the nearest right name."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)

    @model_validator(mode="before")
    @classmethod
    def _known_fields(cls, data: Any) -> Any:
        for name in data if isinstance(data, dict) else ():
            if name not in cls.model_fields:
                shown = str(name)[:64].encode(errors="backslashreplace").decode()
                message = f"unknown field {shown!r}{did_you_mean(shown, cls.model_fields)}"
                raise PydanticCustomError("unknown_parameter", "{message}", {"message": message, "field": shown})
        return data


class StreamOptions(Body):
    """How an answer is streamed."""

    include_usage: bool | None = None
    """One more chunk before [DONE], with the whole request's token counts and no choice."""
    include_obfuscation: bool | None = None
    """Accepted without effect: this server sends no padding."""


class Sampling(Body):
    """The fields that both completion routes share."""

    model: Text
    """The base's name, an adapter's name, or `base:adapter`."""
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    """Most tokens to generate. The answer ends with finish_reason "length" there, or where the context ends."""
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    """The newer name of `max_tokens`."""
    temperature: Annotated[float, Field(ge=0, le=2)] | None = 1.0
    """0 takes the most likely token."""
    top_p: Annotated[float, Field(gt=0, le=1)] | None = 1.0
    """Keep the smallest set of most likely tokens whose probabilities sum to this."""
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = 0
    """Keep this many most likely tokens; 0 or -1 keeps all."""
    min_p: Annotated[float, Field(ge=0, le=1)] | None = 0.0
    """Drop tokens less likely than this share of the most likely one's probability."""
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    """Fixes the random draws of this request, whatever else is in the batch."""
    stop: Annotated[Text | list[Text] | None, _said("stop must be a string or a list of strings")] = None
    """Generation ends before the first of these strings; at most 16."""
    ignore_eos: bool | None = False
    """Go on past the end-of-sequence token."""
    stream: bool | None = False
    """Answer by server-sent events, one for each piece of text, and `[DONE]` at the end."""
    stream_options: StreamOptions | None = None
    """Only with `stream`."""

    n: Annotated[int | None, only(1)] = 1
    """Any value but the default would change the answer and is refused, as for the penalties and `logit_bias`."""
    presence_penalty: Annotated[float | None, only(0)] = 0
    frequency_penalty: Annotated[float | None, only(0)] = 0
    repetition_penalty: Annotated[float | None, only(1)] = 1
    logit_bias: Annotated[dict[str, Any] | None, only({})] = None

    user: str | None = None
    """Accepted without effect, as are the fields below."""
    metadata: dict[str, str] | None = None
    store: bool | None = None
    parallel_tool_calls: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _fields_that_go_together(self) -> Self:
        if self.stream_options is not None and not self.stream:
            message = "stream_options is only allowed when stream is true"
            raise PydanticCustomError("invalid_value", "{message}", {"message": message, "field": "stream_options"})
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            message = "max_tokens and max_completion_tokens differ: send one of them"
            raise PydanticCustomError(
                "invalid_value", "{message}", {"message": message, "field": "max_completion_tokens"}
            )
        return self

    def sampling_params(self, *, max_tokens: int, room: int) -> SamplingParams:
        """What the engine is asked for: null is the default, `max_tokens` holds where the client gave no limit, and
        the context leaves `room` tokens. Raises InputError."""
        asked = self.max_completion_tokens or self.max_tokens or max_tokens
        given: dict[str, Any] = {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": None if self.top_k is None else max(self.top_k, 0),
            "min_p": self.min_p,
            "seed": self.seed,
            "stop": None if self.stop is None else (self.stop,) if isinstance(self.stop, str) else tuple(self.stop),
            "ignore_eos": self.ignore_eos,
        }
        return SamplingParams(max_tokens=min(asked, room), **{k: v for k, v in given.items() if v is not None})

    @property
    def include_usage(self) -> bool:
        """Whether the stream ends with a chunk of token counts."""
        return bool(self.stream_options and self.stream_options.include_usage)


TokenIds = Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]


class CompletionRequest(Sampling):
    """`POST /v1/completions`."""

    prompt: Annotated[
        Text
        | Annotated[list[Text], Field(min_length=1, max_length=MAX_PROMPTS)]
        | TokenIds
        | Annotated[list[TokenIds], Field(min_length=1, max_length=MAX_PROMPTS)],
        _said(
            "prompt must be a string, a list of strings, a list of token ids, or a list of lists of token ids "
            f"(none empty, at most {MAX_PROMPTS} prompts)"
        ),
    ]
    """Each prompt gets a choice with its index."""

    best_of: Annotated[int | None, only(1)] = None
    """A value that would change the answer is refused, as for the fields below."""
    echo: Annotated[bool | None, only(False)] = False
    logprobs: Annotated[int | None, only()] = None
    suffix: Annotated[str | None, only("")] = None

    def prompts(self) -> list[str | list[int]]:
        """The prompts one by one."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [[int(token) for token in self.prompt if isinstance(token, int)]]
        return [p for p in self.prompt if not isinstance(p, int)]


class TextPart(Body):
    """A piece of a message's content."""

    type: Literal["text"]
    text: Text


class Message(Body):
    """One message of a chat."""

    role: Literal["system", "developer", "user", "assistant"]
    """`developer` is the newer name of `system`, and is rendered as it."""
    content: Annotated[
        Text | list[TextPart],
        _said("content must be a string or a list of text parts; images, audio and files are not supported"),
    ]
    name: Text | None = None
    """Handed to the chat template, which may name the speaker."""

    # an assistant message sent back as the official client returned it has these, empty
    refusal: Annotated[str | None, only()] = None
    annotations: Annotated[list[Any] | None, only([])] = None
    audio: Annotated[dict[str, Any] | None, only()] = None
    function_call: Annotated[dict[str, Any] | None, only()] = None
    tool_calls: Annotated[list[Any] | None, only([])] = None

    def for_template(self) -> dict[str, str]:
        """The message as chat templates expect it."""
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        named = {} if self.name is None else {"name": self.name}
        return {"role": "system" if self.role == "developer" else self.role, "content": text, **named}


class ChatRequest(Sampling):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[Message], Field(min_length=1)]
    """The conversation so far; the answer is the next message."""

    prediction: dict[str, Any] | None = None
    """Accepted without effect."""

    logprobs: Annotated[bool | None, only(False)] = False
    """A value that would change the answer is refused, as for the fields below."""
    top_logprobs: Annotated[int | None, only(0)] = None
    response_format: Annotated[dict[str, Any] | None, only({"type": "text"})] = None
    tools: Annotated[list[Any] | None, only([])] = None
    tool_choice: Annotated[
        str | dict[str, Any] | None, _said("tool_choice must be a string or an object"), only("none", "auto")
    ] = None
    functions: Annotated[list[Any] | None, only([])] = None
    function_call: Annotated[
        str | dict[str, Any] | None, _said("function_call must be a string or an object"), only("none", "auto")
    ] = None
    modalities: Annotated[list[Any] | None, only(["text"])] = None
    audio: Annotated[dict[str, Any] | None, only()] = None
    reasoning_effort: Annotated[str | None, only("none")] = None
    verbosity: Annotated[str | None, only("medium")] = None
    web_search_options: Annotated[dict[str, Any] | None, only()] = None
    moderation: Annotated[dict[str, Any] | None, only()] = None


class Usage(BaseModel):
    """Token counts of a request: of all its prompts, each counted once, and of all its choices."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class CompletionChoice(BaseModel):
    """One prompt's answer, or a piece of it."""

    index: int
    text: str
    logprobs: None = None
    finish_reason: FinishReason | None


class Completion(BaseModel):
    """The answer of `/v1/completions`, and each chunk of it when it is streamed."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    """Seconds since 1970."""
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None


class ChatAnswer(BaseModel):
    """The assistant's message."""

    role: Literal["assistant"] = "assistant"
    content: str
    refusal: None = None


class ChatChoice(BaseModel):
    """The answer with why it ended."""

    index: int
    message: ChatAnswer
    logprobs: None = None
    finish_reason: FinishReason | None


class ChatCompletion(BaseModel):
    """The answer of `/v1/chat/completions`."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    """Seconds since 1970."""
    model: str
    choices: list[ChatChoice]
    usage: Usage


class ChatDelta(BaseModel):
    """What a chunk adds to the message; absent fields add nothing."""

    role: Literal["assistant"] | None = None
    content: str | None = None

    @model_serializer(mode="wrap")
    def _present_fields(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {name: value for name, value in handler(self).items() if value is not None}


class ChatChunkChoice(BaseModel):
    """A piece of the answer."""

    index: int
    delta: ChatDelta
    logprobs: None = None
    finish_reason: FinishReason | None = None


class ChatChunk(BaseModel):
    """Each chunk of `/v1/chat/completions` when it is streamed."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    """Seconds since 1970."""
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = None


class ModelCard(BaseModel):
    """A name that `model` may have, as vLLM describes it."""

    id: str
    object: Literal["model"] = "model"
    created: int
    """Seconds since 1970."""
    owned_by: str = "peftkit"
    root: str
    """The base's name, or the folder that an adapter was read from."""
    parent: str | None
    """The base of an adapter; null for the base."""
    max_model_len: int
    """Tokens of the context that text can use."""


class ModelList(BaseModel):
    """The answer of `/v1/models`: the base first, then the adapters by name."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


class ErrorDetail(BaseModel):
    """What went wrong, as OpenAI says it."""

    message: str
    type: str
    param: str | None
    """The field at fault, where there is one."""
    code: str | None


class ErrorBody(BaseModel):
    """The body of every error answer."""

    error: ErrorDetail


class Status(BaseModel):
    """The answer of `/health` and `/ready`."""

    status: Literal["ok", "ready", "not ready", "draining"]
