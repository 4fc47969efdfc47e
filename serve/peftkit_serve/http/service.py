"""What the routes ask for, between HTTP and the engine: names, prompts as token ids, and answers' outputs."""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from starlette.concurrency import run_in_threadpool
from transformers import PreTrainedTokenizerBase

from peftkit.artifact.files import RECORD_FILE, read_json
from peftkit.chat import encode_prompt, encode_rendered, render_text
from peftkit.errors import InputError, PeftkitError, RunError
from peftkit_serve.adapters.store import AdapterEntry
from peftkit_serve.async_engine import ServedEngine
from peftkit_serve.http import errors
from peftkit_serve.http.access import Caller
from peftkit_serve.http.answers import ModelCard
from peftkit_serve.http.errors import ApiError
from peftkit_serve.http.metrics import Metrics
from peftkit_serve.http.settings import Settings
from peftkit_serve.http.sse import merge
from peftkit_serve.request import Request, RequestOutput, SamplingParams
from peftkit_serve.templates.renderer import TemplateError, Templates, TextTooLong
from peftkit_serve.tenants.admission import Admission, Visit
from peftkit_serve.tenants.catalog import Catalog, Chosen
from peftkit_serve.tenants.content import template_of

logger = logging.getLogger(__name__)

_LONG_TEXT = 2**16
"""Characters above which a text waits for its turn: a token takes more than 100 bytes until all are known."""
_MAX_LONG_TEXTS = 2
"""Such texts at a time."""

Outputs = AsyncGenerator[tuple[int, RequestOutput], None]
"""The outputs of a request's answers as they come, each with its answer's index."""


@dataclass(frozen=True, slots=True)
class Model:
    """What a client's `model` names."""

    name: str
    label: str
    """The adapter's own name, or the base's: for metrics and logs."""
    static: str | None
    """The engine's name of an adapter that the server was started with."""
    chosen: Chosen | None
    """An adapter of the catalog; with neither it is the bare base."""
    root: str
    """The folder that the adapter was read from; its content's hash; the base's name."""
    room: int
    """Most tokens of prompt and answer together."""
    template: str | None = None
    """The adapter's own chat template, which isn't the base's."""

    @property
    def full_name(self) -> str:
        """The label with the version that was chosen."""
        return self.label if self.chosen is None else f"{self.label}@{self.chosen.version.number}"


@dataclass(frozen=True, slots=True)
class Asked:
    """One answer that is wanted."""

    prompt: list[int]
    params: SamplingParams


class Service:
    """One engine behind HTTP. `draining` refuses new requests while the running ones end."""

    def __init__(
        self, engine: ServedEngine, served_name: str, catalog: Catalog, templates: Templates, settings: Settings
    ) -> None:
        self.engine = engine
        self.served_name = served_name
        self.catalog = catalog
        self._templates = templates
        self.settings = settings
        self.admission = Admission(max_waiting=settings.max_waiting)
        self.metrics = Metrics(engine, served_name, catalog)
        self.draining = False
        self._static = {entry.name: _template_in(entry.path) for entry in self.static_entries()}
        """Name → chat template, from its own folder: adapters of the same weights are one in the engine."""
        self.created = int(time.time())
        """When the server began, in seconds since 1970."""
        # the first call settles the tokenizer's padding and truncation, which threads may not do at the same time
        encode_prompt(engine.tokenizer, "ready")
        self._longest_token = max(map(len, engine.tokenizer.get_vocab()), default=1)
        """Most characters that a token stands for."""
        self._long_texts = asyncio.Semaphore(_MAX_LONG_TEXTS)

    @property
    def ready(self) -> bool:
        """Whether a new request would be taken."""
        return self.engine.alive and not self.draining

    async def start_templates(self) -> None:
        """Starts what renders adapters' own chat templates, where there are any: else the first request does."""
        kept = (version.template for version in self.catalog.all_versions())
        if any(map(self._templates.own, (*self._static.values(), *kept))):
            await self._templates.start()

    def static_entries(self) -> list[AdapterEntry]:
        """The adapters that the server was started with, by name."""
        adapters = self.engine.adapters
        names = [name for name in adapters.names() if self.catalog.shelf.digest_of(name) == name]
        return [adapters.get(name) for name in sorted(names)]

    def names(self, caller: Caller) -> list[str]:
        """What `model` may be: the base's name, then the adapters' in order."""
        static = [name for name in self._static if caller.tenant is None or caller.tenant.may_name(name)]
        own = [adapter.name for adapter in self.catalog.visible(caller.tenant)]
        return [self.served_name, *sorted({*static, *own})]

    def model(self, caller: Caller, name: str) -> Model:
        """The base by its name, an adapter by its own, by `name@version` or by `base:name`. Raises 404."""
        model = self._find(caller, name)
        if model is None:
            raise errors.model_not_found(name, self.names(caller))
        return model

    def cards(self, caller: Caller) -> list[ModelCard]:
        """All names, the base first."""
        models = [self._find(caller, name) for name in self.names(caller)]
        return [self._card(model) for model in models if model is not None]  # else it has gone since it was listed

    def card(self, caller: Caller, name: str) -> ModelCard:
        """How `/v1/models` shows a name. Raises 404 for an unknown one."""
        return self._card(self.model(caller, name))

    async def chat_prompt(
        self, model: Model, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()
    ) -> list[int]:
        """Token ids of a conversation up to the assistant's next message. Raises 400 naming the field."""
        tokenizer = self.engine.tokenizer
        if not (model.template or tokenizer.chat_template):
            message = (
                f"{model.name!r} has no chat template: send the text to /v1/completions, or name an adapter "
                "that was trained with a chat template"
            )
            raise ApiError(400, message, param="messages", code="no_chat_template")
        try:
            if model.template is not None:
                text = await self._own_text(model, model.template, messages, tools)
            else:
                text = await run_in_threadpool(lambda: render_text(tokenizer, messages, tools=tools or None))
            token_ids = await self._token_ids(model, text, "messages", encode_rendered)
        except (PeftkitError, ApiError):
            raise
        except Exception as error:  # the base's template is a program too: it may raise anything
            raise _template_failed(model, type(error).__name__) from None
        return self._fitting(model, token_ids, "messages")

    async def text_prompt(self, model: Model, prompt: str | list[int]) -> list[int]:
        """Token ids of a text, or the ids themselves, checked to fit. Raises 400 naming `prompt`."""
        if isinstance(prompt, str):
            prompt = await self._token_ids(model, prompt, "prompt", encode_prompt)
        return self._fitting(model, prompt, "prompt")

    async def check_schema(self, schema: str | None) -> None:
        """Refuses a schema that can't be kept, before anything is queued. Raises 400 naming `response_format`."""
        if schema is not None:
            try:
                await self.engine.check_schema(schema)
            except InputError as error:
                raise ApiError(400, str(error), param="response_format", code="invalid_value") from None
            except RunError as error:
                raise errors.unavailable(str(error)) from None

    async def answers(
        self, caller: Caller, model: Model, asked: Sequence[Asked], priority: int, facts: dict[str, Any]
    ) -> Outputs:
        """The outputs of all answers as they come, each with its answer's index; `facts` get their counts.

        Closing the iteration ends them all within a step. Raises Refusal over a limit, 404 for an adapter that has
        gone meanwhile, InputError for what the engine refuses, 500 when it fails, 503 when it is going away.
        """
        if not self.ready:
            raise errors.unavailable("the server takes no new requests: it is starting or going away")
        prompts = {id(one.prompt): one.prompt for one in asked}  # which several answers share
        tokens = sum(map(len, prompts.values()))
        with self.admission.enter(caller.name, caller.limits, answers=len(asked), prompt_tokens=tokens) as visit:
            async with AsyncExitStack() as stack:
                adapter = model.static
                if model.chosen is not None:
                    start = time.monotonic()
                    try:
                        entry = await stack.enter_async_context(self.catalog.shelf.hold(model.chosen.version.digest))
                    except InputError as error:
                        logger.warning({"model": model.label, "not_loaded": type(error).__name__})
                        raise errors.model_not_found(model.name, self.names(caller)) from None
                    adapter = entry.name
                    facts["adapter_ms"] = round(1000 * (time.monotonic() - start), 1)
                requests = [
                    Request(
                        prompt=one.prompt,
                        adapter=adapter,
                        sampling=one.params,
                        tenant=caller.name,
                        weight=caller.limits.weight,
                        priority=priority,
                    )
                    for one in asked
                ]
                streams = [self._outputs(caller, model, request, visit, facts) for request in requests]
                merged = await stack.enter_async_context(aclosing(merge(streams)))
                async for item in merged:
                    yield item

    async def _outputs(
        self, caller: Caller, model: Model, request: Request, visit: Visit, facts: dict[str, Any]
    ) -> AsyncGenerator[RequestOutput, None]:
        """One answer's outputs, each told to metrics and to the tenant's account."""
        track = self.metrics.track(caller.name, model.label)
        expiry = _Expiry(lambda: self.engine.abort(request.request_id), self.settings)
        try:
            with track, expiry:
                async with aclosing(self.engine.generate(request)) as outputs:
                    async for output in outputs:
                        if not track.num_tokens and output.token_ids:
                            visit.started()
                            expiry.first_token()
                        visit.generated(len(output.token_ids) - track.num_tokens)
                        track.output(output)
                        _raise_failure(output, expiry)
                        yield output
        except RunError as error:
            raise errors.unavailable(str(error)) from None
        except InputError as error:
            if error.field == "model":  # removed since the name was looked up
                raise errors.model_not_found(model.name, self.names(caller)) from None
            raise
        finally:
            facts["model"], facts["outcome"] = model.label, track.outcome
            facts["prompt_tokens"] = facts.get("prompt_tokens", 0) + track.num_prompt_tokens
            facts["completion_tokens"] = facts.get("completion_tokens", 0) + track.num_tokens

    def _card(self, model: Model) -> ModelCard:
        parent = None if model.root == self.served_name else self.served_name
        return ModelCard(id=model.name, created=self.created, root=model.root, parent=parent, max_model_len=model.room)

    def _find(self, caller: Caller, name: str) -> Model | None:
        if name == self.served_name:
            return Model(name, name, None, None, name, self.engine.room())
        model = self._adapter(caller, name)
        if model is None and name.startswith(f"{self.served_name}:"):
            model = self._adapter(caller, name.removeprefix(f"{self.served_name}:"))
        return None if model is None else replace(model, name=name)

    def _adapter(self, caller: Caller, name: str) -> Model | None:
        if chosen := self.catalog.choose(caller.tenant, name):
            version = chosen.version
            room, template = self.engine.room(version.num_virtual), self._templates.own(version.template)
            return Model(name, chosen.adapter.name, None, chosen, version.digest, room, template)
        if name not in self._static or (caller.tenant is not None and not caller.tenant.may_name(name)):
            return None
        try:
            entry = self.engine.adapters.get(name)
        except InputError:  # removed since the server began
            return None
        room = self.engine.room(entry.num_virtual)
        return Model(name, name, name, None, str(entry.path), room, self._templates.own(self._static[name]))

    async def _own_text(
        self, model: Model, template: str, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
    ) -> str:
        """A conversation by an adapter's own template. Raises 400 for one that fails, takes too much or can't fit."""
        try:
            return await self._templates.render(template, messages, tools, max_chars=self._max_chars(model))
        except TextTooLong as error:
            raise errors.text_too_long(error.num_chars, model.room, "messages") from None
        except TemplateError as error:
            raise _template_failed(model, error.kind) from None

    async def _token_ids(
        self, model: Model, text: str, field: str, encode: Callable[[PreTrainedTokenizerBase, str], list[int]]
    ) -> list[int]:
        """Token ids of a text that may fit. Raises 400 for one that can't, before time and memory go into it."""
        if len(text) > self._max_chars(model):
            raise errors.text_too_long(len(text), model.room, field)
        async with self._long_texts if len(text) > _LONG_TEXT else nullcontext():
            return await run_in_threadpool(encode, self.engine.tokenizer, text)

    def _max_chars(self, model: Model) -> int:
        return self._longest_token * model.room

    def _fitting(self, model: Model, token_ids: list[int], field: str) -> list[int]:
        if not token_ids:
            raise ApiError(400, f"{field} has no tokens: send at least one", param=field, code="invalid_value")
        if len(token_ids) >= model.room:
            raise errors.context_length_exceeded(len(token_ids), model.room, field)
        return token_ids


class _Expiry:
    """Ends a request that waits, or takes, too long."""

    def __init__(self, end: Callable[[], None], settings: Settings) -> None:
        self._end, self._settings = end, settings
        self._timers: list[asyncio.TimerHandle] = []
        self.reason: str | None = None
        """Why it was ended."""

    def __enter__(self) -> "_Expiry":
        loop = asyncio.get_running_loop()
        queue_s, request_s = self._settings.queue_timeout_s, self._settings.request_timeout_s
        self._timers = [
            loop.call_later(queue_s, self._expire, f"the request waited {queue_s:g} s for its first token"),
            loop.call_later(request_s, self._expire, f"the request took more than {request_s:g} s"),
        ]
        return self

    def first_token(self) -> None:
        """It waits no more."""
        self._timers[0].cancel()

    def __exit__(self, *_: object) -> None:
        for timer in self._timers:
            timer.cancel()

    def _expire(self, reason: str) -> None:
        self.reason = reason
        self._end()


def _raise_failure(output: RequestOutput, expiry: _Expiry) -> None:
    if output.finish_reason == "error":
        raise ApiError(500, output.error or "the engine failed", code="engine_error")
    if output.finish_reason == "abort" and expiry.reason is not None:
        raise errors.timed_out(expiry.reason)
    if output.finish_reason == "abort":
        raise errors.unavailable("the server stopped before the answer was complete")


def _template_in(folder: Path) -> str | None:
    return template_of(read_json(folder / RECORD_FILE)) if (folder / RECORD_FILE).exists() else None


def _template_failed(model: Model, kind: str) -> ApiError:
    """The log has the kind alone: what an exception says may quote a prompt."""
    logger.warning({"model": model.label, "chat_template_failed": kind})
    message = f"the chat template of {model.name!r} fails on these messages ({kind})"
    return ApiError(400, message, param="messages", code="invalid_value")
