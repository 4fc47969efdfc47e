"""P-tuning: virtual tokens that a small network produces (Liu et al. 2021, arXiv:2103.10385).

The virtual tokens P (V, H) stand before the text as in `soft_prompt.py` and are computed from an embedding E (V, H):

    mlp:   P = W₃ relu(W₂ relu(W₁ E))        W₁ (h, H), W₂ (h, h), W₃ (H, h)
    lstm:  P = W₂ relu(W₁ LSTM(E))           LSTM of h units in each direction, W₁ (2h, 2h), W₂ (H, 2h)

with biases, as HF PEFT has them. The network is trained and kept in checkpoints; P alone is exported. With `init: text`
the network's output comes on top of the embeddings of a text, and its last layer starts at zero: P starts as the text.
"""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from peftkit.methods.method import MAX_ENCODER, StartsFromText, initial_token_ids, input_embedding, seeded
from peftkit.methods.soft_prompt import KEY, SoftPrompt, VirtualTokens


class PTuningConfig(StartsFromText):
    """Settings of P-tuning."""

    kind: Literal["ptuning"] = "ptuning"
    init: Literal["random", "text"] = "random"
    """Where the virtual tokens start: anywhere, as HF PEFT's, or at the embeddings of `init_text`."""
    encoder: Literal["mlp", "lstm"] = "mlp"
    """The network that produces them."""
    encoder_hidden_size: int | None = Field(default=None, ge=1, le=MAX_ENCODER)
    """Width h of the network; null is the model's hidden size."""
    encoder_num_layers: int = Field(default=2, ge=1, le=64)
    """Layers of the LSTM; the MLP always has three."""
    encoder_dropout: float = Field(default=0.0, ge=0.0, lt=1.0)
    """Dropout between layers of the LSTM."""

    def identity(self) -> dict[str, Any]:
        return {"kind": "prompt", "num_virtual_tokens": self.num_virtual_tokens}


class PromptEncoder(nn.Module):
    """E and the network over it, and what its output comes on top of: `start_VH` of a text, or nothing."""

    def __init__(self, config: PTuningConfig, hidden_size: int, start_VH: Tensor | None) -> None:
        super().__init__()
        H, h = hidden_size, config.encoder_hidden_size or hidden_size
        self.start_VH: Tensor | None
        self.register_buffer("start_VH", start_VH, persistent=False)
        self.embedding = nn.Embedding(config.num_virtual_tokens, H)
        if config.encoder == "lstm":
            self.lstm_head = nn.LSTM(
                H,
                h,
                num_layers=config.encoder_num_layers,
                dropout=config.encoder_dropout,
                bidirectional=True,
                batch_first=True,
            )
            self.mlp_head = nn.Sequential(nn.Linear(2 * h, 2 * h), nn.ReLU(), nn.Linear(2 * h, H))
        else:
            self.lstm_head = None
            self.mlp_head = nn.Sequential(nn.Linear(H, h), nn.ReLU(), nn.Linear(h, h), nn.ReLU(), nn.Linear(h, H))
        if start_VH is not None:
            for parameter in self.mlp_head[-1].parameters():
                nn.init.zeros_(parameter)

    def forward(self) -> Tensor:
        hidden = self.embedding.weight
        if self.lstm_head is not None:
            hidden = self.lstm_head(hidden[None])[0][0]
        output_VH = self.mlp_head(hidden)
        return output_VH if self.start_VH is None else self.start_VH + output_VH


class PTuning(SoftPrompt):
    """P-tuning attached to a model."""

    kind: ClassVar[str] = "ptuning"

    def __init__(
        self,
        model: PreTrainedModel,
        config: PTuningConfig,
        *,
        tokenizer: PreTrainedTokenizerBase | None,
        generator: torch.Generator,
    ) -> None:
        self.config = config
        embedding = input_embedding(model)
        start_VH = None
        if config.init == "text":
            V, vocab_size = config.num_virtual_tokens, embedding.num_embeddings
            ids = initial_token_ids(config.init_text, V, vocab_size, tokenizer, generator)
            start_VH = embedding.weight.detach()[ids.to(embedding.weight.device)].float()
        with seeded(generator):
            encoder = PromptEncoder(config, embedding.embedding_dim, start_VH)
        super().__init__(model, config.num_virtual_tokens, encoder.to(embedding.weight.device))

    def assign(self, tensors: Mapping[str, Tensor]) -> None:
        """Takes the exported tokens; the network is given up for them."""
        device = input_embedding(self._model).weight.device
        self.replace_encoder(VirtualTokens(tensors[KEY].to(device, torch.float32, copy=True)))
