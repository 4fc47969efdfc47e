"""Decode steps as CUDA graphs: a step of single tokens is one launch, whatever its adapters.

There is a graph for each (rows, segments, extras) that `DecodeInputs` pads steps to. It is captured once, before the
first request, and holds for all lengths and adapters, because what differs between two steps lies in buffers and
tables that it reads: block tables, contexts, segments, where each slot's weights are and how large. All graphs work in
the memory of the largest and leave their logits in one place: only one of them runs at a time.

On a CPU the same function runs on the same padded buffers, without a graph.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor

from peftkit_kernels import sample
from peftkit_serve.batch import Batch, Extras
from peftkit_serve.decode_inputs import Bucket, DecodeInputs, segment_buckets
from peftkit_serve.plan import Chunk

logger = logging.getLogger(__name__)

_NUM_PROBES = 4  # graphs that are captured to measure what all of them will take

Logits = Callable[[Batch], Tensor]
"""Computes a step and returns the logits (X, V) of its sample rows."""


@dataclass(frozen=True, slots=True)
class Drawn:
    """What a decode step leaves, one row a request; overwritten by the next step."""

    logits_NV: Tensor
    token_N: Tensor
    """int64: drawn by the rows' parameters, from the logits as they are."""
    plain: bool
    """Whether no row asks for more than that."""


@dataclass(frozen=True, slots=True)
class _Key:
    bucket: Bucket
    wide: bool
    """Whether adapters may have bottlenecks or a LoRA of the output embedding too."""


@dataclass(frozen=True, slots=True)
class _Graph:
    graph: torch.cuda.CUDAGraph
    logits_NV: Tensor
    token_N: Tensor


class DecodeGraphs:
    """Runs steps of single tokens. Used on the thread that steps."""

    def __init__(self, inputs: DecodeInputs, logits: Logits, device: torch.device) -> None:
        self._inputs = inputs
        self._logits = logits
        self._device = device
        self._graphs: dict[_Key, _Graph] = {}
        self._logits_RV: Tensor | None = None  # where every graph leaves them; on a GPU

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Runs every step that there will be a graph of, by itself."""
        for key in self._keys():
            self._compute(key)

    def measure(self) -> int:
        """Bytes that all graphs will take, from capturing the largest few, which are dropped again.

        The largest brings the memory that the others find their own in; each of them takes what a graph itself does.
        """
        keys = self._keys()
        probes = keys[:_NUM_PROBES]
        pool, before = torch.cuda.graph_pool_handle(), _Held.of(self._device)
        self._capture(probes[:1], pool)
        begun = _Held.of(self._device)
        self._capture(probes[1:], pool)
        first, others = begun.since(before), _Held.of(self._device).since(begun)
        self._graphs.clear()
        self._logits_RV = None
        torch.cuda.empty_cache()
        return first + others * (len(keys) - 1) // max(1, len(probes) - 1)

    def capture(self) -> int:
        """Captures every graph, the largest first, so that the others find their memory in its; none on a CPU.

        Each function is run once before, which loads what it launches. No request may be in the pages. Returns the
        bytes that the graphs take.
        """
        if self._device.type != "cuda":
            return 0
        begun, before = time.perf_counter(), _Held.of(self._device)
        self._capture(self._keys(), torch.cuda.graph_pool_handle())
        logger.info("captured %d decode graphs in %.1f s", len(self._graphs), time.perf_counter() - begun)
        return _Held.of(self._device).since(before)

    @torch.inference_mode()
    def _capture(self, keys: Sequence[_Key], pool: Any) -> None:
        for key in keys:
            logits_NV, _ = self._compute(key)
            if self._logits_RV is None:
                self._logits_RV = torch.empty_like(logits_NV)
            torch.cuda.synchronize(self._device)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                logits_NV, token_N = self._compute(key)
                kept_NV = self._logits_RV[: len(logits_NV)].copy_(logits_NV)
            self._graphs[key] = _Graph(graph, kept_NV, token_N)

    @property
    def num_graphs(self) -> int:
        """Graphs that were captured."""
        return len(self._graphs)

    def takes(self, chunks: Sequence[Chunk], extras: Extras) -> bool:
        """Whether a step with these adapters' extras can run here: single tokens that are not scored.

        The ends of the decoder are looked up on the host, so a step that has some is not for a graph.
        """
        return not extras.ends and all(len(chunk.token_ids) == 1 and not chunk.targets for chunk in chunks)

    def run(self, chunks: Sequence[Chunk], extras: Extras, sources: Sequence[int]) -> Drawn:
        """Starts a step that `takes` has accepted. Its rows are the chunks in their order, more may stand behind.

        sources: for each chunk the row of its token in the tokens of the step before, -1 where it is known.
        """
        key = _Key(self._inputs.write(chunks, sources), extras.bottlenecks or extras.head_lora)
        captured = self._graphs.get(key)
        if captured is None:
            assert self._device.type != "cuda", f"no graph was captured for {key}"
            return Drawn(*self._compute(key), self._inputs.plain(len(chunks)))
        captured.graph.replay()
        return Drawn(captured.logits_NV, captured.token_N, self._inputs.plain(len(chunks)))

    def _keys(self) -> list[_Key]:
        keys = [_Key(Bucket(rows, 0), False) for rows in self._inputs.buckets]
        for rows in self._inputs.buckets:
            keys += [_Key(Bucket(rows, size), wide) for size, wide in product(segment_buckets(rows), (False, True))]
        return sorted(keys, key=lambda key: (key.bucket.num_rows, key.bucket.num_segments, key.wide), reverse=True)

    def _compute(self, key: _Key) -> tuple[Tensor, Tensor]:
        num_rows = key.bucket.num_rows
        logits_NV = self._logits(self._inputs.batch(key.bucket, Extras(key.wide, key.wide, ends=False)))
        token_N = sample(logits_NV, *self._inputs.draws(num_rows))
        torch.clamp(token_N, min=0, out=self._inputs.last_token_R[:num_rows])  # what can't be drawn is never read
        return logits_NV, token_N


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
