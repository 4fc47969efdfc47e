"""Steps as CUDA graphs: a step is one launch, whatever its requests and adapters.

There is a graph for each `Bucket` that steps are padded to: steps of single tokens by `DecodeInputs`, steps with
prompts up to some size by `MixedInputs`. It is captured once, before the first request, and holds for all lengths and
adapters, because what differs between two steps lies in buffers and tables that it reads: block tables, contexts,
segments, where each slot's weights are and how large. All graphs work in the memory of the largest and leave their
logits in one place: only one of them runs at a time.

On a CPU the same function runs on the same padded buffers, without a graph.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from peftkit_kernels import sample
from peftkit_serve.batch import Batch, Extras
from peftkit_serve.decode_inputs import DecodeInputs
from peftkit_serve.mixed_inputs import MixedInputs
from peftkit_serve.plan import Chunk
from peftkit_serve.staging import Bucket, Reach

logger = logging.getLogger(__name__)

_NUM_PROBES = 4  # graphs that are captured to measure what all of them will take

Logits = Callable[[Batch], Tensor]
"""Computes a step and returns the logits (X, V) of its sample rows."""


@dataclass(frozen=True, slots=True)
class Drawn:
    """What a step leaves, one row a request; overwritten by the next step."""

    logits_NV: Tensor
    token_N: Tensor
    """int64: drawn by the rows' parameters, from the logits as they are."""
    plain: bool
    """Whether no row asks for more than that."""


@dataclass(frozen=True, slots=True)
class _Graph:
    graph: torch.cuda.CUDAGraph
    logits_NV: Tensor
    token_N: Tensor


class StepGraphs:
    """Runs steps. Used on the thread that steps."""

    def __init__(self, decode: DecodeInputs, mixed: MixedInputs, logits: Logits, device: torch.device) -> None:
        self._decode, self._mixed = decode, mixed
        self._logits = logits
        self._device = device
        self._graphs: dict[Bucket, _Graph] = {}
        self._logits_RV: Tensor | None = None  # where every graph leaves them; on a GPU

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Runs every step that there will be a graph of, by itself."""
        for bucket in self._buckets():
            self._compute(bucket)

    def measure(self) -> int:
        """Bytes that all graphs will take, from capturing the largest few, which are dropped again.

        The largest brings the memory that the others find their own in; each of them takes what a graph itself does.
        """
        buckets = self._buckets()
        probes = buckets[:_NUM_PROBES]
        pool, before = torch.cuda.graph_pool_handle(), _Held.of(self._device)
        self._capture(probes[:1], pool)
        begun = _Held.of(self._device)
        self._capture(probes[1:], pool)
        first, others = begun.since(before), _Held.of(self._device).since(begun)
        self._graphs.clear()
        self._logits_RV = None
        torch.cuda.empty_cache()
        return first + others * (len(buckets) - 1) // max(1, len(probes) - 1)

    def capture(self) -> int:
        """Captures every graph, the largest first, so that the others find their memory in its; none on a CPU.

        What they launch has been loaded by `warm_up` of as many layers as differ. No request may be in the pages.
        Returns the bytes that the graphs take.
        """
        if self._device.type != "cuda":
            return 0
        begun, before = time.perf_counter(), _Held.of(self._device)
        self._capture(self._buckets(), torch.cuda.graph_pool_handle())
        logger.info("captured %d graphs in %.1f s", len(self._graphs), time.perf_counter() - begun)
        return _Held.of(self._device).since(before)

    @torch.inference_mode()
    def _capture(self, buckets: Sequence[Bucket], pool: Any) -> None:
        if self._logits_RV is None:
            logits_NV, _ = self._compute(buckets[0])  # its rows are as many as any graph's
            self._logits_RV = torch.empty_like(logits_NV)
            del logits_NV
        for bucket in buckets:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                logits_NV, token_N = self._compute(bucket)
                kept_NV = self._logits_RV[: len(logits_NV)].copy_(logits_NV)
            self._graphs[bucket] = _Graph(graph, kept_NV, token_N)

    @property
    def num_graphs(self) -> int:
        """Graphs that were captured."""
        return len(self._graphs)

    def takes(self, chunks: Sequence[Chunk], extras: Extras) -> bool:
        """Whether a step with these adapters' extras can run here: one that isn't too large, and isn't scored.

        The ends of the decoder are looked up on the host, so a step that has some is not for a graph.
        """
        if extras.ends or any(chunk.targets for chunk in chunks):
            return False
        return _single(chunks) or self._mixed.holds(sum(len(chunk.token_ids) for chunk in chunks), len(chunks))

    def run(self, chunks: Sequence[Chunk], extras: Extras, sources: Sequence[int]) -> Drawn:
        """Starts a step that `takes` has accepted. Its rows are the chunks in their order, more may stand behind.

        sources: for each chunk the row of its last token in the tokens of the step before, -1 where it is known.
        """
        inputs = self._decode if _single(chunks) else self._mixed
        bucket = inputs.write(chunks, sources, Reach.of(extras))
        captured = self._graphs.get(bucket)
        if captured is None:
            assert self._device.type != "cuda", f"no graph was captured for {bucket}"
            return Drawn(*self._compute(bucket), inputs.plain)
        captured.graph.replay()
        return Drawn(captured.logits_NV, captured.token_N, inputs.plain)

    def _buckets(self) -> list[Bucket]:
        """The one with most rows and tokens first."""
        found = self._decode.buckets() + self._mixed.buckets()
        return sorted(found, key=lambda one: (one.num_rows, one.num_tokens, one.num_segments, one.reach), reverse=True)

    def _compute(self, bucket: Bucket) -> tuple[Tensor, Tensor]:
        inputs = self._mixed if bucket.num_tokens > bucket.num_rows else self._decode
        logits_NV = self._logits(inputs.batch(bucket))
        token_N = sample(logits_NV, *inputs.draws(bucket))
        torch.clamp(token_N, min=0, out=inputs.last_token_R[: bucket.num_rows])  # what can't be drawn is never read
        return logits_NV, token_N


def _single(chunks: Sequence[Chunk]) -> bool:
    """Whether each has one token."""
    return all(len(chunk.token_ids) == 1 for chunk in chunks)


@dataclass(frozen=True, slots=True)
class _Held:
    """Memory that is taken on a device."""

    on_device: int
    """By anyone: a graph's own is not of torch's allocator."""
    by_torch: int
    """By the allocator of this process alone."""

    @classmethod
    def of(cls, device: torch.device) -> "_Held":
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(device)
        return cls(total - free, torch.cuda.memory_reserved(device))

    def since(self, before: "_Held") -> int:
        """Bytes taken since then; what another process gives back meanwhile hides none of torch's."""
        return max(self.on_device - before.on_device, self.by_torch - before.by_torch)
