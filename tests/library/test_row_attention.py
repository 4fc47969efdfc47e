"""Attention by the bounds of sequences: the same as by a mask, for every family and method, and without the mask."""

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, PreTrainedModel, Qwen2Config, Qwen3Config

from peftkit.data import Batch, Sample, collate, collate_packed
from peftkit.data.collate import sequence_bounds
from peftkit.methods import (
    LoraConfig,
    PrefixTuningConfig,
    PromptTuningConfig,
    PTuningV2Config,
    attach,
    attached,
    detach,
    fast_share,
    fuse,
)
from peftkit.methods.attention import ATTENTION, InFront, attend_by_bounds, bounded, over_sequences
from peftkit.train.loss import token_loss_sum
from peftkit.train.recompute import Recompute, set_recompute

FAMILIES = {"llama": LlamaConfig, "mistral": MistralConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}
METHODS: dict[str, Any] = {
    "lora": LoraConfig(r=4),
    "prefix": PrefixTuningConfig(num_virtual_tokens=3),
    "ptuning_v2": PTuningV2Config(num_virtual_tokens=5),
}


def model_of(family: str, **settings: Any) -> PreTrainedModel:
    config = FAMILIES[family](
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, initializer_range=0.3,
        **{"sliding_window": None, **settings} if family == "mistral" else settings,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").requires_grad_(False)


def samples_of(rng: random.Random, lengths: list[int]) -> list[Sample]:
    ids = [np.array([rng.randrange(64) for _ in range(length)], dtype=np.int32) for length in lengths]
    return [Sample("", row, np.arange(len(row)) > 0) for row in ids]


def batches(rng: random.Random) -> dict[str, Batch]:
    several = samples_of(rng, [5, 9, 3, 11, 1 + rng.randrange(8)])
    made = {
        "packed": collate_packed([several[:2], several[2:]]),
        "padded": collate(several),
        "whole": collate(samples_of(rng, [13, 13, 13])),
        "packed whole": collate_packed([[one] for one in samples_of(rng, [7, 7])]),
    }
    return {name: with_bounds(batch) for name, batch in made.items()}


def with_bounds(batch: Batch) -> Batch:
    bounds_S, longest = sequence_bounds(batch.segments_BT, batch.attention_mask_BT)
    return replace(batch, bounds_S=bounds_S, longest=longest)


def gradients(model: PreTrainedModel, batch: Batch) -> tuple[Tensor, list[Tensor]]:
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    loss = token_loss_sum(model, batch)
    return loss, list(torch.autograd.grad(loss, parameters))


def far(grads: list[Tensor], others: list[Tensor]) -> float:
    """The norm of the difference of all gradients, of theirs."""
    ours, theirs = (torch.cat([grad.flatten().double() for grad in each]) for each in (grads, others))
    return float((ours - theirs).norm() / theirs.norm())


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("family", FAMILIES)
def test_loss_and_gradients_are_those_of_the_mask(family: str, method: str, seed: int, everywhere: None) -> None:
    torch.manual_seed(seed)
    model = model_of(family)
    attend_by_bounds(model)
    assert model.config._attn_implementation == ATTENTION
    attach(model, METHODS[method], seed=seed)
    for part in attached(model):
        for parameter in part.parameters().values():
            torch.nn.init.normal_(parameter, std=0.2)
    model.train()
    for batch in batches(random.Random(seed)).values():
        assert bounded(model, len(batch.input_ids_BT), batch.bounds_S, batch.longest)
        expected = gradients(model, replace(batch, bounds_S=None))
        for recompute in (Recompute(), Recompute("full"), Recompute("selective")):
            set_recompute(model, recompute)
            loss, grads = gradients(model, batch)
            torch.testing.assert_close(loss, expected[0], rtol=1e-5, atol=1e-5)
            assert far(grads, expected[1]) < 1e-4
        set_recompute(model, Recompute())


def test_fused_forwards_go_by_bounds_too(seed: int, everywhere: None) -> None:
    torch.manual_seed(seed)
    model = model_of("qwen3")
    attend_by_bounds(model)
    attach(model, LoraConfig(r=4), seed=seed)
    model.train()
    batch = batches(random.Random(seed))["packed"]
    expected = token_loss_sum(model, replace(batch, bounds_S=None))
    fuse(model)
    torch.testing.assert_close(token_loss_sum(model, batch), expected, rtol=1e-5, atol=1e-5)


class Largest(TorchDispatchMode):
    """The most elements of a tensor."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        self.elements = max(self.elements, *sizes, 0)
        return out


@pytest.mark.parametrize("method", METHODS)
def test_no_mask_of_tokens_by_tokens_is_made(method: str, seed: int, everywhere: None) -> None:
    model = model_of("llama")
    attend_by_bounds(model)
    attach(model, METHODS[method], seed=seed)
    rows = samples_of(random.Random(seed), [8] * 64)
    batch = with_bounds(collate_packed([rows]))
    with torch.no_grad(), Largest() as largest:
        token_loss_sum(model, batch)
    assert largest.elements < 512 * 512
    with torch.no_grad(), Largest() as largest:
        token_loss_sum(model, replace(batch, bounds_S=None))
    assert largest.elements >= 512 * 512


def test_bounds_are_where_sequences_and_padding_begin() -> None:
    a, b, c = samples_of(random.Random(0), [2, 3, 4])
    bounds_S, longest = sequence_bounds(*sides(collate_packed([[a, b], [c]])))
    assert bounds_S.tolist() == [0, 2, 5, 9, 10] and longest == 4 and bounds_S.dtype == torch.int32
    bounds_S, longest = sequence_bounds(*sides(collate([a, c])))
    assert bounds_S.tolist() == [0, 2, 4, 8] and longest == 4
    assert collate([a, c]).to(torch.device("cpu")).bounds_S is None
    moved = collate([a, c]).to(torch.device("meta"))
    assert moved.bounds_S is not None and moved.bounds_S.shape == (4,) and moved.longest == 4


def sides(batch: Batch) -> tuple[Tensor | None, Tensor]:
    return batch.segments_BT, batch.attention_mask_BT


@pytest.mark.parametrize("virtual", [0, 3])
def test_each_sequence_attends_to_what_is_in_front_and_to_its_own_past(virtual: int, seed: int) -> None:
    torch.manual_seed(seed)
    lengths = [1, 4, 2, 7]
    bounds = torch.tensor([0, 1, 5, 7, 14], dtype=torch.int32)
    query, key, value = (torch.randn(14, heads, 8, dtype=torch.float64) for heads in (4, 2, 2))
    front_key, front_value = (torch.randn(virtual, 2, 8, dtype=torch.float64) for _ in range(2))
    in_front = InFront(bounds, virtual, 14)
    keys, values = in_front.put(front_key, key), in_front.put(front_value, value)
    output = over_sequences(query, keys, values, bounds, in_front.bounds_S, 7, 7 + virtual, 0.3)
    for sequence, (start, length) in enumerate(zip(bounds.tolist(), lengths, strict=False)):
        for place in range(start, start + length):
            k = torch.cat([front_key, key[start : place + 1]]).repeat_interleave(2, 1)
            v = torch.cat([front_value, value[start : place + 1]]).repeat_interleave(2, 1)
            weights = torch.softmax(0.3 * torch.einsum("hd,nhd->hn", query[place], k), -1)
            expected = torch.einsum("hn,nhd->hd", weights, v)
            torch.testing.assert_close(output[place], expected, msg=f"sequence {sequence}, token {place}")


@pytest.mark.parametrize(
    ("family", "settings", "method", "reason"),
    [
        ("mistral", {"sliding_window": 6}, LoraConfig(r=4), "sees 6 tokens back"),
        ("llama", {"attention_dropout": 0.1}, LoraConfig(r=4), "drops out attention"),
        ("llama", {"head_dim": 6}, LoraConfig(r=4), "no heads of 6"),
        ("llama", {}, PromptTuningConfig(num_virtual_tokens=2), "in front of each row"),
    ],
)
def test_what_needs_a_mask_gets_one_and_says_so_once(
    family: str, settings: dict[str, Any], method: Any, reason: str, caplog: pytest.LogCaptureFixture, everywhere: None
) -> None:
    caplog.set_level("INFO")
    model = model_of(family, **settings)
    attend_by_bounds(model)
    attach(model, method)
    batch = batches(random.Random(0))["padded"]
    model.eval()
    losses = [token_loss_sum(model, each) for each in (batch, batch, replace(batch, bounds_S=None))]
    assert torch.equal(losses[0], losses[2])
    assert [record.getMessage() for record in caplog.records if reason in record.getMessage()] != []
    assert sum(reason in record.getMessage() for record in caplog.records) == 1


def test_another_implementation_is_told_of_and_off_the_fast_path(
    caplog: pytest.LogCaptureFixture, everywhere: None
) -> None:
    caplog.set_level("INFO")
    model = model_of("llama")
    model.config._attn_implementation = "eager"
    attend_by_bounds(model)
    fuse(model)
    token_loss_sum(model, batches(random.Random(0))["padded"])
    assert caplog.messages == ["attention goes by a mask, not by the bounds of sequences: it is eager on cpu"]
    assert fast_share(model) == pytest.approx(22 / 24)


def test_answers_and_detaching_are_as_they_were(everywhere: None) -> None:
    model: Any = model_of("llama")
    ids = torch.tensor([[0, 3, 5, 7], [1, 2, 3, 4]])
    mask = torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1]])
    settings = {"attention_mask": mask, "max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    before = model.generate(ids, **settings)
    attend_by_bounds(model)
    assert torch.equal(model.generate(ids, **settings), before)
    attach(model, METHODS["prefix"])
    detach(model)
    assert model.config._attn_implementation == ATTENTION
    assert torch.equal(model.generate(ids, **settings), before)


@pytest.mark.gpu
@pytest.mark.parametrize("head", [64, 128])
@pytest.mark.parametrize("virtual", [0, 20])
def test_flash_attention_is_the_reference_on_a_gpu(head: int, virtual: int, seed: int) -> None:
    torch.manual_seed(seed)
    bounds = torch.tensor([0, 1, 130, 131, 700, 1024], dtype=torch.int32)
    longest = 569
    sides_ = [torch.randn(1024, heads, head, dtype=torch.bfloat16) for heads in (8, 2, 2)]
    front = [torch.randn(virtual, 2, head, dtype=torch.bfloat16) for _ in range(2)]
    weights = torch.randn(1024, 8, head, dtype=torch.bfloat16)
    found = []
    for device, dtype in (("cuda", torch.bfloat16), ("cpu", torch.float32)):
        leaves = [x.to(device, dtype).requires_grad_() for x in (*sides_, *front)]
        query, key, value, front_key, front_value = leaves
        in_front = InFront(bounds.to(device), virtual, 1024)
        keys, values = in_front.put(front_key, key), in_front.put(front_value, value)
        output = over_sequences(
            query, keys, values, bounds.to(device), in_front.bounds_S, longest, longest + virtual, head**-0.5
        )
        grads = torch.autograd.grad((output * weights.to(device, dtype)).sum(), leaves)
        found.append([x.detach().float().cpu() for x in (output, *grads)])
    for ours, reference in zip(*found, strict=True):
        if reference.numel():
            assert (ours - reference).norm() / reference.norm() < 2e-2


@pytest.mark.gpu
@pytest.mark.parametrize("method", METHODS)
def test_a_step_on_a_gpu_has_the_masks_losses_and_gradients(method: str, seed: int) -> None:
    torch.manual_seed(seed)
    model: Any = model_of("llama", head_dim=64)
    model.to("cuda", torch.bfloat16)
    attend_by_bounds(model)
    attach(model, METHODS[method], seed=seed)
    for part in attached(model):
        for parameter in part.parameters().values():
            torch.nn.init.normal_(parameter, std=0.1)
    model.train()
    for batch in batches(random.Random(seed)).values():
        moved = replace(batch, bounds_S=None).to(torch.device("cuda"))
        assert bounded(model, len(moved.input_ids_BT), moved.bounds_S, moved.longest)
        loss, grads = gradients(model, moved)
        expected, others = gradients(model, replace(moved, bounds_S=None))
        torch.testing.assert_close(loss, expected, rtol=2e-2, atol=1e-2)
        assert far(grads, others) < 5e-2
