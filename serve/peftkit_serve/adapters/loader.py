"""From an adapter folder to what the pool makes resident: read, validated and packed on a thread of its own.

    LoRA, bottleneck               weights for a slot of adapter memory
    prompt tuning, P-tuning        embeddings of virtual tokens, whose keys and values the pool has computed
    prefix tuning, P-tuning v2     keys and values of virtual tokens themselves

The step loop never waits for a disk. One worker thread does all loads in turn, so an adapter that is asked for under
several names is packed once.
"""

import weakref
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig

from peftkit.artifact import Artifact, Part, read_adapter
from peftkit.base import BaseInfo, module_shapes
from peftkit.errors import AdapterError, TooLargeError, UnsupportedError
from peftkit.methods import (
    BottleneckConfig,
    LoraConfig,
    MethodConfig,
    PrefixTuningConfig,
    PromptTuningConfig,
    PTuningConfig,
    PTuningV2Config,
)
from peftkit.methods.soft_prompt import KEY
from peftkit_kernels import MAX_RANK, max_width
from peftkit_serve.adapters.packing import BaseLinear, PackedAdapter, pack_bottleneck, pack_lora
from peftkit_serve.models.spec import ModelSpec


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class LoadedAdapter:
    """An adapter in host memory, known to fit the base."""

    uid: str
    configs: tuple[MethodConfig, ...]
    """Of its one or two methods."""
    record: dict[str, Any]
    """What `peftkit.json` says of its making; empty for a folder that another program wrote."""
    weights: PackedAdapter | None = None
    """What a slot holds."""
    embeddings_VH: Tensor | None = None
    """Virtual tokens × hidden, on the CPU."""
    kv_VL2KD: Tensor | None = None
    """Virtual keys and values of each layer, on the CPU."""

    @property
    def num_virtual(self) -> int:
        """Virtual tokens at the head of each request."""
        return next((len(one) for one in (self.embeddings_VH, self.kv_VL2KD) if one is not None), 0)

    def pinned(self) -> "LoadedAdapter":
        """The same in pinned memory, from which a GPU copies while the host goes on."""
        return replace(
            self,
            weights=None if self.weights is None else self.weights.pinned(),
            embeddings_VH=None if self.embeddings_VH is None else self.embeddings_VH.pin_memory(),
            kv_VL2KD=None if self.kv_VL2KD is None else self.kv_VL2KD.pin_memory(),
        )

    @property
    def nbytes(self) -> int:
        """Bytes that it takes: of adapter memory for weights, of its tensor for virtual tokens."""
        return sum(one.nbytes for one in (self.weights, self.embeddings_VH, self.kv_VL2KD) if one is not None)


class AdapterLoader:
    """Loads adapters for one base. Its threads touch no engine state."""

    def __init__(
        self,
        base: BaseInfo,
        spec: ModelSpec,
        *,
        dtype: torch.dtype,
        base_linear: BaseLinear,
        max_weight_bytes: int,
        max_virtual_tokens: int,
        pinned: bool = False,
    ) -> None:
        """
        dtype: that of adapter memory.
        base_linear: the base's weights, from which DoRA's scales are computed; called on the loader's thread.
        max_weight_bytes: size of adapter memory; weights that need more can never be resident and are refused.
        max_virtual_tokens: virtual tokens that leave room for a prompt and an answer; more are refused.
        pinned: hold weights in pinned host memory, for a GPU.
        """
        self._pinned = pinned
        self._base = base
        self._spec = spec
        self._dtype = dtype
        self._shapes = module_shapes(AutoConfig.from_pretrained(base.path))
        self._base_linear = base_linear
        self._max_weight_bytes = max_weight_bytes
        self._max_virtual_tokens = max_virtual_tokens
        self._loaded: weakref.WeakValueDictionary[str, LoadedAdapter] = weakref.WeakValueDictionary()
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="peftkit-adapter-loader")
        self._stream = torch.cuda.Stream() if pinned else None  # DoRA's scales are computed beside the steps

    def submit(self, path: str | Path) -> Future[LoadedAdapter]:
        """Starts to load a folder; the future raises AdapterError or its children for one that can't be served."""
        return self._worker.submit(self._load, Path(path))

    def _load(self, path: Path) -> LoadedAdapter:
        artifact = read_adapter(path, base=self._base)
        loaded = self._loaded.get(artifact.uid)
        if loaded is None:
            loaded = self._loaded[artifact.uid] = self._pack(artifact)
        return loaded

    @torch.inference_mode()
    def _pack(self, artifact: Artifact) -> LoadedAdapter:
        made: dict[str, Any] = {}
        for part in artifact.parts:
            try:
                with torch.cuda.stream(self._stream):
                    field, packed = self._pack_part(part)
            except AdapterError as error:
                raise type(error)(f"{artifact.path}: {error}", field=error.field) from error
            if field in made:
                raise UnsupportedError(f"{artifact.path}: {artifact.kind} can't be served together, each alone can")
            made[field] = packed
        configs = tuple(part.config for part in artifact.parts)
        loaded = LoadedAdapter(artifact.uid, configs, artifact.record, **made)
        self._check_size(artifact.path, loaded)
        return loaded.pinned() if self._pinned else loaded

    def _pack_part(self, part: Part) -> tuple[str, PackedAdapter | Tensor]:
        """The field of `LoadedAdapter` that a method fills, and what it puts there."""
        tensors = part.tensors
        match part.config:
            case LoraConfig() as config:
                return "weights", pack_lora(
                    tensors,
                    config.resolve(self._shapes),
                    self._spec,
                    dtype=self._dtype,
                    base_linear=self._base_linear,
                    token_ids=config.token_rows(self._shapes, tied=self._spec.tied_embeddings),
                )
            case BottleneckConfig() as config:
                return "weights", pack_bottleneck(tensors, config, self._spec, dtype=self._dtype)
            case PromptTuningConfig() | PTuningConfig():
                return "embeddings_VH", tensors[KEY]
            case PrefixTuningConfig() | PTuningV2Config():
                sizes = (self._spec.num_layers, 2, self._spec.num_kv_heads, self._spec.head_dim)
                return "kv_VL2KD", tensors[KEY].unflatten(1, sizes)

    def _check_size(self, path: Path, loaded: LoadedAdapter) -> None:
        for layer in loaded.weights.layers if loaded.weights is not None else ():
            rank, width = max(span.rank for span in layer.lora), max(span.width for span in layer.bottleneck)
            if rank > MAX_RANK:
                raise TooLargeError(f"{path} has rank {rank}, ranks up to {MAX_RANK} can be served")
            if width > (most := max_width(self._spec.hidden_size)):
                raise TooLargeError(f"{path} has a bottleneck of {width}, sizes up to {most} can be served")
        if loaded.weights is not None and loaded.weights.nbytes > self._max_weight_bytes:
            raise TooLargeError(
                f"{path} needs {loaded.weights.nbytes} bytes of adapter memory, there are {self._max_weight_bytes}: "
                "give the engine more by adapter_bytes"
            )
        if loaded.num_virtual > self._max_virtual_tokens:
            raise TooLargeError(
                f"{path} has {loaded.num_virtual} virtual tokens, context and KV memory leave room for "
                f"{self._max_virtual_tokens}"
            )
