"""What the OpenAI-compatible routes answer: whole bodies, the chunks of a stream, and errors."""

from typing import Any, Literal

from pydantic import BaseModel, SerializerFunctionWrapHandler, model_serializer

from peftkit_serve.request import FinishReason


class TextLogprobs(BaseModel):
    """Log-probabilities of a text's tokens, as `/v1/completions` words them: four lists of the same length."""

    tokens: list[str]
    token_logprobs: list[float | None]
    """null for a prompt's first token, which nothing stands before."""
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]
    """Where each token begins in the choice's text."""


class TopLogprob(BaseModel):
    """One of the likeliest tokens at a place."""

    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(TopLogprob):
    """A token of the answer."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    """Log-probabilities of an answer's tokens, as `/v1/chat/completions` words them."""

    content: list[TokenLogprob]
    refusal: None = None


class Usage(BaseModel):
    """Token counts of a request: of all its prompts, each counted once, and of all its choices."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class CompletionChoice(BaseModel):
    """One prompt's answer, or a piece of it."""

    index: int
    text: str
    logprobs: TextLogprobs | None = None
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
    logprobs: ChatLogprobs | None = None
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
    logprobs: ChatLogprobs | None = None
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
    reason: str | None = None
    """What must be mended, where the status alone doesn't say it."""
