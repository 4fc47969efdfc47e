"""A training step on tensors that have shapes and no data: what it holds at its fullest moment.

    hidden_BTH = trunk(batch)         as in training, with the adapter, the attention and the checkpointing that are set
    loss       = the loss of so many targets, in chunks
    backward

The model's own code runs under torch's FakeTensorMode, which computes shapes, dtypes and devices and allocates nothing,
and every storage that it makes is counted from its making to its end. So what autograd keeps, a matrix dequantised from
4 bits, a mask of packed rows and a layer recomputed are all in it, on a CPU and a GPU, without a formula of their own.
B rows, T tokens, H hidden, N targets.
"""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel

from peftkit.data import Batch
from peftkit.data.sampler import Shape
from peftkit.methods import holding
from peftkit.train.loss import last_hidden, projected_loss_sum

_GPU_BLOCK = 512
"""Bytes in multiples of which a GPU's allocator gives memory."""


@dataclass(frozen=True, slots=True)
class StepMemory:
    """Bytes at the fullest moment of a step, beyond weights, gradients and moments."""

    activations: int
    """What backward keeps, and what is being worked on."""
    logits: int
    """The chunk of logits that was there then, with what its loss needs."""

    @property
    def total(self) -> int:
        """Bytes of both."""
        return self.activations + self.logits


def rehearse(model: PreTrainedModel, shape: Shape, *, packed: bool, layers: int | None = None) -> StepMemory:
    """The memory of one micro-batch's forward and backward pass, through the first `layers` of the base or all.

    The model is afterwards as it was.
    """
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    ledger = _Ledger(fake, model.device)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    kept = [parameter.grad for parameter in trained]
    # a gradient goes as soon as it is there: those of a step are counted apart, whole
    hooks = [parameter.register_post_accumulate_grad_hook(_forget) for parameter in trained]
    head = model.get_output_embeddings()
    assert isinstance(head, nn.Module)
    try:
        for parameter in trained:
            parameter.grad = None
        with (
            torch.random.fork_rng(devices=[]),
            _plain_weights(model),
            _first_layers(model, layers),
            fake,
            ledger,
            holding(model),
        ):
            hidden_BTH = last_hidden(model, _batch(shape, packed, model.device))
            index_N = torch.zeros(min(shape.targets, shape.rows * shape.length), dtype=torch.long, device=model.device)
            ledger.part = "logits"
            loss = projected_loss_sum(hidden_BTH.flatten(0, 1)[index_N], index_N, head)
            ledger.part = "activations"
            loss.backward()
    finally:
        for hook, parameter, grad in zip(hooks, trained, kept, strict=True):
            hook.remove()
            parameter.grad = grad
    return StepMemory(**ledger.fullest)


@contextmanager
def _plain_weights(model: PreTrainedModel) -> Iterator[None]:
    """Inside, 4-bit weights are parameters of no class of their own: torch 2.11's FakeTensorMode takes no others."""
    quantised = {
        module: weight
        for module in model.modules()
        if hasattr(weight := module._parameters.get("weight"), "quant_state") and weight is not None
    }
    try:
        for module, weight in quantised.items():
            plain = nn.Parameter(weight.detach().as_subclass(Tensor), requires_grad=False)
            plain.quant_state = weight.quant_state  # type: ignore[attr-defined] # where bitsandbytes looks for it
            module._parameters["weight"] = plain
        yield
    finally:
        for module, weight in quantised.items():
            module._parameters["weight"] = weight


@contextmanager
def _first_layers(model: PreTrainedModel, count: int | None) -> Iterator[None]:
    """Inside, a base has its first `count` layers: models go by their config."""
    whole = model.config.num_hidden_layers
    try:
        model.config.num_hidden_layers = whole if count is None else count
        yield
    finally:
        model.config.num_hidden_layers = whole


class _Ledger(TorchDispatchMode):
    """Counts the bytes of a device's live storages by the part of the step in which they were made."""

    def __init__(self, fake: FakeTensorMode, device: torch.device) -> None:
        super().__init__()
        self._device = device.type
        self.part = "activations"
        self.fullest = {"activations": 0, "logits": 0}
        self._live = dict(self.fullest)
        self._fake = fake
        self._known: set[int] = set()
        self._given: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for value in tree_leaves((args, kwargs)):
            if isinstance(value, Tensor) and not isinstance(value, FakeTensor):
                self._give(value)
        out = func(*args, **(kwargs or {}))
        for value in tree_leaves(out):
            if isinstance(value, Tensor) and value.device.type == self._device:
                self._count(value.untyped_storage())
        return out

    def _give(self, tensor: Tensor) -> None:
        """A tensor with data, as a weight, is there anyway: its stand-in, one for all its uses, counts nothing."""
        stand_in = self._fake.from_tensor(tensor)
        storage = stand_in.untyped_storage()
        if storage._cdata not in self._known:
            self._known.add(storage._cdata)
            self._given.append(stand_in)

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, part = storage._cdata, self.part
        if key in self._known:
            return
        size = storage.nbytes()
        if self._device != "cpu":
            size = -(-size // _GPU_BLOCK) * _GPU_BLOCK
        self._known.add(key)
        self._live[part] += size
        if sum(self._live.values()) > sum(self.fullest.values()):
            self.fullest = dict(self._live)

        def gone() -> None:
            self._known.discard(key)
            self._live[part] -= size

        weakref.finalize(storage, gone)


def _batch(shape: Shape, packed: bool, device: torch.device) -> Batch:
    """A micro-batch of a shape; rows of one length have no mask to keep padding out."""
    ids_BT = torch.zeros(shape.rows, shape.length, dtype=torch.long, device=device)
    apart = packed or shape.tokens < shape.rows * shape.length
    num_bounds = shape.rows + 1 + int(apart)  # one more than rows, or attention would take them for whole
    return Batch(
        input_ids_BT=ids_BT,
        attention_mask_BT=torch.ones_like(ids_BT),
        position_ids_BT=torch.zeros_like(ids_BT),
        labels_BT=ids_BT,
        num_tokens=shape.tokens,
        num_target_tokens=shape.targets,
        segments_BT=torch.zeros_like(ids_BT) if apart else None,
        bounds_S=torch.zeros(num_bounds, dtype=torch.int32, device=device),
        longest=shape.length,
    )


def _forget(parameter: Tensor) -> None:
    parameter.grad = None
