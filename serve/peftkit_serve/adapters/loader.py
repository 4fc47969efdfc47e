"""From an adapter folder to what the pool makes resident: read, validated and packed on a thread of its own.

The step loop never waits for a disk. One worker thread does all loads in turn, so an adapter that is asked for under
several names is packed once.
"""

import weakref
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig

from peftkit.artifact import Artifact, read_adapter
from peftkit.base import BaseInfo, module_shapes
from peftkit.errors import AdapterError, UnsupportedError
from peftkit.methods import LoraConfig, MethodConfig, PromptTuningConfig, PTuningConfig
from peftkit_serve.adapters.memory import PackedLora, pack_lora
from peftkit_serve.models.spec import ModelSpec


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class LoadedAdapter:
    """An adapter in host memory, known to fit the base; `lora` or `embeddings_VH` is set, by its kind."""

    uid: str
    config: MethodConfig
    record: dict[str, Any]
    """What `peftkit.json` says of its making; empty for a folder that another program wrote."""
    lora: PackedLora | None = None
    embeddings_VH: Tensor | None = None
    """Virtual tokens × hidden, on the CPU."""

    @property
    def num_virtual(self) -> int:
        """Virtual tokens at the head of each request; 0 for a LoRA."""
        return 0 if self.embeddings_VH is None else self.embeddings_VH.shape[0]

    @property
    def nbytes(self) -> int:
        """Bytes that it takes: of adapter memory for a LoRA, of its embeddings for a prompt."""
        if self.lora is not None:
            return self.lora.nbytes
        return 0 if self.embeddings_VH is None else self.embeddings_VH.nbytes


class AdapterLoader:
    """Loads adapters for one base. Its threads touch no engine state."""

    def __init__(
        self, base: BaseInfo, spec: ModelSpec, *, dtype: torch.dtype, max_lora_bytes: int, max_virtual_tokens: int
    ) -> None:
        """
        dtype: that of adapter memory.
        max_lora_bytes: size of adapter memory; a LoRA that needs more can never be resident and is refused.
        max_virtual_tokens: virtual tokens that leave room for a prompt and an answer; more are refused.
        """
        self._base = base
        self._spec = spec
        self._dtype = dtype
        self._shapes = module_shapes(AutoConfig.from_pretrained(base.path))
        self._max_lora_bytes = max_lora_bytes
        self._max_virtual_tokens = max_virtual_tokens
        self._loaded: weakref.WeakValueDictionary[str, LoadedAdapter] = weakref.WeakValueDictionary()
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="peftkit-adapter-loader")

    def submit(self, path: str | Path) -> Future[LoadedAdapter]:
        """Starts to load a folder; the future raises AdapterError or its children for one that can't be served."""
        return self._worker.submit(self._load, Path(path))

    def _load(self, path: Path) -> LoadedAdapter:
        artifact = read_adapter(path, base=self._base)
        loaded = self._loaded.get(artifact.uid)
        if loaded is None:
            loaded = self._loaded[artifact.uid] = self._pack(artifact)
        return loaded

    def _pack(self, artifact: Artifact) -> LoadedAdapter:
        if isinstance(artifact.config, LoraConfig):
            sites = artifact.config.resolve(self._shapes)
            lora = pack_lora(artifact.tensors, sites, self._spec, dtype=self._dtype)
            if lora.nbytes > self._max_lora_bytes:
                raise AdapterError(
                    f"{artifact.path} needs {lora.nbytes} bytes of adapter memory, there are {self._max_lora_bytes}"
                )
            return LoadedAdapter(artifact.uid, artifact.config, artifact.record, lora=lora)
        if not isinstance(artifact.config, PromptTuningConfig | PTuningConfig):
            raise UnsupportedError(f"{artifact.path}: adapters of kind {artifact.config.kind} can't be served")
        embeddings_VH = artifact.tensors["prompt_embeddings"]
        if embeddings_VH.shape[0] > self._max_virtual_tokens:
            raise AdapterError(
                f"{artifact.path} has {embeddings_VH.shape[0]} virtual tokens, context and KV memory leave room for "
                f"{self._max_virtual_tokens}"
            )
        return LoadedAdapter(artifact.uid, artifact.config, artifact.record, embeddings_VH=embeddings_VH)
