"""The OpenAI-compatible routes: chat and text completions, whole or streamed, and the names that `model` may have."""

import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any, Protocol

from fastapi import APIRouter, Request
from pydantic import BaseModel
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from peftkit_serve.http.errors import ApiError
from peftkit_serve.http.guard import report
from peftkit_serve.http.schemas import (
    ChatAnswer,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatRequest,
    Completion,
    CompletionChoice,
    CompletionRequest,
    ErrorBody,
    ModelCard,
    ModelList,
    Sampling,
    Usage,
)
from peftkit_serve.http.service import Service
from peftkit_serve.http.sse import CLIENT_GONE, DONE, EventStream, event, merge, while_connected
from peftkit_serve.request import RequestOutput

ERRORS: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": ErrorBody, "description": "The request can't be answered as it is; `param` names the field."},
    "5XX": {"model": ErrorBody, "description": "The server failed, or is going away (503)."},
}
_EVENTS: dict[int | str, dict[str, Any]] = {
    200: {
        "content": {"text/event-stream": {"schema": {"type": "string"}}},
        "description": "The answer; with `stream`, events with a chunk each, and `data: [DONE]` at the end.",
    }
}

Streams = Sequence[AsyncGenerator[RequestOutput, None]]


class Form(Protocol):
    """How one of the two routes words an answer. `head` is what its bodies begin with: id, created, model."""

    def whole(self, head: dict[str, Any], outputs: Sequence[RequestOutput]) -> BaseModel:
        """The body of an answer that isn't streamed, from each choice's last output."""
        ...

    def chunk(self, head: dict[str, Any], index: int, output: RequestOutput, *, first: bool) -> BaseModel:
        """The next piece of a choice."""
        ...

    def usage(self, head: dict[str, Any], usage: Usage) -> BaseModel:
        """The chunk that ends a stream when the client asked for token counts."""
        ...


class TextForm:
    """`/v1/completions`."""

    def whole(self, head: dict[str, Any], outputs: Sequence[RequestOutput]) -> Completion:
        choices = [
            CompletionChoice(index=i, text=output.text, finish_reason=output.finish_reason)
            for i, output in enumerate(outputs)
        ]
        return Completion(**head, choices=choices, usage=count_tokens(outputs))

    def chunk(self, head: dict[str, Any], index: int, output: RequestOutput, *, first: bool) -> Completion:
        choice = CompletionChoice(index=index, text=output.delta, finish_reason=output.finish_reason)
        return Completion(**head, choices=[choice])

    def usage(self, head: dict[str, Any], usage: Usage) -> Completion:
        return Completion(**head, choices=[], usage=usage)


class ChatForm:
    """`/v1/chat/completions`."""

    def whole(self, head: dict[str, Any], outputs: Sequence[RequestOutput]) -> ChatCompletion:
        choices = [
            ChatChoice(index=i, message=ChatAnswer(content=output.text), finish_reason=output.finish_reason)
            for i, output in enumerate(outputs)
        ]
        return ChatCompletion(**head, choices=choices, usage=count_tokens(outputs))

    def chunk(self, head: dict[str, Any], index: int, output: RequestOutput, *, first: bool) -> ChatChunk:
        delta = ChatDelta(role="assistant" if first else None, content=output.delta if first or output.delta else None)
        return ChatChunk(
            **head, choices=[ChatChunkChoice(index=index, delta=delta, finish_reason=output.finish_reason)]
        )

    def usage(self, head: dict[str, Any], usage: Usage) -> ChatChunk:
        return ChatChunk(**head, choices=[], usage=usage)


def count_tokens(outputs: Sequence[RequestOutput]) -> Usage:
    """Token counts of a request, from each choice's last output."""
    prompt = sum(output.num_prompt_tokens for output in outputs)
    generated = sum(len(output.token_ids) for output in outputs)
    return Usage(prompt_tokens=prompt, completion_tokens=generated, total_tokens=prompt + generated)


def create_router(service: Service) -> APIRouter:
    """The routes under `/v1`, answered by `service`."""
    router = APIRouter(prefix="/v1", tags=["OpenAI"], responses=ERRORS)

    @router.post("/chat/completions", response_model=ChatCompletion, responses=_EVENTS)
    async def chat_completions(body: ChatRequest, request: Request) -> BaseModel | Response:
        """The assistant's next message, worded by the adapter's own chat template, else the base's."""
        model = service.model(body.model)
        prompt = await service.chat_prompt(model, [message.for_template() for message in body.messages])
        params = body.sampling_params(max_tokens=model.room, room=model.room - len(prompt))
        streams = [service.generate(model, prompt, params, request.state.facts)]
        return await _answer(request, body, streams, ChatForm(), "chatcmpl")

    @router.post("/completions", response_model=Completion, responses=_EVENTS)
    async def completions(body: CompletionRequest, request: Request) -> BaseModel | Response:
        """The continuation of each prompt, one choice a prompt."""
        model = service.model(body.model)
        prompts = [await service.text_prompt(model, prompt) for prompt in body.prompts()]
        streams = [
            service.generate(
                model, prompt, body.sampling_params(max_tokens=16, room=model.room - len(prompt)), request.state.facts
            )
            for prompt in prompts
        ]
        return await _answer(request, body, streams, TextForm(), "cmpl")

    @router.get("/models")
    async def models() -> ModelList:
        """The base, then its adapters."""
        return ModelList(data=service.cards())

    @router.get("/models/{model:path}")
    async def model(model: str) -> ModelCard:
        """One name that `model` may have."""
        return service.card(model)

    return router


async def _answer(request: Request, body: Sampling, streams: Streams, form: Form, prefix: str) -> BaseModel | Response:
    head = {"id": f"{prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": body.model}
    if body.stream:
        return EventStream(_events(streams, form, head, body.include_usage, request.state.request_id))
    try:
        outputs = await while_connected(_last_outputs(streams), request.receive)
    except ClientDisconnect:
        return Response(status_code=CLIENT_GONE)
    return form.whole(head, outputs)


async def _last_outputs(streams: Streams) -> list[RequestOutput]:
    last: dict[int, RequestOutput] = {}
    async with aclosing(merge(streams)) as merged:
        async for index, output in merged:
            last[index] = output
    return [last[index] for index in range(len(streams))]


async def _events(
    streams: Streams, form: Form, head: dict[str, Any], include_usage: bool, request_id: str
) -> AsyncGenerator[str, None]:
    """The events of a streamed answer. An error after the first one is an event too, the last before [DONE]."""
    last: dict[int, RequestOutput] = {}
    unused = None if include_usage else {"usage"}
    try:
        async with aclosing(merge(streams)) as merged:
            async for index, output in merged:
                first = index not in last
                last[index] = output
                if first or output.delta or output.finish_reason:
                    chunk = form.chunk(head, index, output, first=first)
                    yield event(chunk.model_dump_json(exclude=unused))
        if include_usage:
            yield event(form.usage(head, count_tokens(list(last.values()))).model_dump_json())
    except Exception as error:
        if not last:
            raise
        answer = error if isinstance(error, ApiError) else report(error, request_id)
        yield event(answer.json())
    yield DONE
