"""The loss of a batch: cross-entropy of the target tokens, summed; the vocabulary projection sees nothing else.

    hidden_NH = trunk(batch)[positions whose next token is a target]
    loss      = Σ_n cross_entropy(head(hidden_n), target_n)

Logits exist for a chunk of N at a time. Forward computes each chunk's gradient as well, while its logits are there,
so that backward needs neither logits nor a second projection. Where the head is nothing but a frozen matrix W, a chunk
is three steps in memory that the next chunk takes over:

    logits  = hidden Wᵀ
    logits  ← softmax(logits) - onehot(target)
    dhidden = logits W

Any other head, one that is trained or adapted or has a bias, runs its own forward and backward: `fuse` logs it, and it
is off the fast path. B rows, T tokens, N targets, H hidden, V vocabulary.
"""
# pyright: reportIncompatibleMethodOverride=false

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from peftkit.data import IGNORED, Batch, block_mask
from peftkit.methods.attention import bounded
from peftkit.methods.fused import why_no_matrix
from peftkit_kernels import cross_entropy, cross_entropy_grad

CHUNK_LOGITS = 2**25
"""Logits held at once by a head that runs its own backward: 128 MiB of float32, and four times that in between."""

CHUNK_BYTES = 2**28
"""Bytes of logits held at once of a head that is a frozen matrix: a thousand rows of bfloat16 over 128256 tokens, which
is as quick as all rows together."""

_TILE = 128  # rows of a chunk are a multiple of a matrix product's tile


def token_loss_sum(model: PreTrainedModel, batch: Batch) -> Tensor:
    """Summed cross-entropy of a batch's target tokens, a scalar of at least float32.

    Divide by the number of target tokens of the whole optimiser step, not of the batch.
    """
    hidden_BTH = last_hidden(model, batch)
    next_BT = F.pad(batch.labels_BT[:, 1:], (0, 1), value=IGNORED)
    # their number is known: looking for it would wait for the device
    index_N = torch.nonzero_static(next_BT.flatten() != IGNORED, size=batch.num_target_tokens).squeeze(1)
    head = model.get_output_embeddings()
    assert isinstance(head, nn.Module)
    return projected_loss_sum(
        _Rows.apply(hidden_BTH.flatten(0, 1), index_N), next_BT.flatten().index_select(0, index_N), head
    )


def last_hidden(model: PreTrainedModel, batch: Batch) -> Tensor:
    """The trunk's output (B, T, H) for a batch; the samples of a packed row don't see each other."""
    arguments = bounded(model, len(batch.input_ids_BT), batch.bounds_S, batch.longest)
    if not arguments:
        mask = batch.attention_mask_BT
        if batch.segments_BT is not None:
            mask = block_mask(batch.segments_BT, str(model.config._attn_implementation), model.dtype)
        arguments = {"attention_mask": mask}
    return model.base_model(
        input_ids=batch.input_ids_BT, position_ids=batch.position_ids_BT, use_cache=False, **arguments
    ).last_hidden_state


def projected_loss_sum(hidden_NH: Tensor, targets_N: Tensor, head: nn.Module) -> Tensor:
    """Σ cross_entropy(head(hidden), target) with gradients for `hidden_NH` and the head's trainable parameters."""
    if why_no_matrix(head, hidden_NH.dtype) is None:
        weight_VH = head.get_parameter("weight")
        if torch.is_grad_enabled() and hidden_NH.requires_grad:
            return _FrozenLoss.apply(hidden_NH, targets_N, weight_VH)
        chunks = _projected(hidden_NH, weight_VH)
        return torch.cat([cross_entropy(logits_NV, targets_N[part]) for part, logits_NV in chunks]).sum()
    if not torch.is_grad_enabled():
        return sum((_sum(head, h, t) for h, t in _chunks(hidden_NH, targets_N, head)), hidden_NH.new_zeros(()).float())
    parameters = [parameter for parameter in head.parameters() if parameter.requires_grad]
    return _ProjectedLoss.apply(hidden_NH, targets_N, head, *parameters)


def chunk_rows(vocabulary: int) -> int:
    """Targets projected at once by a head that runs its own backward."""
    return max(CHUNK_LOGITS // vocabulary, 1)


class _Rows(torch.autograd.Function):
    """Some rows, all different: index_select whose gradient is a copy, not a sum."""

    @staticmethod
    def forward(ctx: Any, x_XH: Tensor, index_N: Tensor) -> Tensor:
        ctx.save_for_backward(index_N)
        ctx.num_rows = x_XH.shape[0]
        return x_XH.index_select(0, index_N)

    @staticmethod
    def backward(ctx: Any, dy_NH: Tensor) -> tuple[Tensor, None]:
        (index_N,) = ctx.saved_tensors
        return dy_NH.new_zeros(ctx.num_rows, dy_NH.shape[1]).index_copy_(0, index_N, dy_NH), None


class _FrozenLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden_NH: Tensor, targets_N: Tensor, weight_VH: Tensor) -> Tensor:
        losses: list[Tensor] = []
        gradient_NH = torch.empty_like(hidden_NH)
        for part, logits_NV in _projected(hidden_NH, weight_VH):
            losses.append(cross_entropy_grad(logits_NV, targets_N[part]))
            torch.mm(logits_NV, weight_VH, out=gradient_NH[part])
        ctx.save_for_backward(gradient_NH)
        return torch.cat(losses).sum()

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        (gradient_NH,) = ctx.saved_tensors
        return gradient_NH * grad_output, None, None


def _projected(hidden_NH: Tensor, weight_VH: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """A chunk's rows and their logits, in the memory that the chunk before had."""
    num_targets, vocabulary = len(hidden_NH), len(weight_VH)
    rows = max(CHUNK_BYTES // (vocabulary * hidden_NH.element_size()), 1)
    rows = min(rows // _TILE * _TILE or rows, max(num_targets, 1))
    logits_NV = hidden_NH.new_empty(rows, vocabulary)
    for start in range(0, max(num_targets, 1), rows):
        chunk_NH = hidden_NH[start : start + rows]
        yield slice(start, start + rows), torch.mm(chunk_NH, weight_VH.t(), out=logits_NV[: len(chunk_NH)])


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


def _chunks(hidden_NH: Tensor, targets_N: Tensor, head: nn.Module) -> list[tuple[Tensor, Tensor]]:
    rows = chunk_rows(int(head.out_features))  # type: ignore[arg-type]
    return list(zip(hidden_NH.split(rows), targets_N.split(rows), strict=True))


def _sum(head: nn.Module, hidden_NH: Tensor, targets_N: Tensor) -> Tensor:
    logits_NV = head(hidden_NH)
    return F.cross_entropy(
        logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32)), targets_N, reduction="sum"
    )
