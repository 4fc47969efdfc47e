"""The OpenAI-compatible routes: chat and text completions, whole or streamed, and the names that `model` may have."""

import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from fastapi import APIRouter, Depends, Request
from pydantic import BaseModel
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from peftkit.errors import InputError
from peftkit_serve.http.access import Access, Caller, bearer
from peftkit_serve.http.answers import ChatCompletion, Completion, ErrorBody, ModelCard, ModelList
from peftkit_serve.http.body import StrictRoute
from peftkit_serve.http.errors import ApiError, from_input
from peftkit_serve.http.forms import ChatForm, Form, TextForm
from peftkit_serve.http.guard import report
from peftkit_serve.http.pieces import Pieces
from peftkit_serve.http.schemas import ChatRequest, CompletionRequest, Sampling
from peftkit_serve.http.service import Asked, Model, Outputs, Service
from peftkit_serve.http.sse import CLIENT_GONE, DONE, EventStream, event, while_connected
from peftkit_serve.http.tracing import Tracing
from peftkit_serve.request import RequestOutput, SamplingParams

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


def create_router(service: Service, access: Access, tracing: Tracing | None = None) -> APIRouter:
    """The routes under `/v1`, answered by `service` and traced where there is `tracing`."""
    router = APIRouter(
        prefix="/v1", tags=["OpenAI"], responses=ERRORS, route_class=StrictRoute, dependencies=[Depends(bearer)]
    )

    @router.post("/chat/completions", response_model=ChatCompletion, responses=_EVENTS)
    async def chat_completions(
        body: ChatRequest, request: Request, caller: Caller = Depends(access.caller)
    ) -> BaseModel | Response:
        """The assistant's next message, worded by the adapter's own chat template, else the base's."""
        model = service.model(caller, body.model)
        messages = [message.for_template() for message in body.messages]
        prompt = await service.chat_prompt(model, messages, body.shown_tools())
        params = _params(body, model, prompt, max_tokens=model.room)
        await service.check_schema(params.json_schema)
        asked = [Asked(prompt, _nth(params, i)) for i in range(body.num_choices)]
        outputs = service.answers(caller, model, asked, body.priority or 0, request.state.facts)
        if tracing is not None:
            outputs = tracing.begin("chat", body, request, model.full_name, len(prompt)).follow(outputs)
        return await _answer(request, body, outputs, ChatForm(body, service.engine.vocabulary), "chatcmpl")

    @router.post("/completions", response_model=Completion, responses=_EVENTS)
    async def completions(
        body: CompletionRequest, request: Request, caller: Caller = Depends(access.caller)
    ) -> BaseModel | Response:
        """The continuation of each prompt, `n` choices a prompt."""
        model = service.model(caller, body.model)
        vocabulary = service.engine.vocabulary
        prompts: list[tuple[str, list[int]]] = []
        asked: list[Asked] = []
        for given in body.prompts():
            token_ids = await service.text_prompt(model, given)
            text = given if isinstance(given, str) else vocabulary.text(token_ids, special=True) if body.echo else ""
            prompts.append((text, token_ids))
            params = _params(body, model, token_ids, max_tokens=16)
            asked += [Asked(token_ids, _nth(params, i)) for i in range(body.num_choices)]
        outputs = service.answers(caller, model, asked, body.priority or 0, request.state.facts)
        if tracing is not None:
            num_tokens = sum(len(token_ids) for _, token_ids in prompts)
            outputs = tracing.begin("text_completion", body, request, model.full_name, num_tokens).follow(outputs)
        return await _answer(request, body, outputs, TextForm(body, prompts, vocabulary), "cmpl")

    @router.get("/models")
    async def models(caller: Caller = Depends(access.caller)) -> ModelList:
        """The base, then the adapters that the caller can name."""
        return ModelList(data=service.cards(caller))

    @router.get("/models/{model:path}")
    async def model(model: str, caller: Caller = Depends(access.caller)) -> ModelCard:
        """One name that `model` may have."""
        return service.card(caller, model)

    return router


def _params(body: Sampling, model: Model, prompt: list[int], *, max_tokens: int) -> SamplingParams:
    return body.sampling_params(max_tokens=max_tokens, room=model.room - len(prompt))


def _nth(params: SamplingParams, index: int) -> SamplingParams:
    """The parameters of a prompt's i-th answer: with a seed each has its own."""
    if params.seed is None or index == 0:
        return params
    return replace(params, seed=params.seed + index)


async def _answer(request: Request, body: Sampling, outputs: Outputs, form: Form, prefix: str) -> BaseModel | Response:
    head = {"id": f"{prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": body.model}
    if body.stream:
        return EventStream(_events(outputs, form, head, body.include_usage, request.state.request_id))
    try:
        last = await while_connected(_last_outputs(outputs), request.receive)
    except ClientDisconnect:
        return Response(status_code=CLIENT_GONE)
    return form.whole(head, last)


async def _last_outputs(outputs: Outputs) -> list[RequestOutput]:
    last: dict[int, RequestOutput] = {}
    async with aclosing(outputs):
        async for index, output in outputs:
            last[index] = output
    return [last[index] for index in sorted(last)]


async def _events(
    outputs: Outputs, form: Form, head: dict[str, Any], include_usage: bool, request_id: str
) -> AsyncGenerator[str, None]:
    """The events of a streamed answer. An error after the first one is an event too, the last before [DONE]."""
    last: dict[int, RequestOutput] = {}
    pieces = Pieces(form, head, None if include_usage else {"usage"})
    try:
        async with aclosing(outputs):
            async for index, output in outputs:
                last[index] = output
                if chunk := pieces.next(index, output):
                    yield event(chunk)
        if include_usage:
            yield event(form.usage(head, [last[index] for index in sorted(last)]).model_dump_json())
    except Exception as error:
        if not last:
            raise
        if isinstance(error, InputError):
            error = from_input(error)
        answer = error if isinstance(error, ApiError) else report(error, request_id)
        yield event(answer.json())
    yield DONE
