"""Virtual tokens in front of the text: what prompt tuning and P-tuning share.

P (V, H) virtual tokens stand at positions 0 … V−1, the text's tokens at V, V+1, … :

    hidden = trunk([P ; embed(x)])[V:]

The trunk is hooked, so that everything above it (loss, `logits_to_keep`, `generate` with a cache) sees the text's
positions alone. Positions come from the attention mask: [virtual][padding][text] gives each sequence of a left-padded
batch what it gives alone. P is float32 and is cast to the embeddings' dtype.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from peftkit.errors import UnsupportedError
from peftkit.methods.method import Method, exported, input_embedding, text_positions

KEY = "prompt_embeddings"


class VirtualTokens(nn.Module):
    """Holds P (V, H) itself."""

    def __init__(self, initial_VH: Tensor) -> None:
        super().__init__()
        self.prompt_embeddings = nn.Parameter(initial_VH)

    def forward(self) -> Tensor:
        return self.prompt_embeddings


class SoftPrompt(Method):
    """Puts the virtual tokens that `encoder()` gives, float32 (V, H), before the text by two hooks on the trunk.

    `encoder` holds the trainable parameters; it becomes the model's submodule `virtual_tokens`, so that the model's own
    `parameters()` and `to()` reach it.
    """

    def __init__(self, model: PreTrainedModel, num_virtual_tokens: int, encoder: nn.Module) -> None:
        self._model = model
        self._num_virtual = num_virtual_tokens
        self._prepended = False
        self.replace_encoder(encoder)
        trunk = model.base_model
        self._hooks = [
            trunk.register_forward_pre_hook(self._prepend, with_kwargs=True),
            trunk.register_forward_hook(self._strip),
        ]

    def parameters(self) -> dict[str, nn.Parameter]:
        return dict(self._encoder.named_parameters())

    def export(self) -> dict[str, Tensor]:
        return {KEY: exported(self._encoder())}

    def expected(self) -> dict[str, tuple[int, ...]]:
        return {KEY: (self._num_virtual, input_embedding(self._model).embedding_dim)}

    def replace_encoder(self, encoder: nn.Module) -> None:
        """Takes another source of virtual tokens in the place of the present one."""
        self._encoder = encoder.train(self._model.training)
        self._model.add_module("virtual_tokens", encoder)

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
            # asked for each time: an adapter that was attached later may stand in its place
            embeds = input_embedding(self._model)(kwargs["input_ids"])
        B, T = embeds.shape[:2]
        V = self._num_virtual
        cache = kwargs.get("past_key_values")
        cached = 0 if cache is None else int(cache.get_seq_length())
        self._prepended = cached == 0
        mask = self._text_mask(kwargs.get("attention_mask"), B, T + max(cached - V, 0), embeds.device)
        window = getattr(self._model.config, "sliding_window", None)
        if window is not None and V + mask.shape[-1] > window:
            raise UnsupportedError(
                f"{self.config.kind}: {mask.shape[-1]} tokens behind {V} virtual ones pass this base's attention "
                f"window of {window}, which would hide the virtual ones: use shorter rows, or prefix or ptuning_v2"
            )
        positions = text_positions(kwargs.get("position_ids"), mask, T) + V
        if self._prepended:
            embeds = torch.cat([self._encoder().to(embeds.dtype).expand(B, -1, -1), embeds], 1)
            positions = torch.cat([torch.arange(V, device=embeds.device).expand(B, V), positions], 1)
        kwargs.pop("cache_position", None)
        kwargs.update(
            input_ids=None,
            inputs_embeds=embeds,
            position_ids=positions,
            attention_mask=_in_front(mask, V),
        )
        return (), kwargs

    def _strip(self, _: nn.Module, args: Any, output: Any) -> Any:
        if self._prepended:
            output.last_hidden_state = output.last_hidden_state[:, self._num_virtual :]
        return output

    def _text_mask(self, mask: Any, batch: int, length: int, device: torch.device) -> Tensor:
        if mask is None:
            return torch.ones(batch, length, dtype=torch.long, device=device)
        if not isinstance(mask, Tensor) or mask.dim() not in (2, 4):
            raise UnsupportedError(
                "prompt tuning needs an attention mask (batch, length) or (batch, 1, length, length)"
            )
        assert mask.shape[-1] == length, f"mask covers {mask.shape[-1]} text positions, cache and input {length}"
        return mask


def _in_front(mask: Tensor, num_virtual: int) -> Tensor:
    """A text's mask (B, T) or (B, 1, T, T) with virtual tokens in front that each text token sees.

    They see only themselves, so that they are the same to every one of a packed row's samples.
    """
    if mask.dim() == 2:
        return torch.cat([mask.new_ones(mask.shape[0], num_virtual), mask], 1)
    B, _, T, _ = mask.shape
    seen, hidden = (True, False) if mask.dtype == torch.bool else (0.0, torch.finfo(mask.dtype).min)
    whole = mask.new_full((B, 1, num_virtual + T, num_virtual + T), hidden)
    whole[..., :num_virtual] = seen
    later = torch.ones(num_virtual, num_virtual, dtype=torch.bool, device=mask.device).triu(1)
    whole[..., :num_virtual, :num_virtual].masked_fill_(later, hidden)
    whole[..., num_virtual:, num_virtual:] = mask
    return whole
