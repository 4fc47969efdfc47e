"""The engine: requests in, outputs out, one `step` at a time.

A step is three calls: the scheduler plans which tokens are computed, the runner computes them and draws, the
scheduler books what was drawn. On a GPU the next step is planned and started before the last one is booked, so that
the host works while the device does:

    host     plan 1  start 1 | plan 2  start 2  book 1 | plan 3  start 3  book 2 | …
    device                   step 1 ──────────── step 2 ──────────── step 3 ────

A request that ends with a step is computed once more in the one that is under way, and that is dropped.

One thread drives an engine; `AsyncEngine` is that thread for a server.
"""

import logging
import secrets
from collections import Counter
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypedDict

from transformers import PreTrainedTokenizerFast

from peftkit.base import BaseInfo, Quant, load_tokenizer, resolve_base
from peftkit.chat import encode_prompt
from peftkit.errors import InputError, RunError
from peftkit_serve.adapters.loader import AdapterLoader
from peftkit_serve.adapters.pool import AdapterPool
from peftkit_serve.adapters.store import AdapterStore
from peftkit_serve.detokenizer import Detokenizer
from peftkit_serve.grammar import Grammars
from peftkit_serve.models.spec import ModelSpec
from peftkit_serve.models.weights import OpenSource
from peftkit_serve.pages import PageAllocator
from peftkit_serve.plan import UNKNOWN, Chunk, StepPlan, StepResult
from peftkit_serve.request import FinishReason, Request, RequestOutput, TokenLogprobs
from peftkit_serve.runner import Launched, Runner
from peftkit_serve.scheduler import Policy, Scheduler
from peftkit_serve.scheduler import Sequence as Live
from peftkit_serve.vocabulary import Vocabulary

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Scores:
    """Log-probabilities that a request asked for, as far as it has come."""

    generated: list[TokenLogprobs] = field(default_factory=list[TokenLogprobs])
    prompt: list[TokenLogprobs] = field(default_factory=list[TokenLogprobs])


@dataclass(frozen=True, slots=True)
class _UnderWay:
    """A step that was started and is not booked."""

    plan: StepPlan
    result: Launched | StepResult


class EngineStats(TypedDict):
    """Counts at one moment; what only grows is counted since the engine was made."""

    requests_running: int
    requests_waiting: int
    adapters: int
    """Registered names."""
    adapters_resident: int
    """On the device, of any kind."""
    adapter_slots: int
    """LoRA and bottleneck adapters that can be resident at a time."""
    running_adapters: list[str]
    """Uids of the adapters of running requests."""
    waiting_adapters: list[str]
    pages_total: int
    pages_free: int
    pages_used: int
    weight_bytes: int
    kv_bytes: int
    """KV pages, adapter memory, the largest step and graphs share one budget: see `MemorySplit`."""
    adapter_capacity_bytes: int
    step_bytes: int
    graph_bytes: int
    adapter_bytes: int
    """Adapter memory in use."""
    steps: int
    preemptions: int
    prompt_tokens: int
    """Of requests that were accepted."""
    cached_tokens: int
    """Not computed, because pages held them already."""
    generated_tokens: int


class Engine:
    """Generates for many requests at once over one frozen base, each with an adapter of its own or none.

    base: what `resolve_base` takes, or what it returned; its weights may be in NF4 already, then `quant` is "nf4".
    max_tokens_per_step: token budget of a step, prompts and generated tokens together.
    max_requests: most requests in a step; others wait.
    max_adapters: LoRA and bottleneck adapters on the device at a time; any number can be registered.
    num_pages: KV memory in pages of 16 tokens; None takes what the device's memory leaves.
    adapter_bytes: memory of these adapters on the device; None takes room for `max_adapters` LoRAs of rank 64 and both
        embeddings, whole, of one.
    deterministic: a request's tokens don't depend on what else is in its batch, at some cost in speed.
    graphs: steps up to some size run as CUDA graphs; None does so on a GPU.
    overlap: a step starts before the last one's tokens are known to the host; None does so on a GPU.
    prefix_cache: what was computed for an adapter, a tenant and tokens is kept while there is room, for who begins so.
    policy: whose turn it is among waiting requests; None for the highest priority, then the first to come.
    source: the base's tensors, where they don't come from its folder.

    Raises BaseModelError for a base that can't be served, InputError for a bad number, RunError when the device has too
    little memory.
    """

    def __init__(
        self,
        base: str | Path | BaseInfo,
        *,
        quant: Quant = "none",
        device: str = "auto",
        max_tokens_per_step: int = 512,
        max_requests: int = 64,
        max_adapters: int = 16,
        num_pages: int | None = None,
        adapter_bytes: int | None = None,
        deterministic: bool = False,
        graphs: bool | None = None,
        overlap: bool | None = None,
        prefix_cache: bool = True,
        policy: Policy | None = None,
        source: OpenSource | None = None,
    ) -> None:
        _check_at_least_one(max_requests=max_requests, max_adapters=max_adapters)
        self.base = base if isinstance(base, BaseInfo) else resolve_base(base, nf4=True)
        self.tokenizer = load_tokenizer(self.base)
        self._runner = Runner(
            self.base,
            quant=quant,
            device=device,
            max_tokens_per_step=max_tokens_per_step,
            max_requests=max_requests,
            num_slots=max_adapters,
            num_pages=num_pages,
            adapter_bytes=adapter_bytes,
            deterministic=deterministic,
            graphs=graphs,
            source=source,
        )
        self.spec: ModelSpec = self._runner.spec
        self._pages = PageAllocator(self._runner.num_pages)
        self._pool = AdapterPool(self._runner.memory, self._pages, self._runner, num_slots=max_adapters)
        self._scheduler = Scheduler(
            self._pages,
            self._pool,
            max_tokens_per_step=max_tokens_per_step,
            max_requests=max_requests,
            prefix_cache=prefix_cache,
            policy=policy,
        )
        self.adapters = AdapterStore(self._loader(), self._pool)
        self._overlap = self._runner.on_gpu if overlap is None else overlap
        self._under_way: _UnderWay | None = None
        assert isinstance(self.tokenizer, PreTrainedTokenizerFast)
        self.vocabulary = Vocabulary(self.tokenizer.backend_tokenizer)
        eos = self.tokenizer.eos_token_id
        self._eos = {*self.spec.eos_token_ids, *([eos] if isinstance(eos, int) else [])}
        self.grammars = Grammars(self.tokenizer, self.spec.vocab_size, eos if isinstance(eos, int) else None)
        self._texts: dict[str, Detokenizer] = {}
        self._scores: dict[str, Scores] = {}
        self._num_steps = self._num_prompt_tokens = self._num_generated_tokens = 0

    def room(self, adapter: str | None = None) -> int:
        """Most tokens that a request's prompt and answer may have together, with an adapter's virtual tokens off.

        Raises InputError (field "model") for an unknown adapter.
        """
        return self._room(0 if adapter is None else self.adapters.find(adapter).num_virtual)

    def room_behind(self, num_virtual: int) -> int:
        """The same for an adapter of so many virtual tokens, which need not be loaded."""
        return self._room(num_virtual)

    def add_request(self, request: Request) -> str:
        """Queues a request and returns its id. `max_tokens` is cut to what the context leaves.

        Raises InputError naming the field: "request_id" in use, "model" unknown, "prompt" empty, too long, or with
        ids outside the vocabulary. A request that raises leaves no trace.
        """
        if self._scheduler.get(request.request_id) is not None:
            raise InputError(f"request_id '{request.request_id}' is in use", field="request_id")
        adapter = None if request.adapter is None else self.adapters.find(request.adapter)
        num_virtual = 0 if adapter is None else adapter.num_virtual
        token_ids = self._tokenize(request.prompt)
        room = self._room(num_virtual) - len(token_ids)
        if room < 1:
            raise InputError(
                f"the prompt has {len(token_ids)} tokens, the context has room for {room + len(token_ids)} and the "
                "answer needs one of them: shorten the prompt",
                field="prompt",
            )
        params = request.sampling
        outside = next((token for token, _ in params.logit_bias if not 0 <= token < self.spec.vocab_size), None)
        if outside is not None:
            last = self.spec.vocab_size - 1
            raise InputError(f"logit_bias has token id {outside}: ids are 0 to {last}", field="logit_bias")
        live = Live(
            request_id=request.request_id,
            num_prompt=len(token_ids),
            token_ids=token_ids,
            params=replace(params, max_tokens=min(params.max_tokens, room)),
            seed=secrets.randbits(63) if params.seed is None else params.seed % 2**63,
            uid=None if adapter is None else adapter.uid,
            num_virtual=num_virtual,
            tenant=request.tenant,
            weight=request.weight,
            priority=request.priority,
            constraint=None if params.json_schema is None else self.grammars.json(params.json_schema),
        )
        self._scheduler.add(live)
        if params.logprobs is not None or params.prompt_logprobs is not None:
            self._scores[live.request_id] = Scores()
        self._texts[live.request_id] = Detokenizer(self.vocabulary, params.stop)
        self._num_prompt_tokens += live.num_prompt
        return live.request_id

    def step(self) -> list[RequestOutput]:
        """Starts a step, and finishes the one before, or if it had to be waited for this one too.

        Returns an output for each token that a request drew in them, or that it ended with.

        When the device fails at the start of a step, its requests are computed one by one, so that only those end with
        "error" that fail alone too.
        """
        outputs = self._finish() if self._scheduler.needs_tokens() else []
        plan = self._scheduler.schedule()
        outputs += [self._end(live, "error", error=str(error)) for live, error in self._scheduler.take_rejected()]
        started = self._start(plan, outputs) if plan.chunks else None
        outputs += self._finish()
        self._under_way = started
        if started is not None and isinstance(started.result, StepResult):
            outputs += self._finish()
        return outputs

    def _start(self, plan: StepPlan, outputs: list[RequestOutput]) -> _UnderWay | None:
        """Starts a step; when that fails, computes what can be computed of it at once, for `outputs`."""
        self._num_steps += 1
        try:
            return _UnderWay(plan, self._runner.launch(plan) if self._overlap else self._runner.run(plan))
        except Exception as error:  # whatever the device raises ends requests of this step, not the engine
            logger.exception("a step of %d requests failed", len(plan.chunks))
            failure = error
        outputs += self._finish()  # the step before, whose tokens are needed now
        if len(plan.chunks) == 1:
            outputs += self._fail(plan, failure)
            return None
        for chunk in plan.chunks:
            # what a chunk writes it writes again alike: its own pages, from its own tokens
            outputs += self._alone(chunk, tuple(copy for copy in plan.copies if copy[1] in chunk.block_table))
        return None

    def _alone(self, chunk: Chunk, copies: tuple[tuple[int, int], ...]) -> list[RequestOutput]:
        """Computes one chunk of a step that failed, unless its request has ended."""
        live = self._scheduler.of(chunk)
        if live is None:
            return []
        if chunk.token_ids[-1] == UNKNOWN:
            known = None if chunk.sample is None else chunk.sample._replace(history=live.history())
            chunk = chunk._replace(token_ids=(live.token_ids[chunk.start - chunk.num_virtual],), sample=known)
        plan = StepPlan((chunk,), copies)
        try:
            return self._book(plan, self._runner.run(plan))
        except Exception as error:  # this one's own fault
            logger.exception("a step of one request failed")
            return self._fail(plan, error)

    def _finish(self) -> list[RequestOutput]:
        """Waits for the step that is under way, if there is one, and books it."""
        step, self._under_way = self._under_way, None
        if step is None:
            return []
        result = step.result
        try:
            if isinstance(result, Launched):
                result = self._runner.collect(result)
        except Exception as error:  # as at its start, but what it has computed can't be told any more
            logger.exception("a step of %d requests failed under way", len(step.plan.chunks))
            return self._fail(step.plan, error)
        return self._book(step.plan, result)

    def _fail(self, plan: StepPlan, error: Exception) -> list[RequestOutput]:
        message = f"the step that computed this request failed: {type(error).__name__}"
        lives = [self._scheduler.of(chunk) for chunk in plan.chunks]
        return [self._end(live, "error", error=message) for live in lives if live is not None]

    def _book(self, plan: StepPlan, result: StepResult) -> list[RequestOutput]:
        """Books a step, each request by itself; an output for each that drew a token or failed, and had not ended."""
        outputs: list[RequestOutput] = []
        for chunk in plan.chunks:
            live = self._scheduler.of(chunk)
            if live is None:
                continue
            try:
                outputs += self._book_one(live, chunk, result)
            except RunError as error:  # its constraint's
                outputs.append(self._end(live, "error", error=str(error)))
            except Exception as error:  # whatever it is, the other requests of the step go on
                logger.exception("a request's share of a step could not be booked")
                message = f"the request's answer could not be taken further: {type(error).__name__}"
                last = self._output(live, self._texts[live.request_id], "")
                self._give_back(live)
                outputs.append(replace(last, finish_reason="error", error=message))
        return outputs

    def _book_one(self, live: Live, chunk: Chunk, result: StepResult) -> list[RequestOutput]:
        """Appends what a step drew to one request; its output, if it drew a token or can't."""
        request_id = live.request_id
        if chunk.targets:
            self._scores[request_id].prompt[chunk.start - chunk.num_virtual :] = result.prompt_logprobs[request_id]
        if request_id in result.logprobs:
            self._scores[request_id].generated.append(result.logprobs[request_id])
        if self._scheduler.update(live, chunk, result):
            return [self._advance(live)]
        if chunk.sample is None:
            return []
        return [self._end(live, "error", error="its logits are not finite: the adapter's weights are too large")]

    def abort(self, request_id: str) -> RequestOutput | None:
        """Ends a request at once; its last output, or None when there is no such request (any more)."""
        live = self._scheduler.get(request_id)
        return None if live is None else self._end(live, "abort")

    def waiting(self) -> set[str]:
        """Ids of the requests that no step has taken in yet, or that were put back."""
        return {live.request_id for live in self._scheduler.waiting}

    def has_work(self) -> bool:
        """Whether a request has not ended."""
        return self._scheduler.has_work()

    def generate(self, requests: Sequence[Request]) -> Generator[RequestOutput, None, None]:
        """Runs requests together and yields each one's last output, in order of ending.

        Raises as `add_request` does, then none of them runs; RunError when other requests are being worked on. An
        iterator that is closed early aborts what is left.
        """
        if self.has_work():
            raise RunError("generate drives the engine alone: other requests have not ended")
        try:
            for request in requests:
                self.add_request(request)
            while self.has_work():
                yield from (output for output in self.step() if output.finish_reason is not None)
            self.check_integrity()
        finally:
            for request_id in list(self._texts):
                self.abort(request_id)

    def check_integrity(self) -> None:
        """Asserts that pages, slots, pins and references are exactly those of the requests that have not ended."""
        running, waiting = self._scheduler.running, self._scheduler.waiting
        references = Counter(live.uid for live in (*running, *waiting) if live.uid is not None)
        pins = Counter(live.uid for live in running if live.uid is not None)
        held = self._scheduler.check_integrity()
        held.update(self._pool.check_integrity(references, pins))
        self._pages.check_integrity(held)
        assert set(self._texts) == {live.request_id for live in (*running, *waiting)} >= set(self._scores)

    def stats(self) -> EngineStats:
        """Counts for people and metrics; may be called from any thread."""
        running, waiting = list(self._scheduler.running), list(self._scheduler.waiting)
        num_free = self._pages.num_free
        return EngineStats(
            requests_running=len(running),
            requests_waiting=len(waiting),
            adapters=len(self.adapters.names()),
            adapters_resident=self._pool.num_resident,
            adapter_slots=self._pool.num_slots,
            running_adapters=sorted({live.uid for live in running if live.uid is not None}),
            waiting_adapters=sorted({live.uid for live in waiting if live.uid is not None}),
            pages_total=self._pages.num_pages,
            pages_free=num_free,
            pages_used=self._pages.num_pages - num_free,
            weight_bytes=self._runner.split.weights,
            kv_bytes=self._runner.split.kv,
            adapter_capacity_bytes=self._runner.split.adapters,
            step_bytes=self._runner.split.steps,
            graph_bytes=self._runner.split.graphs,
            adapter_bytes=self._runner.memory.used_bytes(),
            steps=self._num_steps,
            preemptions=self._scheduler.num_preemptions,
            prompt_tokens=self._num_prompt_tokens,
            cached_tokens=self._scheduler.num_cached_tokens,
            generated_tokens=self._num_generated_tokens,
        )

    def adapter_uses(self) -> dict[str, tuple[bool, int]]:
        """Of the adapters on the device or in requests, by uid: whether it is there, and how many requests have it."""
        live = (one.uid for one in (*self._scheduler.running, *self._scheduler.waiting) if one.uid is not None)
        uids = {*live, *self._pool.resident}
        return {uid: (self._pool.is_resident(uid), self._pool.num_references(uid)) for uid in uids}

    def _loader(self) -> AdapterLoader:
        weights = self._runner.memory.weights
        return AdapterLoader(
            self.base,
            self.spec,
            dtype=weights.dtype,
            base_linear=self._runner.base_linear,
            max_weight_bytes=self._runner.memory.capacity_bytes,
            max_virtual_tokens=max(0, min(self.spec.max_position, self._scheduler.max_text_tokens(1)) - 2),
            pinned=weights.is_cuda,
        )

    def _room(self, num_virtual: int) -> int:
        return min(self.spec.max_position - num_virtual, self._scheduler.max_text_tokens(num_virtual))

    def _tokenize(self, prompt: str | list[int]) -> list[int]:
        if isinstance(prompt, str):
            token_ids = encode_prompt(self.tokenizer, prompt)
        else:
            token_ids = list(prompt)
            outside = next((one for one in token_ids if not 0 <= one < self.spec.vocab_size), None)
            if outside is not None:
                last = self.spec.vocab_size - 1
                raise InputError(f"the prompt has token id {outside}: ids are 0 to {last}", field="prompt")
        if not token_ids:
            raise InputError("the prompt is empty: it must have at least one token", field="prompt")
        return token_ids

    def _advance(self, live: Live) -> RequestOutput:
        """The output after a request's new token, its last one if the token ends it."""
        self._num_generated_tokens += 1
        token_id, text = live.token_ids[-1], self._texts[live.request_id]
        if live.constraint is not None:
            live.constraint.accept(token_id)
        if token_id in self._eos and (live.constraint is not None or not live.params.ignore_eos):
            return self._end(live, "stop")
        delta = text.push(token_id)
        if text.stopped or (live.constraint is not None and live.constraint.complete):
            return self._end(live, "stop", delta)
        if live.num_generated == live.params.max_tokens:
            return self._end(live, "length", delta)
        return self._output(live, text, delta)

    def _end(self, live: Live, reason: FinishReason, delta: str = "", error: str | None = None) -> RequestOutput:
        """The last output of a request. All that it held is given back."""
        text = self._texts[live.request_id]
        delta += text.flush()
        if text.stopped and reason == "length":
            reason = "stop"
        output = replace(self._output(live, text, delta), finish_reason=reason, error=error)
        self._give_back(live)
        return output

    def _give_back(self, live: Live) -> None:
        self._scheduler.finish(live.request_id)
        del self._texts[live.request_id]
        self._scores.pop(live.request_id, None)

    def _output(self, live: Live, text: Detokenizer, delta: str) -> RequestOutput:
        token_ids = tuple(live.token_ids[live.num_prompt :])
        scores = self._scores.get(live.request_id)
        return RequestOutput(
            live.request_id,
            text.text,
            delta,
            token_ids,
            live.num_prompt,
            logprobs=() if scores is None else tuple(scores.generated),
            prompt_logprobs=() if scores is None else tuple(scores.prompt),
        )


def _check_at_least_one(**settings: int) -> None:
    for name, value in settings.items():
        if value < 1:
            raise InputError(f"{name} is {value}: it must be at least 1", field=name)
