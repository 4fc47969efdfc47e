"""A step's plan → tensors → logits → tokens, on one device; owns the weights, the KV pages and the adapter memory."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import psutil
import torch
from torch import Tensor

from peftkit.base import BaseInfo, Quant, auto_device, auto_dtype, check_nf4
from peftkit.errors import InputError, RunError
from peftkit_kernels import copy_pages
from peftkit_serve.adapters.memory import AdapterMemory
from peftkit_serve.adapters.packing import UNIT_BYTES
from peftkit_serve.batch import Batch, Extras, build_batch
from peftkit_serve.decode_inputs import DecodeInputs
from peftkit_serve.graphs import DecodeGraphs, Drawn
from peftkit_serve.models.decoder import Decoder
from peftkit_serve.models.spec import ModelSpec, read_spec
from peftkit_serve.models.weights import OpenSource, base_linear, load_weights
from peftkit_serve.pages import PAGE_TOKENS, pages_for
from peftkit_serve.plan import Chunk, Sample, StepPlan, StepResult
from peftkit_serve.request import SamplingParams
from peftkit_serve.sampler import draw, logprobs

_ROOMY_RANK = 64  # by default adapter memory holds all slots at this rank on every linear layer
_WARM_UP_TOKENS = (2, 17, 40, 65, 200, 257, 300, 1025)  # of steps that between them meet every kernel's configurations
_BARE, _LORA, _ALL = Extras(False, False, False), Extras(False, False, False), Extras(True, True, False)
_GREEDY = Sample(SamplingParams(temperature=0.0), 0, 0)
_DRAWN = Sample(SamplingParams(temperature=1.0, top_k=8, top_p=0.9), 0, 0)


class Runner:
    """Computes the steps that a scheduler plans. Used on the thread that steps."""

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
        """
        num_slots: LoRA and bottleneck adapters on the device at a time.
        num_pages: KV memory in pages; None takes what the device's memory leaves, and no more than `max_requests`
            sequences of full length can use.
        adapter_bytes: their memory; None takes room for a LoRA of rank 64 in each slot and both embeddings, whole, of
            one, at most a quarter of what is free.
        deterministic: a request's tokens don't depend on what else is in its steps.
        graphs: steps of single tokens run on padded buffers, on a GPU as CUDA graphs; None does so on a GPU.
        source: the base's tensors, where they don't come from its folder.

        Raises BaseModelError for a base that can't be served, InputError for a bad number, RunError when the device
        has too little memory.
        """
        where = auto_device(device)
        dtype = auto_dtype("auto", where)
        self.spec: ModelSpec = read_spec(base.path)
        if quant == "nf4":
            check_nf4(base, where)
        weights = self._weights = load_weights(
            base.path, self.spec, quant=quant, dtype=dtype, device=where, source=source
        )
        self.weight_bytes = weights.nbytes
        """Bytes of all weights held: NF4 codes, and on a CPU their dequantised copies too."""
        free = _free_bytes(where)
        if adapter_bytes is None:
            roomy = num_slots * _roomy_adapter_bytes(self.spec, dtype) + _ends_bytes(self.spec, dtype)
            adapter_bytes = min(roomy, free // 4)
        if num_pages is None:
            budget = free - adapter_bytes - _working_bytes(self.spec, dtype, max_tokens_per_step, max_requests)
            useful = max_requests * pages_for(self.spec.max_position)
            num_pages = min(default_num_pages(self.spec, budget, dtype), useful)
        elif num_pages < 1:
            raise InputError(f"num_pages is {num_pages}: it must be at least 1", field="num_pages")
        self.num_pages = num_pages
        # one page more, which rows without a request write to
        self._kv = _allocate_kv(self.spec, num_pages + 1, dtype, where)
        self.kv_bytes = num_pages * PAGE_TOKENS * self.spec.kv_bytes_per_token(dtype)
        """Bytes of the KV pages that requests can have."""
        self.memory = AdapterMemory(
            self.spec, num_slots=num_slots, budget_bytes=adapter_bytes, dtype=dtype, device=where
        )
        self._device = where
        self._max_tokens = max_tokens_per_step
        longest = self._longest = min(self.spec.max_position, num_pages * PAGE_TOKENS)
        self._decoder = Decoder(self.spec, weights, self.memory, max_position=longest, deterministic=deterministic)
        self._graphs: DecodeGraphs | None = None
        if where.type == "cuda" if graphs is None else graphs:
            inputs = DecodeInputs(
                max_rows=max_requests, max_pages=pages_for(longest), scratch_page=num_pages, device=where
            )
            self._graphs = DecodeGraphs(inputs, self._logits, where)
        self._warm_up()

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> StepResult:
        """Copies the plan's pages, computes its chunks and draws their tokens.

        A token of -1 says that the request's logits are not finite, so that nothing can be drawn.
        """
        if plan.copies:
            source_X, destination_X = torch.tensor(plan.copies, device=self._device).unbind(1)
            for kv in self._kv:
                copy_pages(kv, source_X, destination_X)
        extras = self.memory.extras_of(chunk.slot for chunk in plan.chunks)
        if self._graphs is not None and self._graphs.takes(plan.chunks, extras):
            return self._decode(self._graphs.run(plan.chunks, extras), plan.chunks)
        batch = self._batch(plan.chunks)
        hidden_XH = self._decoder.forward(batch, self._kv)
        if not hidden_XH.shape[0]:
            return StepResult({})
        return _draw(self._decoder.logits(hidden_XH, batch), plan.chunks)

    @torch.inference_mode()
    def compute_prefix(self, embeddings_VH: Tensor, block_table: Sequence[int], slot: int = -1) -> None:
        """Computes the keys and values of V virtual tokens, positions 0 to V - 1, into the pages of a block table.

        slot: the adapter whose weights apply to them, where a LoRA or bottleneck adapter goes with the tokens.
        """
        num_virtual = embeddings_VH.shape[0]
        chunk = Chunk("", (0,) * num_virtual, 0, tuple(block_table), slot, num_virtual, None)
        self._decoder.forward(self._batch([chunk]), self._kv, embeddings_VH.to(self._device, self.memory.weights.dtype))

    @torch.inference_mode()
    def write_prefix(self, kv_VL2KD: Tensor, block_table: Sequence[int]) -> None:
        """Writes V virtual keys and values of every layer as positions 0 to V - 1 into the pages of a block table."""
        position_V = torch.arange(kv_VL2KD.shape[0])
        page_V = torch.tensor(block_table)[position_V // PAGE_TOKENS]
        cell_V = (page_V * PAGE_TOKENS + position_V % PAGE_TOKENS).to(self._device)
        for kv, layer_V2KD in zip(self._kv, kv_VL2KD.to(self._device, self._kv[0].dtype).unbind(1), strict=True):
            kv.view(-1, *kv.shape[2:]).index_copy_(0, cell_V, layer_V2KD)

    @torch.inference_mode()
    def base_linear(self, path: str) -> tuple[Tensor, Tensor | None]:
        """The base's weight (out, in) and bias (out) of a linear module; may be called from any thread."""
        return base_linear(self._weights, self.spec, path)

    def _logits(self, batch: Batch) -> Tensor:
        return self._decoder.logits(self._decoder.forward(batch, self._kv), batch)

    def _decode(self, drawn: Drawn, chunks: Sequence[Chunk]) -> StepResult:
        """The result of a step of single tokens. Rows that ask for more than a draw are drawn anew."""
        if not drawn.plain:
            rows = [row for row, chunk in enumerate(chunks) if chunk.sample is not None]
            return _draw(drawn.logits_NV[rows], [chunks[row] for row in rows])
        tokens = drawn.token_N.tolist()  # waits for the step
        return StepResult(
            {chunk.request_id: tokens[row] for row, chunk in enumerate(chunks) if chunk.sample is not None}
        )

    @torch.inference_mode()
    def _warm_up(self) -> None:
        """Compiles and captures all that steps on a GPU need, so that no request waits for it.

        Kernels' configurations follow from the numbers of rows, requests and segments; the ranks may be 0.
        """
        if self._device.type != "cuda":
            return
        sizes = sorted({min(size, self._max_tokens) for size in (*_WARM_UP_TOKENS, self._max_tokens)})
        for size, beside, extras in product(sizes, (0, 1), (_BARE, _LORA, _ALL)):
            chunks = self._scratch_chunks([size - beside, *[1] * beside], -1 if extras is _BARE else 0)
            batch = replace(self._batch(chunks), extras=extras)
            draw(self._logits(batch), [one.sample for one in chunks if one.sample is not None])
        if self._graphs is not None:
            self._graphs.capture()

    def _scratch_chunks(self, num_tokens: Sequence[int], slot: int) -> list[Chunk]:
        """Chunks of so many tokens in the scratch page, cut where a sequence can't be longer."""
        chunks: list[Chunk] = []
        for count in num_tokens:
            for start in range(0, count, self._longest):
                size = min(self._longest, count - start)
                table = (self.num_pages,) * pages_for(size)
                chunks.append(Chunk("", (0,) * size, 0, table, slot, 0, _DRAWN if chunks else _GREEDY))
        return chunks

    def _batch(self, chunks: Sequence[Chunk]) -> Batch:
        return build_batch(chunks, page_tokens=PAGE_TOKENS, device=self._device)


def _draw(logits_XV: Tensor, chunks: Sequence[Chunk]) -> StepResult:
    """Draws the chunks' tokens and scores their targets. The rows are those of `Batch.sample_row_X`."""
    drawing: list[tuple[int, Chunk, Sample]] = []
    scored: list[tuple[Chunk, range]] = []
    row = 0
    for chunk in chunks:
        if chunk.targets:
            scored.append((chunk, range(row, row + len(chunk.targets))))
            row += len(chunk.targets)
        if chunk.sample is not None:
            drawing.append((row, chunk, chunk.sample))
            row += 1
    rows = [row for row, _, _ in drawing]
    logits_NV = logits_XV if len(rows) == len(logits_XV) else logits_XV[rows]
    tokens = draw(logits_NV, [sample for _, _, sample in drawing]) if drawing else []
    drawn = {chunk.request_id: token for (_, chunk, _), token in zip(drawing, tokens, strict=True)}
    reported = [
        (row, chunk.request_id, sample.params.logprobs)
        for row, chunk, sample in drawing
        if sample.params.logprobs is not None and drawn[chunk.request_id] >= 0
    ]
    chosen = logprobs(
        logits_XV[[row for row, _, _ in reported]],
        [drawn[name] for _, name, _ in reported],
        [n for _, _, n in reported],
    )
    return StepResult(
        drawn,
        dict(zip([name for _, name, _ in reported], chosen, strict=True)),
        {
            chunk.request_id: tuple(
                logprobs(logits_XV[rows.start : rows.stop], chunk.targets, [chunk.num_top_targets] * len(rows))
            )
            for chunk, rows in scored
        },
    )


def default_num_pages(spec: ModelSpec, budget_bytes: int, dtype: torch.dtype) -> int:
    """KV pages that fit into a byte budget. Raises RunError when not one does."""
    page_bytes = PAGE_TOKENS * spec.kv_bytes_per_token(dtype)
    if budget_bytes < page_bytes:
        raise RunError(
            f"no memory is left for keys and values: a page takes {page_bytes} bytes, {max(0, budget_bytes)} are free"
        )
    return budget_bytes // page_bytes


def _free_bytes(device: torch.device) -> int:
    """Bytes that may be taken on a device; a part is left to the system, and on a CPU to other programs."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0] * 0.9)
    return psutil.virtual_memory().available // 2


def _working_bytes(spec: ModelSpec, dtype: torch.dtype, max_tokens: int, max_requests: int) -> int:
    """Upper estimate of a step's activations and logits."""
    widest = 3 * spec.intermediate_size + 4 * spec.hidden_size + 4 * spec.num_heads * spec.head_dim
    return max_tokens * widest * dtype.itemsize + max_requests * spec.vocab_size * 16


def _roomy_adapter_bytes(spec: ModelSpec, dtype: torch.dtype) -> int:
    layer = _ROOMY_RANK * dtype.itemsize * sum(out + inside for out, inside in spec.projection_shapes)
    return spec.num_layers * -(-layer // UNIT_BYTES) * UNIT_BYTES


def _ends_bytes(spec: ModelSpec, dtype: torch.dtype) -> int:
    """Both embeddings whole, as one adapter may have them."""
    return 2 * -(-spec.vocab_size * spec.hidden_size * dtype.itemsize // UNIT_BYTES) * UNIT_BYTES


def _allocate_kv(spec: ModelSpec, num_pages: int, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """One kv_PZ2KD a layer, not initialised: a position is written before it is read."""
    shape = (num_pages, PAGE_TOKENS, 2, spec.num_kv_heads, spec.head_dim)
    try:
        return [torch.empty(shape, dtype=dtype, device=device) for _ in range(spec.num_layers)]
    except RuntimeError as error:  # torch's out-of-memory error on every device
        num_bytes = num_pages * PAGE_TOKENS * spec.kv_bytes_per_token(dtype)
        raise RunError(
            f"{num_pages} KV pages take {num_bytes} bytes, too many for {device}: lower num_pages"
        ) from error
