"""Decode steps as CUDA graphs: a step of single tokens is one launch, whatever its adapters.

There is a graph for each (rows, segments, extras) that `DecodeInputs` pads steps to. It is captured once, before the
first request, and holds for all lengths and adapters, because what differs between two steps lies in buffers and
tables that it reads: block tables, contexts, segments, where each slot's weights are and how large.

On a CPU the same function runs on the same padded buffers, without a graph.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from peftkit_kernels import sample
from peftkit_serve.batch import Batch, Extras
from peftkit_serve.decode_inputs import Bucket, DecodeInputs, segment_buckets
from peftkit_serve.plan import Chunk

logger = logging.getLogger(__name__)

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

    def capture(self) -> None:
        """Captures every graph, the largest first, so that the others find their memory in its; nothing on a CPU.

        Each function is run once before, which compiles what it launches. No request may be in the pages.
        """
        if self._device.type != "cuda":
            return
        begun = time.perf_counter()
        pool = torch.cuda.graph_pool_handle()
        with torch.inference_mode():
            for key in self._keys():
                self._compute(key)
                torch.cuda.synchronize(self._device)
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                    results = self._compute(key)
                self._graphs[key] = _Graph(graph, *results)
        logger.info("captured %d decode graphs in %.1f s", len(self._graphs), time.perf_counter() - begun)

    @property
    def num_graphs(self) -> int:
        """Graphs that were captured."""
        return len(self._graphs)

    def takes(self, chunks: Sequence[Chunk], extras: Extras) -> bool:
        """Whether a step with these adapters' extras can run here: single tokens that are not scored.

        The ends of the decoder are looked up on the host, so a step that has some is not for a graph.
        """
        return not extras.ends and all(len(chunk.token_ids) == 1 and not chunk.targets for chunk in chunks)

    def run(self, chunks: Sequence[Chunk], extras: Extras) -> Drawn:
        """Starts a step that `takes` has accepted. Its rows are the chunks in their order, more may stand behind."""
        key = _Key(self._inputs.write(chunks), extras.bottlenecks or extras.head_lora)
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
        batch = self._inputs.batch(key.bucket, Extras(key.wide, key.wide, ends=False))
        logits_NV = self._logits(batch)
        return logits_NV, sample(logits_NV, *self._inputs.draws(key.bucket.num_rows))
