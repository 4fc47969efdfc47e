"""The bodies of the OpenAI-compatible routes: what a client may send.

Every field of OpenAI's two completion routes is named here. A field that would change the answer and can't be honoured
is declared with `only(...)`, the values that leave the answer as it is: any other value is refused by name.
"""

import json
from typing import Annotated, Any, Literal, Self, cast

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from peftkit.errors import did_you_mean
from peftkit_serve.grammar import any_object
from peftkit_serve.request import MAX_LOGPROBS, SamplingParams

MAX_PROMPTS = 256
"""Most prompts in one completions request, and most answers to all of them together."""
MAX_N = 128
"""Most answers to one prompt."""
MAX_STOP = 1024
"""Most characters of a stop string."""
MAX_BIASES = 1024
"""Most tokens with a bias: each is work in every step, which other requests wait for. OpenAI takes 300."""
MAX_METADATA = 1024
"""Most pairs of what is accepted without effect. OpenAI takes 16."""


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


def _at_most(most: int) -> BeforeValidator:
    """Refuses an object of more fields before any of them is looked at."""

    def check(value: Any, info: ValidationInfo) -> Any:
        if isinstance(value, dict) and len(cast(dict[Any, Any], value)) > most:
            message = f"{info.field_name} must have at most {most} entries"
            raise PydanticCustomError("too_long", "{message}", {"message": message})
        return value

    return BeforeValidator(check)


StopText = Annotated[str, Field(max_length=MAX_STOP)]
TokenId = Annotated[str, Field(pattern=r"^(0|[1-9][0-9]{0,8})$")]


def _wrong(field: str, message: str) -> PydanticCustomError:
    """What a validator of a whole body raises of one field."""
    return PydanticCustomError("invalid_value", "{message}", {"message": message, "field": field})


class Body(BaseModel):
    """A request body: nothing is coerced, and an unknown field is refused with the nearest right name.

    Lists end at their first wrong item (`fail_fast`): an error for each would take seconds, and gigabytes."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)

    @model_validator(mode="before")
    @classmethod
    def _known_fields(cls, data: Any) -> Any:
        known = [field.alias or name for name, field in cls.model_fields.items()]
        for name in data if isinstance(data, dict) else ():
            if name not in known:
                shown = str(name)[:64]
                message = f"unknown field {shown!r}{did_you_mean(shown, known)}"
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

    model: str
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
    stop: Annotated[
        StopText | Annotated[list[StopText], Field(fail_fast=True)] | None,
        _said(f"stop must be a string or a list of strings, each of at most {MAX_STOP} characters"),
    ] = None
    """Generation ends before the first of these strings; at most 16."""
    ignore_eos: bool | None = False
    """Go on past the end-of-sequence token."""
    stream: bool | None = False
    """Answer by server-sent events, one for each piece of text, and `[DONE]` at the end."""
    stream_options: StreamOptions | None = None
    """Only with `stream`."""

    n: Annotated[int, Field(ge=1, le=MAX_N)] | None = 1
    """Answers to each prompt; with a seed, the i-th of them is that of seed + i."""
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = 0
    """Makes tokens that were generated before less likely."""
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = 0
    """Makes tokens less likely for each time that they were generated before."""
    repetition_penalty: Annotated[float, Field(gt=0, le=10)] | None = 1
    """Above 1, makes tokens of the prompt and of the answer less likely, as transformers does it."""
    logit_bias: Annotated[
        dict[TokenId, Annotated[float, Field(ge=-100, le=100)]] | None,
        Field(json_schema_extra={"maxProperties": MAX_BIASES}),
        _at_most(MAX_BIASES),
    ] = None
    """Token id → what is added to its logit; at most 1024 tokens."""
    priority: Annotated[int, Field(ge=-1000, le=1000)] | None = 0
    """Among a tenant's own waiting requests the highest comes first."""

    user: str | None = None
    """Accepted without effect, as are the fields below."""
    metadata: Annotated[dict[str, str] | None, _at_most(MAX_METADATA)] = None
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
            raise _wrong("stream_options", "stream_options is only allowed when stream is true")
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise _wrong("max_completion_tokens", "max_tokens and max_completion_tokens differ: send one of them")
        return self

    def sampling_params(self, *, max_tokens: int, room: int) -> SamplingParams:
        """What the engine is asked for: null is the default, `max_tokens` holds where the client gave no limit, and
        the context leaves `room` tokens. Raises InputError."""
        asked = next((one for one in (self.max_completion_tokens, self.max_tokens) if one is not None), max_tokens)
        bias = (
            None if self.logit_bias is None else tuple((int(token), value) for token, value in self.logit_bias.items())
        )
        given: dict[str, Any] = {
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "repetition_penalty": self.repetition_penalty,
            "logit_bias": bias,
            **self._reported(),
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": None if self.top_k is None else max(self.top_k, 0),
            "min_p": self.min_p,
            "seed": self.seed,
            "stop": None if self.stop is None else (self.stop,) if isinstance(self.stop, str) else tuple(self.stop),
            "ignore_eos": self.ignore_eos,
        }
        return SamplingParams(max_tokens=max(1, min(asked, room)), **{k: v for k, v in given.items() if v is not None})

    @property
    def num_choices(self) -> int:
        """Answers to each prompt."""
        return self.n or 1

    def _reported(self) -> dict[str, Any]:
        """The route's own fields for the engine."""
        return {}

    @property
    def include_usage(self) -> bool:
        """Whether the stream ends with a chunk of token counts."""
        return bool(self.stream_options and self.stream_options.include_usage)


TokenIds = Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], Field(min_length=1, fail_fast=True)]


class CompletionRequest(Sampling):
    """`POST /v1/completions`."""

    prompt: Annotated[
        str
        | Annotated[list[str], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]
        | TokenIds
        | Annotated[list[TokenIds], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)],
        _said(
            "prompt must be a string, a list of strings, a list of token ids, or a list of lists of token ids "
            f"(none empty, at most {MAX_PROMPTS} prompts)"
        ),
    ]
    """Each prompt gets a choice with its index."""

    max_tokens: Annotated[int, Field(ge=0)] | None = None
    """Most tokens to generate, 16 where it is left out; 0 only with `echo`."""
    echo: bool | None = False
    """Begin each choice's text with its prompt."""
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    """Report each token's log-probability, with `echo` the prompt's too, and this many likeliest ones beside it."""
    best_of: int | None = None
    """A value other than `n` would change the answer and is refused."""
    suffix: Annotated[str | None, only("")] = None

    @model_validator(mode="after")
    def _choices(self) -> Self:
        if self.max_tokens == 0 and not self.echo:
            raise _wrong("max_tokens", "max_tokens is 0: without echo, at least 1 token must be generated")
        if self.best_of not in (None, self.num_choices):
            message = "best_of is not supported by this server: leave it out, or send the value of n"
            raise PydanticCustomError("unsupported_parameter", "{message}", {"message": message, "field": "best_of"})
        if len(self.prompts()) * self.num_choices > MAX_PROMPTS:
            raise _wrong("n", f"n is {self.num_choices}: prompts times n must be at most {MAX_PROMPTS}")
        return self

    def _reported(self) -> dict[str, Any]:
        return {"logprobs": self.logprobs, "prompt_logprobs": self.logprobs if self.echo else None}

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
    text: str


class Called(Body):
    """What a tool call calls."""

    name: str
    arguments: str
    """A JSON object as text."""


class ToolCall(Body):
    """A call that an assistant's message made."""

    id: str
    type: Literal["function"] = "function"
    function: Called
    index: int | None = None


class Message(Body):
    """One message of a chat."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    """`developer` is the newer name of `system`, and is rendered as it."""
    content: Annotated[
        str | Annotated[list[TextPart], Field(fail_fast=True)] | None,
        _said("content must be a string or a list of text parts; images, audio and files are not supported"),
    ] = None
    """May be null only where an assistant calls tools."""
    name: str | None = None
    """Handed to the chat template, which may name the speaker."""
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True)] | None = None
    """Of an assistant's message: what it called."""
    tool_call_id: str | None = None
    """Of a tool's message: the call that it answers."""

    # an assistant message sent back as the official client returned it has these, empty
    refusal: Annotated[str | None, only()] = None
    annotations: Annotated[list[Any] | None, only([])] = None
    audio: Annotated[dict[str, Any] | None, only()] = None
    function_call: Annotated[dict[str, Any] | None, only()] = None

    @model_validator(mode="after")
    def _fields_of_the_role(self) -> Self:
        if self.content is None and not self.tool_calls:
            if "content" in self.model_fields_set:
                raise _wrong("content", "content must be a string or a list of text parts, not null")
            raise PydanticCustomError("missing", "content is missing", {"field": "content"})
        if self.tool_calls and self.role != "assistant":
            raise _wrong("tool_calls", "tool_calls: only an assistant's message has them")
        if self.tool_call_id is not None and self.role != "tool":
            raise _wrong("tool_call_id", "tool_call_id: only a tool's message has it")
        return self

    def for_template(self) -> dict[str, Any]:
        """The message as chat templates expect it."""
        parts = self.content or ""
        text = parts if isinstance(parts, str) else "".join(part.text for part in parts)
        message: dict[str, Any] = {"role": "system" if self.role == "developer" else self.role, "content": text}
        if self.tool_calls:
            message["tool_calls"] = [call.model_dump(exclude_none=True) for call in self.tool_calls]
        for field in ("name", "tool_call_id"):
            if (value := getattr(self, field)) is not None:
                message[field] = value
        return message


class Function(Body):
    """A tool's definition."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """A JSON schema."""
    strict: bool | None = None
    """Accepted without effect."""


class Tool(Body):
    """A tool that the chat template tells the model of."""

    type: Literal["function"]
    function: Function


class JsonSchema(Body):
    """The schema that an answer is held to."""

    name: str
    description: str | None = None
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    """What it can't keep is refused by name."""
    strict: bool | None = None
    """An answer is always held to the schema."""


class ResponseFormat(Body):
    """What an answer must be."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _schema_where_asked(self) -> Self:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise _wrong("json_schema", "json_schema must be given with type json_schema, and with no other")
        return self

    def schema_text(self) -> str | None:
        """The schema as JSON; None for any text."""
        if self.json_schema is not None:
            return json.dumps(self.json_schema.schema_)
        return any_object() if self.type == "json_object" else None


class ChatRequest(Sampling):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)]
    """The conversation so far; the answer is the next message."""

    prediction: dict[str, Any] | None = None
    """Accepted without effect."""

    logprobs: bool | None = False
    """Report each token's log-probability."""
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    """Only with `logprobs`: this many likeliest tokens beside each."""
    response_format: ResponseFormat | None = None
    """Holds the answer to JSON, or to a schema."""
    tools: Annotated[list[Tool], Field(fail_fast=True)] | None = None
    """Told to the model by the chat template, which must know tools; calls come as the answer's text."""
    tool_choice: Annotated[
        str | dict[str, Any] | None, _said("tool_choice must be a string or an object"), only("none", "auto")
    ] = None
    """"none" leaves the tools out of the prompt. A value that would force a call is refused."""
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

    @model_validator(mode="after")
    def _top_with_logprobs(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise _wrong("top_logprobs", "top_logprobs is only allowed when logprobs is true")
        return self

    def shown_tools(self) -> list[dict[str, Any]]:
        """The tools that the prompt tells of."""
        tools = () if self.tool_choice == "none" else self.tools or ()
        return [tool.model_dump(exclude_none=True) for tool in tools]

    def _reported(self) -> dict[str, Any]:
        schema = None if self.response_format is None else self.response_format.schema_text()
        return {"logprobs": (self.top_logprobs or 0) if self.logprobs else None, "json_schema": schema}
