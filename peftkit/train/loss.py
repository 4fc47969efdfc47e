"""The loss of a batch: cross-entropy of the target tokens, summed; the vocabulary projection sees nothing else.

    hidden_NH = trunk(batch)[positions whose next token is a target]
    loss      = Σ_n cross_entropy(head(hidden_n), target_n)

Logits exist for a chunk of N at a time. Forward computes each chunk's gradient as well, while its logits are there,
so that backward needs neither logits nor a second projection. B rows, T tokens, N targets, H hidden, V vocabulary.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from peftkit.data import IGNORED, Batch, block_mask

CHUNK_LOGITS = 2**25
"""Logits held at once: 128 MiB of float32."""


def token_loss_sum(model: PreTrainedModel, batch: Batch) -> Tensor:
    """Summed cross-entropy of a batch's target tokens, a scalar of at least float32.

    Divide by the number of target tokens of the whole optimiser step, not of the batch.
    """
    hidden_BTH = last_hidden(model, batch)
    next_BT = batch.labels_BT[:, 1:]
    chosen_BT = next_BT != IGNORED
    head = model.get_output_embeddings()
    assert isinstance(head, nn.Module)
    return projected_loss_sum(hidden_BTH[:, :-1][chosen_BT], next_BT[chosen_BT], head)


def last_hidden(model: PreTrainedModel, batch: Batch) -> Tensor:
    """The trunk's output (B, T, H) for a batch; the samples of a packed row don't see each other."""
    mask = batch.attention_mask_BT
    if batch.segments_BT is not None:
        mask = block_mask(batch.segments_BT, str(model.config._attn_implementation), model.dtype)
    return model.base_model(
        input_ids=batch.input_ids_BT,
        attention_mask=mask,
        position_ids=batch.position_ids_BT,
        use_cache=False,
    ).last_hidden_state


def projected_loss_sum(hidden_NH: Tensor, targets_N: Tensor, head: nn.Module) -> Tensor:
    """Σ cross_entropy(head(hidden), target) with gradients for `hidden_NH` and the head's trainable parameters."""
    if not torch.is_grad_enabled():
        return sum((_sum(head, h, t) for h, t in _chunks(hidden_NH, targets_N, head)), hidden_NH.new_zeros(()).float())
    parameters = [parameter for parameter in head.parameters() if parameter.requires_grad]
    return _ProjectedLoss.apply(hidden_NH, targets_N, head, *parameters)


def _chunks(hidden_NH: Tensor, targets_N: Tensor, head: nn.Module) -> list[tuple[Tensor, Tensor]]:
    rows = chunk_rows(int(head.out_features))  # type: ignore[arg-type]
    return list(zip(hidden_NH.split(rows), targets_N.split(rows), strict=True))


def chunk_rows(vocabulary: int) -> int:
    """Targets projected at once."""
    return max(CHUNK_LOGITS // vocabulary, 1)


def _sum(head: nn.Module, hidden_NH: Tensor, targets_N: Tensor) -> Tensor:
    logits_NV = head(hidden_NH)
    return F.cross_entropy(
        logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32)), targets_N, reduction="sum"
    )


class _ProjectedLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden_NH: Tensor, targets_N: Tensor, head: nn.Module, *parameters: nn.Parameter) -> Tensor:
        losses: list[Tensor] = []
        hidden_grads: list[Tensor] = []
        grads = [torch.zeros_like(parameter) for parameter in parameters]
        for hidden, targets in _chunks(hidden_NH, targets_N, head):
            with torch.enable_grad():
                leaf = hidden.detach().requires_grad_()
                loss = _sum(head, leaf, targets)
                grad, *chunk_grads = torch.autograd.grad(loss, [leaf, *parameters])
            losses.append(loss.detach())
            hidden_grads.append(grad)
            for total, chunk in zip(grads, chunk_grads, strict=True):
                total += chunk
        ctx.save_for_backward(torch.cat(hidden_grads), *grads)
        return torch.stack(losses).sum()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (grad_output,) = grad_outputs
        hidden_grad, *grads = ctx.saved_tensors
        return hidden_grad * grad_output, None, None, *(grad * grad_output for grad in grads)
