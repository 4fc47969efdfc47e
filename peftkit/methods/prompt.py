"""Prompt tuning: trained embeddings in front of the text (Lester et al. 2021, arXiv:2104.08691).

The virtual tokens P (V, H) are themselves the parameters; how they stand before the text is in `soft_prompt.py`.
"""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from peftkit.errors import InputError
from peftkit.methods.method import MethodSettings
from peftkit.methods.soft_prompt import KEY, SoftPrompt


class PromptTuningConfig(MethodSettings):
    """Settings of prompt tuning."""

    kind: Literal["prompt"] = "prompt"
    num_virtual_tokens: int = Field(20, ge=1)
    """Virtual tokens in front of the text."""
    init: Literal["text", "vocab", "random"] = "vocab"
    """Start from a text's embeddings, from those of tokens drawn from the vocabulary, or from noise of their spread."""
    init_text: str | None = None
    """The text for `init: text`; repeated or cut to the number of virtual tokens."""

    @model_validator(mode="after")
    def _text_goes_with_init(self) -> Self:
        if self.init_text is not None and "init" not in self.model_fields_set:
            object.__setattr__(self, "init", "text")
        if self.init == "text" and not (self.init_text or "").strip():
            raise ValueError("init: text needs init_text")
        if self.init != "text" and self.init_text is not None:
            raise ValueError(f"init_text is only used with init: text, not with init: {self.init}")
        return self

    def identity(self) -> dict[str, Any]:
        return {"kind": self.kind, "num_virtual_tokens": self.num_virtual_tokens}

    def initial(
        self, embedding_VH: Tensor, tokenizer: PreTrainedTokenizerBase | None, generator: torch.Generator
    ) -> Tensor:
        """The starting virtual tokens, float32 (num_virtual_tokens, H), from the base's embedding matrix."""
        V = self.num_virtual_tokens
        if self.init == "text":
            if tokenizer is None:
                raise InputError("init: text needs the base's tokenizer: pass tokenizer= to attach", field="init")
            assert self.init_text is not None
            ids = tokenizer(self.init_text, add_special_tokens=False).input_ids
            rows = torch.tensor((ids * (V // len(ids) + 1))[:V])
            return embedding_VH[rows.to(embedding_VH.device)].float()
        if self.init == "vocab":
            rows = torch.randint(embedding_VH.shape[0], (V,), generator=generator)
            return embedding_VH[rows.to(embedding_VH.device)].float()
        noise = torch.randn(V, embedding_VH.shape[1], generator=generator)
        return noise.to(embedding_VH.device) * embedding_VH.float().std()


class VirtualTokens(nn.Module):
    """Holds P (V, H)."""

    def __init__(self, initial_VH: Tensor) -> None:
        super().__init__()
        self.prompt_embeddings = nn.Parameter(initial_VH)


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
        embedding = model.get_input_embeddings()
        assert isinstance(embedding, nn.Embedding)
        start = config.initial(embedding.weight.detach(), tokenizer, generator)
        self._tokens = VirtualTokens(start)
        super().__init__(model, config.num_virtual_tokens, self._tokens)

    def embeddings(self) -> Tensor:
        return self._tokens.prompt_embeddings

    def assign(self, tensors: Mapping[str, Tensor]) -> None:
        with torch.no_grad():
            self._tokens.prompt_embeddings.copy_(tensors[KEY])
