"""A step's plan → tensors → logits → tokens, on one device; owns the weights, the KV pages and the adapter memory."""

import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product, repeat

import torch
from torch import Tensor

from peftkit.base import BaseInfo, Quant, auto_device, auto_dtype, check_nf4
from peftkit.errors import InputError
from peftkit_kernels import compiled_together, copy_pages, sample, sort_by_slot
from peftkit_serve.adapters.memory import AdapterMemory
from peftkit_serve.adjust import Late
from peftkit_serve.batch import Batch, Extras
from peftkit_serve.budget import (
    MemorySplit,
    allocate_kv,
    default_adapter_bytes,
    default_num_pages,
    estimated_step_bytes,
    free_bytes,
)
from peftkit_serve.decode_inputs import DecodeInputs
from peftkit_serve.graphs import StepGraphs
from peftkit_serve.mixed_inputs import MixedInputs
from peftkit_serve.models.decoder import Decoder
from peftkit_serve.models.spec import ModelSpec, read_spec
from peftkit_serve.models.weights import OpenSource, base_linear, load_weights
from peftkit_serve.pages import PAGE_TOKENS, pages_for
from peftkit_serve.plan import UNKNOWN, Chunk, Sample, StepPlan, StepResult
from peftkit_serve.request import SamplingParams, TokenLogprobs
from peftkit_serve.sampler import draw, is_plain, logprobs
from peftkit_serve.staging import moved
from peftkit_serve.step_inputs import StepInputs, spans_of

logger = logging.getLogger(__name__)

# of steps that between them meet every kernel's configurations
_WARM_UP_TOKENS = (2, 7, 12, 17, 40, 65, 200, 257, 300, 1025)
_WARM_UP_REQUESTS = (1, 17, 40)  # of steps of single tokens, likewise: products of few rows, those of the logits too
_BARE = Extras(feed_forward=False, bottlenecks=False, head_lora=False, ends=False)
_LORA, _ALL = _BARE._replace(feed_forward=True), Extras(True, True, True, ends=False)
_GREEDY = Sample(SamplingParams(temperature=0.0), 0, 0)
_DRAWN = Sample(SamplingParams(temperature=1.0, top_k=8, top_p=0.9), 0, 0)
_ADJUSTED = SamplingParams(temperature=1.0, top_k=8, logit_bias=((0, 1.0),), repetition_penalty=1.1, logprobs=1)
_REPORTED = Sample(_ADJUSTED, 0, 0, history=(0,))


@dataclass(frozen=True, slots=True, eq=False)
class Launched:
    """A step under way on the device."""

    request_ids: tuple[str | None, ...]
    """By row of `token_X`; None for a row that draws nothing."""
    token_X: Tensor
    """int64, on the host; there when the step is done."""
    done: torch.cuda.Event | None
    """None for a step that is done."""


class Runner:
    """Computes the steps that a scheduler plans. Used on the thread that steps.

    num_slots: LoRA and bottleneck adapters on the device at a time.
    num_pages: KV memory in pages; None takes what the device's memory leaves, and no more than `max_requests` sequences
        of full length can use.
    adapter_bytes: memory of adapters' weights; None takes room for a LoRA of rank 64 in each slot and both embeddings,
        whole, of one, at most a quarter of what is free.
    deterministic: a request's tokens don't depend on what else is in its steps.
    graphs: steps up to some size run on padded buffers, on a GPU as CUDA graphs; None does so on a GPU.
    source: the base's tensors, where they don't come from its folder.

    Raises BaseModelError for a base that can't be served, InputError for a bad number, RunError when the device has too
    little memory.
    """

    def __init__(
        self,
        base: BaseInfo,
        *,
        quant: Quant = "none",
        device: str = "auto",
        max_tokens_per_step: int = 512,
        max_requests: int = 64,
        num_slots: int = 16,
        num_pages: int | None = None,
        adapter_bytes: int | None = None,
        deterministic: bool = False,
        graphs: bool | None = None,
        source: OpenSource | None = None,
    ) -> None:
        if num_pages is not None and num_pages < 1:
            raise InputError(f"num_pages is {num_pages}: it must be at least 1", field="num_pages")
        where = self._device = auto_device(device)
        dtype = self._dtype = auto_dtype("auto", where)
        self.spec: ModelSpec = read_spec(base.path)
        if self.spec.holds_nf4:
            quant = "nf4"
        if quant == "nf4":
            check_nf4(base, where)
        self._weights = load_weights(base.path, self.spec, quant=quant, dtype=dtype, device=where, source=source)
        budget = free_bytes(where)
        if adapter_bytes is None:
            adapter_bytes = default_adapter_bytes(self.spec, dtype, num_slots, budget)
        self.memory = AdapterMemory(
            self.spec, num_slots=num_slots, budget_bytes=adapter_bytes, dtype=dtype, device=where
        )
        self._max_tokens, self._max_requests, self._num_slots = max_tokens_per_step, max_requests, num_slots
        useful = max_requests * pages_for(self.spec.max_position)
        self._longest = min(self.spec.max_position, PAGE_TOKENS * (num_pages or useful))
        self._decoder = Decoder(
            self.spec, self._weights, self.memory, max_position=self._longest, deterministic=deterministic
        )
        self._inputs = StepInputs(where)
        self._last_token_R = torch.zeros(max_requests, dtype=torch.int64, device=where)
        self._rows: dict[str, int] = {}  # where in them is what a request has drawn in the step before
        self._graphs: StepGraphs | None = None
        padded = self.on_gpu if graphs is None else graphs
        if self.on_gpu:
            self._allot(0)
            self._compile()
        steps, graph_bytes = self._measure(padded and num_pages is None)
        if num_pages is None:
            left = budget - adapter_bytes - steps - graph_bytes
            num_pages = min(default_num_pages(self.spec, left, dtype), useful)
        self._allot(num_pages)
        if padded:
            self._graphs = self._make_graphs()
            graph_bytes = self._graphs.capture()
        kv_bytes = num_pages * PAGE_TOKENS * self.spec.kv_bytes_per_token(dtype)
        self.split = MemorySplit(self._weights.nbytes, self.memory.capacity_bytes, kv_bytes, steps, graph_bytes)
        """What the memory that it holds is for."""
        logger.info("memory: %s", self.split)

    @property
    def on_gpu(self) -> bool:
        """Whether the device works beside the host."""
        return self._device.type == "cuda"

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights held: NF4 codes, and on a CPU their dequantised copies too."""
        return self.split.weights

    def run(self, plan: StepPlan) -> StepResult:
        """Computes a step and waits for it. What a plan's `UNKNOWN` tokens are is known from the step before.

        A token of -1 says that the request's logits are not finite, so that nothing can be drawn.
        """
        launched = self.launch(plan)
        return launched if isinstance(launched, StepResult) else self.collect(launched)

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> Launched | StepResult:
        """Starts a step: copies the plan's pages, computes its chunks and draws their tokens.

        One with rows that report log-probabilities or are held to a schema is waited for: then this is its result.
        """
        chunks = plan.chunks
        self._copy_pages(plan.copies)
        self.memory.wait_for(chunk.slot for chunk in chunks)
        extras = self.memory.extras_of(chunk.slot for chunk in chunks)
        sources = [self._rows[one.request_id] if one.token_ids[-1] == UNKNOWN else -1 for one in chunks]
        drawing = [row for row, chunk in enumerate(chunks) if chunk.sample is not None]
        late = self._late([chunks[row] for row in drawing], [sources[row] for row in drawing])
        if self._graphs is not None and self._graphs.takes(chunks, extras):
            drawn = self._graphs.run(chunks, extras, sources)
            if drawn.plain:
                return self._started([one.request_id if one.sample else None for one in chunks], drawn.token_N)
            logits_XV = drawn.logits_NV[: len(chunks)]
            if len(drawing) < len(chunks):
                logits_XV = logits_XV.index_select(0, moved(torch.tensor(drawing), self._device))
            return self._drawn(logits_XV, [chunks[row] for row in drawing], late)
        batch, draws = self._inputs.lay_out(chunks, self._last_token_R, sources)
        batch = replace(batch, extras=extras)
        hidden_XH = self._decoder.forward(batch, self._kv)
        if not len(hidden_XH):
            return self._started([], self._last_token_R[:0])
        if any(one.targets for one in chunks):
            return self._scored(hidden_XH, batch, chunks, late)
        logits_XV = self._decoder.logits(hidden_XH, batch)
        if not all(one.sample is None or is_plain(one.sample) for one in chunks):
            return self._drawn(logits_XV, [chunks[row] for row in drawing], late)
        return self._started_anew([chunks[row].request_id for row in drawing], sample(logits_XV, *draws))

    def collect(self, launched: Launched) -> StepResult:
        """Waits for a step: the only thing on the device that a step's host work waits for."""
        if launched.done is not None:
            launched.done.synchronize()
        tokens = zip(launched.request_ids, launched.token_X.tolist(), strict=True)
        return StepResult({request_id: token for request_id, token in tokens if request_id is not None})

    @torch.inference_mode()
    def compute_prefix(self, embeddings_VH: Tensor, block_table: Sequence[int], slot: int = -1) -> None:
        """Computes the keys and values of V virtual tokens, positions 0 to V - 1, into the pages of a block table.

        slot: the adapter whose weights apply to them, where a LoRA or bottleneck adapter goes with the tokens.
        """
        num_virtual, table = embeddings_VH.shape[0], tuple(block_table)
        self.memory.wait_for((slot,))
        for start in range(0, num_virtual, self._max_tokens):
            part_VH = embeddings_VH[start : start + self._max_tokens].to(self._device, self._dtype, non_blocking=True)
            chunk = Chunk("", (0,) * len(part_VH), start, table, slot, num_virtual, None)
            self._decoder.forward(self._batch([chunk]), self._kv, part_VH)

    @torch.inference_mode()
    def write_prefix(self, kv_VL2KD: Tensor, block_table: Sequence[int]) -> None:
        """Writes V virtual keys and values of every layer as positions 0 to V - 1 into the pages of a block table."""
        position_V = torch.arange(kv_VL2KD.shape[0])
        page_V = torch.tensor(block_table)[position_V // PAGE_TOKENS]
        cell_V = moved(page_V * PAGE_TOKENS + position_V % PAGE_TOKENS, self._device)
        kv_VL2KD = kv_VL2KD.to(self._device, non_blocking=True).to(self._dtype)
        for kv, layer_V2KD in zip(self._kv, kv_VL2KD.unbind(1), strict=True):
            kv.view(-1, *kv.shape[2:]).index_copy_(0, cell_V, layer_V2KD)

    @torch.inference_mode()
    def base_linear(self, path: str) -> tuple[Tensor, Tensor | None]:
        """The base's weight (out, in) and bias (out) of a linear module; may be called from any thread."""
        return base_linear(self._weights, self.spec, path)

    def _logits(self, batch: Batch, num_layers: int | None = None) -> Tensor:
        return self._decoder.logits(self._decoder.forward(batch, self._kv, num_layers=num_layers), batch)

    def _started(self, names: Sequence[str | None], token_N: Tensor) -> Launched:
        """The step whose rows draw for these requests; the copy of their tokens to the host is queued behind it."""
        self._rows = {name: row for row, name in enumerate(names) if name is not None}
        token_X = torch.empty(len(names), dtype=torch.int64, pin_memory=self.on_gpu)
        token_X.copy_(token_N[: len(names)], non_blocking=True)
        done = torch.cuda.Event() if self.on_gpu else None
        if done is not None:
            done.record()
        return Launched(tuple(names), token_X, done)

    def _started_anew(self, names: Sequence[str], token_X: Tensor) -> Launched:
        """The same for tokens that the next step can't read yet."""
        torch.clamp(token_X, min=0, out=self._last_token_R[: len(names)])  # what can't be drawn is never read
        return self._started(names, token_X)

    def _late(self, chunks: Sequence[Chunk], sources: Sequence[int]) -> Late | None:
        """The last tokens that penalties of these rows need and only the device knows, before this step's overwrite
        them."""
        pairs = list(zip(chunks, sources, strict=True))
        rows = [n for n, (one, source) in enumerate(pairs) if source >= 0 and one.sample and one.sample.history]
        if not rows:
            return None
        source_L = moved(torch.tensor([sources[row] for row in rows]), self._device)
        return Late(tuple(rows), self._last_token_R.index_select(0, source_L))

    def _drawn(self, logits_XV: Tensor, chunks: Sequence[Chunk], late: Late | None) -> Launched | StepResult:
        """A step with rows that ask for more than a draw from their logits as they are."""
        samples = [chunk.sample for chunk in chunks if chunk.sample is not None]
        if any(one.constraint is not None or one.params.logprobs is not None for one in samples):
            return self._drawn_now(logits_XV, chunks, late)
        return self._started_anew([chunk.request_id for chunk in chunks], draw(logits_XV, samples, late))

    def _drawn_now(self, logits_XV: Tensor, chunks: Sequence[Chunk], late: Late | None) -> StepResult:
        """The result of a step with rows that are waited for."""
        result = _draw(logits_XV, chunks, late)
        self._rows = {name: row for row, name in enumerate(result.tokens)}
        last_token_X = torch.tensor([max(0, token) for token in result.tokens.values()], dtype=torch.int64)
        self._last_token_R[: len(last_token_X)] = moved(last_token_X, self._device)
        return result

    def _scored(self, hidden_XH: Tensor, batch: Batch, chunks: Sequence[Chunk], late: Late | None) -> StepResult:
        """The result of a step with prompts whose tokens' log-probabilities are asked for.

        hidden_XH: the rows of `Batch.sample_row_X`. Logits are there for no more rows at a time than of a step without.
        """
        slot_X = [chunk.slot for chunk in chunks for _ in range(len(chunk.targets) + (chunk.sample is not None))]

        def logits_of(rows: Sequence[int]) -> Tensor:
            segments = sort_by_slot(torch.tensor([slot_X[row] for row in rows], dtype=torch.int64))
            adapted = segments.to(self._device) if len(segments.slot_G) else None
            spans = spans_of(segments.slot_G.numpy(), segments.start_G1.numpy())
            return self._decoder.logits(
                hidden_XH[list(rows)], replace(batch, sample_segments=adapted, sample_spans=spans)
            )

        prompts: dict[str, tuple[TokenLogprobs, ...]] = {}
        drawing: list[tuple[int, Chunk]] = []
        row = 0
        for chunk in chunks:
            found: list[TokenLogprobs] = []
            for start in range(0, len(chunk.targets), self._max_requests):
                targets = chunk.targets[start : start + self._max_requests]
                rows = range(row + start, row + start + len(targets))
                found += logprobs(logits_of(rows), targets, [chunk.num_top_targets] * len(targets))
            if chunk.targets:
                prompts[chunk.request_id] = tuple(found)
            row += len(chunk.targets)
            if chunk.sample is not None:
                drawing.append((row, chunk))
                row += 1
        if not drawing:
            return StepResult({}, prompt_logprobs=prompts)
        result = self._drawn_now(logits_of([row for row, _ in drawing]), [chunk for _, chunk in drawing], late)
        return replace(result, prompt_logprobs=prompts)

    def _copy_pages(self, copies: Sequence[tuple[int, int]]) -> None:
        if copies:
            source_X, destination_X = moved(torch.tensor(copies), self._device).unbind(1)
            for kv in self._kv:
                copy_pages(kv, source_X, destination_X)

    def _batch(self, chunks: Sequence[Chunk]) -> Batch:
        return self._inputs.lay_out(chunks, self._last_token_R, [-1] * len(chunks)).batch

    def _allot(self, num_pages: int) -> None:
        """Pages for requests, and one more, which rows without a request write to."""
        self.num_pages = self._scratch_page = num_pages
        self._kv = allocate_kv(self.spec, num_pages + 1, self._dtype, self._device)

    def _make_graphs(self, num_layers: int | None = None) -> StepGraphs:
        scratch = self._scratch_page
        shape = (self._max_requests, pages_for(self._longest))
        page_NM = torch.full(shape, scratch, dtype=torch.int32, device=self._device)
        decode = DecodeInputs(last_token_R=self._last_token_R, page_NM=page_NM, scratch_page=scratch)
        mixed = MixedInputs(
            last_token_R=self._last_token_R, page_NM=page_NM, scratch_page=scratch, max_tokens=self._max_tokens
        )
        return StepGraphs(decode, mixed, partial(self._logits, num_layers=num_layers), self._device)

    def _measure(self, with_graphs: bool) -> tuple[int, int]:
        """Bytes that the largest step takes, and all graphs, over the scratch page alone."""
        if not self.on_gpu:
            return estimated_step_bytes(self.spec, self._dtype, self._max_tokens, self._max_requests), 0
        self._warm_up()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._device)
        reserved, allocated = torch.cuda.memory_reserved(self._device), torch.cuda.memory_allocated(self._device)
        self._largest_step()
        # a small step may find room in what is reserved already, which empty_cache can't give back
        peak = torch.cuda.max_memory_allocated(self._device) - allocated
        steps = max(peak, torch.cuda.memory_reserved(self._device) - reserved)
        return steps, self._make_graphs().measure() if with_graphs else 0

    def _compile(self) -> None:
        """Compiles every kernel that steps need, so that no request waits for one."""
        begun = time.perf_counter()
        windows = self.spec.windows  # all that layers differ in, as far as kernels go
        num_layers = 1 + max(windows.index(window) for window in set(windows))
        graphs = self._make_graphs(num_layers)
        with compiled_together(self._device):
            self._warm_up(num_layers)
            graphs.warm_up()
        graphs.warm_up()  # loads them all, which no capture can
        logger.info("kernels are compiled after %.1f s", time.perf_counter() - begun)

    @torch.inference_mode()
    def _warm_up(self, num_layers: int | None = None) -> None:
        """Runs steps that between them launch every kernel of those that are launched one by one.

        Kernels' configurations follow from the numbers of rows, requests and segments; the ranks may be 0.
        """
        sizes = sorted({min(size, self._max_tokens) for size in (*_WARM_UP_TOKENS, self._max_tokens)})
        steps = [self._scratch_chunks([size - beside, *[1] * beside]) for size, beside in product(sizes, (0, 1))]
        steps += [self._scratch_chunks([1] * min(size, self._max_requests)) for size in _WARM_UP_REQUESTS]
        crowd = min(self._num_slots, self._max_requests)
        for slots in (range(crowd), (0, *range(crowd - 1))):  # one more row than adapters: another kind, the head's too
            steps.append(self._scratch_chunks([min(self._max_tokens, 256) // crowd] * crowd, slots))
        some = min(28, crowd)
        few = [[length] * min(count, crowd) for length, count in ((1, 1), (9, 1), (1, 5), (2, 5), (2, 20))]
        for lengths in (*few, [64 - 2 * (some - 1), *[2] * (some - 1)]):
            # up to 64 rows adapters' kernels run beside the product, and behind it where there are more
            steps.append(self._scratch_chunks(lengths, range(some)))
            steps.append(self._scratch_chunks([*lengths, 65], [*range(len(lengths)), -1]))
        for length, count in ((2, crowd), (9, min(32, crowd))):  # many rows of many adapters
            steps.append(self._scratch_chunks([length] * count, range(count)))
        for chunks, extras in product(steps, (_BARE, _LORA, _ALL)):
            if extras is _BARE:
                chunks = [chunk._replace(slot=-1) for chunk in chunks]
            batch, draws = self._inputs.lay_out(chunks, self._last_token_R, [-1] * len(chunks))
            sample(self._logits(replace(batch, extras=extras), num_layers), *draws)
        self._copy_pages(((self._scratch_page, self._scratch_page),))

    @torch.inference_mode()
    def _largest_step(self) -> None:
        """As many tokens and requests as a step can have, with all that adapters can have, and all that is drawn by."""
        others = self._max_requests - 1
        chunks = self._scratch_chunks([self._max_tokens - others, *[1] * others])
        chunks = [chunk._replace(sample=_REPORTED) for chunk in chunks]
        _draw(self._logits(replace(self._batch(chunks), extras=_ALL)), chunks)

    def _scratch_chunks(self, num_tokens: Sequence[int], slots: Iterable[int] | None = None) -> list[Chunk]:
        """Chunks of so many tokens in the scratch page, cut where a sequence can't be longer; by default of slot 0."""
        chunks: list[Chunk] = []
        for count, slot in zip(num_tokens, repeat(0) if slots is None else slots, strict=False):
            for start in range(0, count, self._longest):
                size = min(self._longest, count - start)
                table = (self._scratch_page,) * pages_for(size)
                chunks.append(Chunk("", (0,) * size, 0, table, slot, 0, _DRAWN if chunks else _GREEDY))
        return chunks


def _draw(logits_NV: Tensor, chunks: Sequence[Chunk], late: Late | None = None) -> StepResult:
    """Draws the chunks' tokens, a row each, and reports their log-probabilities where they are asked for."""
    samples = [chunk.sample for chunk in chunks if chunk.sample is not None]
    assert len(samples) == len(logits_NV)
    tokens = draw(logits_NV, samples, late).tolist()
    reported = [
        (row, chunk.request_id, tokens[row], samples[row].params.logprobs or 0)
        for row, chunk in enumerate(chunks)
        if samples[row].params.logprobs is not None and tokens[row] >= 0
    ]
    rows, names, chosen, counts = (list(column) for column in zip(*reported, strict=True)) if reported else ([],) * 4
    scores = logprobs(logits_NV[rows], chosen, counts)
    drawn = {chunk.request_id: token for chunk, token in zip(chunks, tokens, strict=True)}
    return StepResult(drawn, dict(zip(names, scores, strict=True)))
