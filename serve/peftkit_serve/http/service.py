"""What the routes ask for, between HTTP and the engine: names, prompts as token ids, and a request's outputs."""

import copy
import logging
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import Any

from starlette.concurrency import run_in_threadpool
from transformers import PreTrainedTokenizerBase

from peftkit.chat import encode_prompt, render_chat
from peftkit.errors import InputError, PeftkitError, RunError
from peftkit_serve.async_engine import AsyncEngine
from peftkit_serve.http import errors
from peftkit_serve.http.errors import ApiError
from peftkit_serve.http.metrics import Metrics
from peftkit_serve.http.schemas import ModelCard
from peftkit_serve.request import Request, RequestOutput, SamplingParams

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Model:
    """What a client's `model` names."""

    name: str
    adapter: str | None
    """None: the bare base."""
    root: str
    """The folder that the adapter was read from; the base's name."""
    room: int
    """Most tokens of prompt and answer together."""
    tokenizer: PreTrainedTokenizerBase
    """The base's, with the adapter's own chat template where it has one."""


class Service:
    """One engine behind HTTP. `draining` refuses new requests while the running ones end."""

    def __init__(self, engine: AsyncEngine, served_name: str) -> None:
        self.engine = engine
        self.served_name = served_name
        self.metrics = Metrics(engine, served_name)
        self.draining = False
        self._created = int(time.time())
        # the first call settles the tokenizer's padding and truncation, which threads may not do at the same time
        encode_prompt(engine.engine.tokenizer, "ready")

    @property
    def ready(self) -> bool:
        """Whether a new request would be taken."""
        return self.engine.alive and not self.draining

    def names(self) -> list[str]:
        """What `model` may be: the base's name, then the adapters' in order."""
        return [self.served_name, *sorted(self.engine.engine.adapters.names())]

    def model(self, name: str) -> Model:
        """The base by its name, an adapter by its own or by `base:name`. Raises 404 for any other name."""
        engine = self.engine.engine
        if name == self.served_name:
            return Model(name, None, self.served_name, engine.room(), engine.tokenizer)
        adapter = name if name in engine.adapters.names() else name.removeprefix(f"{self.served_name}:")
        try:
            entry, room = engine.adapters.get(adapter), engine.room(adapter)
        except InputError:
            raise errors.model_not_found(name, self.names()) from None
        return Model(name, adapter, str(entry.path), room, _with_template(engine.tokenizer, entry.record))

    def cards(self) -> list[ModelCard]:
        """All names, the base first."""
        cards: list[ModelCard] = []
        for name in self.names():
            with suppress(ApiError):  # removed since it was listed
                cards.append(self.card(name))
        return cards

    def card(self, name: str) -> ModelCard:
        """How `/v1/models` shows a name. Raises 404 for an unknown one."""
        model = self.model(name)
        parent = None if model.adapter is None else self.served_name
        return ModelCard(id=name, created=self._created, root=model.root, parent=parent, max_model_len=model.room)

    async def chat_prompt(self, model: Model, messages: Sequence[dict[str, str]]) -> list[int]:
        """Token ids of a conversation up to the assistant's next message. Raises 400 naming `messages`."""
        if not model.tokenizer.chat_template:
            message = (
                f"{model.name!r} has no chat template: send the text to /v1/completions, or name an adapter "
                "that was trained with a chat template"
            )
            raise ApiError(400, message, param="messages", code="no_chat_template")
        try:
            token_ids = await run_in_threadpool(render_chat, model.tokenizer, messages)
        except PeftkitError:
            raise
        except Exception as error:  # a template is a program that came with the adapter: it may raise anything
            logger.warning({"model": model.name, "chat_template_failed": type(error).__name__})
            message = f"the chat template of {model.name!r} fails on these messages ({type(error).__name__})"
            raise ApiError(400, message, param="messages", code="invalid_value") from None
        return self._fitting(model, token_ids, "messages")

    async def text_prompt(self, model: Model, prompt: str | list[int]) -> list[int]:
        """Token ids of a text, or the ids themselves, checked to fit. Raises 400 naming `prompt`."""
        if isinstance(prompt, str):
            prompt = await run_in_threadpool(encode_prompt, model.tokenizer, prompt)
        return self._fitting(model, prompt, "prompt")

    async def generate(
        self, model: Model, prompt: list[int], params: SamplingParams, facts: dict[str, Any]
    ) -> AsyncGenerator[RequestOutput, None]:
        """A request's outputs. Closing the iteration ends the request within a step; `facts` get its counts.

        Raises InputError for what the engine refuses, 500 when it fails, 503 when it is going away.
        """
        if not self.ready:
            raise errors.unavailable("the server takes no new requests: it is starting or going away")
        request = Request(prompt=prompt, adapter=model.adapter, sampling=params)
        track = self.metrics.track(model.adapter)
        try:
            with track:
                async with aclosing(self.engine.generate(request)) as outputs:
                    async for output in outputs:
                        track.output(output)
                        _raise_failure(output)
                        yield output
        except RunError as error:
            raise errors.unavailable(str(error)) from None
        except InputError as error:
            if error.field == "model":  # removed since the name was looked up
                raise errors.model_not_found(model.name, self.names()) from None
            raise
        finally:
            facts["model"], facts["outcome"] = model.name, track.outcome
            facts["prompt_tokens"] = facts.get("prompt_tokens", 0) + track.num_prompt_tokens
            facts["completion_tokens"] = facts.get("completion_tokens", 0) + track.num_tokens

    def _fitting(self, model: Model, token_ids: list[int], field: str) -> list[int]:
        if not token_ids:
            raise ApiError(400, f"{field} has no tokens: send at least one", param=field, code="invalid_value")
        if len(token_ids) >= model.room:
            raise errors.context_length_exceeded(len(token_ids), model.room, field)
        return token_ids


def _raise_failure(output: RequestOutput) -> None:
    if output.finish_reason == "error":
        raise ApiError(500, output.error or "the engine failed", code="engine_error")
    if output.finish_reason == "abort":
        raise errors.unavailable("the server stopped before the answer was complete")


def _with_template(tokenizer: PreTrainedTokenizerBase, record: dict[str, Any]) -> PreTrainedTokenizerBase:
    """The tokenizer with the chat template that an adapter's record carries; itself where there is none."""
    template = record.get("chat_template")
    text = template.get("text") if isinstance(template, dict) else None
    if not isinstance(text, str) or not text:
        return tokenizer
    own = copy.copy(tokenizer)  # shares the vocabulary: nothing but the template differs
    own.chat_template = text
    return own
