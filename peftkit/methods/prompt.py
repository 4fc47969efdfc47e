"""Prompt tuning: trained embeddings in front of the text (Lester et al. 2021, arXiv:2104.08691).

The virtual tokens P (V, H) are themselves the parameters; how they stand before the text is in `soft_prompt.py`.
"""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from peftkit.methods.method import StartsFromText, initial_token_ids, input_embedding
from peftkit.methods.soft_prompt import KEY, SoftPrompt, VirtualTokens


class PromptTuningConfig(StartsFromText):
    """Settings of prompt tuning."""

    kind: Literal["prompt"] = "prompt"
    init: Literal["text", "vocab", "random"] = "vocab"
    """Start from a text's embeddings, from those of tokens drawn from the vocabulary, or from noise of their spread."""

    def identity(self) -> dict[str, Any]:
        return {"kind": self.kind, "num_virtual_tokens": self.num_virtual_tokens}

    def initial(
        self, embedding_VH: Tensor, tokenizer: PreTrainedTokenizerBase | None, generator: torch.Generator
    ) -> Tensor:
        """The starting virtual tokens, float32 (num_virtual_tokens, H), from the base's embedding matrix."""
        V, device = self.num_virtual_tokens, embedding_VH.device
        if self.init == "random":
            noise = torch.randn(V, embedding_VH.shape[1], generator=generator)
            return noise.to(device) * embedding_VH.float().std()
        rows = initial_token_ids(self.init_text, V, embedding_VH.shape[0], tokenizer, generator)
        return embedding_VH[rows.to(device)].float()


class PromptTuning(SoftPrompt):
    """Prompt tuning attached to a model."""

    kind: ClassVar[str] = "prompt"

    def __init__(
        self,
        model: PreTrainedModel,
        config: PromptTuningConfig,
        *,
        tokenizer: PreTrainedTokenizerBase | None,
        generator: torch.Generator,
    ) -> None:
        self.config = config
        embedding = input_embedding(model)
        start = config.initial(embedding.weight.detach(), tokenizer, generator)
        super().__init__(model, config.num_virtual_tokens, VirtualTokens(start))

    def assign(self, tensors: Mapping[str, Tensor]) -> None:
        with torch.no_grad():
            self.parameters()[KEY].copy_(tensors[KEY])
