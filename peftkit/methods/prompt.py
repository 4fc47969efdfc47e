"""Prompt tuning: trained embeddings in front of the text (Lester et al. 2021, arXiv:2104.08691).

P (V, H) virtual tokens stand at positions 0 … V−1, the text's tokens at V, V+1, … :

    hidden = trunk([P ; embed(x)])[V:]

The trunk is hooked, so that everything above it (loss, `logits_to_keep`, `generate` with a cache) sees the text's
positions alone. Positions come from the attention mask: [virtual][padding][text] gives each sequence of a left-padded
batch what it gives alone. P is float32 and is cast to the embeddings' dtype.
"""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from peftkit.errors import InputError, UnsupportedError
from peftkit.methods.method import Method, MethodSettings, exported

KEY = "prompt_embeddings"


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
    """Holds P (V, H), so that the model's own `parameters()` and `to()` reach it."""

    def __init__(self, initial_VH: Tensor) -> None:
        super().__init__()
        self.prompt_embeddings = nn.Parameter(initial_VH)


class PromptTuning(Method):
    """Prompt tuning attached to a model by two hooks on its trunk."""

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
        self._model = model
        embedding = model.get_input_embeddings()
        assert isinstance(embedding, nn.Embedding)
        self._embedding = embedding
        self._virtual = VirtualTokens(config.initial(embedding.weight.detach(), tokenizer, generator))
        self._prepended = False
        model.add_module("virtual_tokens", self._virtual)
        trunk = model.base_model
        self._hooks = [
            trunk.register_forward_pre_hook(self._prepend, with_kwargs=True),
            trunk.register_forward_hook(self._strip),
        ]

    def parameters(self) -> dict[str, nn.Parameter]:
        return {KEY: self._virtual.prompt_embeddings}

    def export(self) -> dict[str, Tensor]:
        return {KEY: exported(self._virtual.prompt_embeddings)}

    def expected(self) -> dict[str, tuple[int, ...]]:
        return {KEY: tuple(self._virtual.prompt_embeddings.shape)}

    def assign(self, tensors: Mapping[str, Tensor]) -> None:
        with torch.no_grad():
            self._virtual.prompt_embeddings.copy_(tensors[KEY])

    def detach(self) -> None:
        for hook in self._hooks:
            hook.remove()
        del self._model.virtual_tokens

    def _prepend(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[()], dict[str, Any]]:
        """Extends the trunk's inputs by the virtual tokens; only mask and positions once a cache holds them."""
        if args:
            kwargs["input_ids"], *rest = args
            assert not rest, "a trunk is called with keywords beyond input_ids"
        embeds = kwargs.get("inputs_embeds")
        if embeds is None:
            embeds = self._embedding(kwargs["input_ids"])
        B, T = embeds.shape[:2]
        V = self.config.num_virtual_tokens
        cache = kwargs.get("past_key_values")
        cached = 0 if cache is None else int(cache.get_seq_length())
        self._prepended = cached == 0
        mask = self._text_mask(kwargs.get("attention_mask"), B, T + max(cached - V, 0), embeds.device)
        positions = kwargs.get("position_ids")
        if positions is None:
            positions = (mask.long().cumsum(-1) - 1).clamp(min=0)[:, -T:]
        positions = positions.expand(B, T) + V
        if self._prepended:
            embeds = torch.cat([self._virtual.prompt_embeddings.to(embeds.dtype).expand(B, -1, -1), embeds], 1)
            positions = torch.cat([torch.arange(V, device=embeds.device).expand(B, V), positions], 1)
        kwargs.pop("cache_position", None)
        kwargs.update(
            input_ids=None,
            inputs_embeds=embeds,
            position_ids=positions,
            attention_mask=torch.cat([mask.new_ones(B, V), mask], 1),
        )
        return (), kwargs

    def _strip(self, _: nn.Module, args: Any, output: Any) -> Any:
        if self._prepended:
            output.last_hidden_state = output.last_hidden_state[:, self.config.num_virtual_tokens :]
        return output

    def _text_mask(self, mask: Any, batch: int, length: int, device: torch.device) -> Tensor:
        if mask is None:
            return torch.ones(batch, length, dtype=torch.long, device=device)
        if not isinstance(mask, Tensor) or mask.dim() != 2:
            raise UnsupportedError("prompt tuning needs a two-dimensional attention mask (batch, length)")
        assert mask.shape[1] == length, f"mask covers {mask.shape[1]} text positions, cache and input {length}"
        return mask
