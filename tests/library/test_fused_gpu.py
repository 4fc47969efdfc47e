"""The fused forwards on a GPU: NF4 at real sizes beside bitsandbytes' own path, training, and what a step takes."""

import copy
import gc
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from bitsandbytes.nn import Linear4bit, Params4bit
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from peftkit.data.sampler import Shape
from peftkit.methods import LoraConfig, LoraSite, attach, fast_share, fuse, holding
from peftkit.methods.attention import attend_by_bounds
from peftkit.methods.frozen import JOINED_BYTES, dequantized
from peftkit.methods.lora_group import Projection
from peftkit.methods.lora_layers import LoraLinear
from peftkit.methods.lora_linear import project
from peftkit.train.rehearsal import rehearse

pytestmark = pytest.mark.gpu


def nf4(outputs: int, inputs: int, *, double: bool, weight: Tensor | None = None) -> nn.Linear:
    layer = Linear4bit(
        inputs, outputs, False, torch.bfloat16, compress_statistics=double, quant_type="nf4", device="meta"
    )
    dense = torch.randn(outputs, inputs, device="cuda") / inputs**0.5 if weight is None else weight
    layer.weight = Params4bit(
        dense.bfloat16(), requires_grad=False, compress_statistics=double, quant_type="nf4", module=layer
    ).to("cuda")
    return layer


def adapted(base: nn.Linear, **settings: Any) -> LoraLinear:
    site = LoraSite(r=16, scale=2.0, out_features=base.out_features, in_features=base.in_features)
    layer = LoraLinear(base, site, LoraConfig(r=16, **settings), torch.Generator().manual_seed(0))
    with torch.no_grad():
        layer.lora_B.copy_(torch.randn_like(layer.lora_B) * 0.02)
    return layer


def gradients(ys: Sequence[Tensor], dys: Sequence[Tensor], x: Tensor, layers: Sequence[nn.Module]) -> list[Tensor]:
    trained = [parameter for layer in layers for parameter in layer.parameters() if parameter.requires_grad]
    return list(torch.autograd.grad(list(ys), [x, *trained], list(dys)))


def error(found: Tensor, exact: Tensor) -> float:
    return float((found.detach().double() - exact.detach().double()).norm() / exact.detach().double().norm())


def exact(layers: Sequence[LoraLinear], x: Tensor) -> tuple[Tensor, list[Tensor]]:
    """x and the outputs in float32, of the weights as bitsandbytes dequantises them."""
    wide = x.detach().float().requires_grad_()
    ys: list[Tensor] = []
    for layer in layers:
        update = layer.update()
        y = wide @ layer.dense().float().T
        low = update.scale * (wide @ update.A_RI.T) @ update.B_OR.T
        if update.magnitude_O is not None:
            norm = (layer.dense().float() + update.scale * update.B_OR @ update.A_RI).norm(dim=1).detach()
            ys.append(update.magnitude_O / norm * (y + low))
        else:
            ys.append(y + low)
    return wide, ys


@pytest.mark.parametrize("variant", ["plain", "dora"])
@pytest.mark.parametrize("double", [True, False])
@pytest.mark.parametrize("sizes", [(4096, 4096, 1024, 1024), (14336, 4096), (4096, 14336, 14336)], ids=str)
def test_nf4_is_as_near_to_exact_as_bitsandbytes(seed: int, sizes: tuple[int, ...], double: bool, variant: Any) -> None:
    inputs, *outputs = sizes
    layers = [adapted(nf4(size, inputs, double=double), variant=variant) for size in outputs]
    x = torch.randn(2048, inputs, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    dys = [torch.randn(2048, size, device="cuda", dtype=torch.bfloat16) for size in outputs]
    fused = project(x, [layer.projection() for layer in layers])
    own = [layer(x) for layer in layers]
    wide, wanted = exact(layers, x)
    pairs = list(zip(fused, own, wanted, strict=True))
    pairs += list(
        zip(
            gradients(fused, dys, x, layers),
            gradients(own, dys, x, layers),
            gradients(wanted, [dy.float() for dy in dys], wide, layers),
            strict=True,
        )
    )
    for found, other, right in pairs:
        assert found.dtype == other.dtype
        assert error(found, right) < max(1.5 * error(other, right), 6e-3)


@pytest.mark.parametrize("double", [True, False])
def test_weights_have_the_bits_of_bitsandbytes(seed: int, double: bool) -> None:
    from bitsandbytes.functional import dequantize_4bit

    layer = nf4(1024, 4096, double=double)
    weight: Any = layer.weight
    assert torch.equal(dequantized(weight, torch.bfloat16), dequantize_4bit(weight.data, weight.quant_state))


def test_float32_gradients_are_exact(seed: int) -> None:
    layers = [adapted(nn.Linear(1024, size, bias=False, device="cuda").requires_grad_(False)) for size in (1024, 256)]
    x = torch.randn(3000, 1024, device="cuda", requires_grad=True)
    dys = [torch.randn(3000, size, device="cuda") for size in (1024, 256)]
    fused = project(x, [layer.projection() for layer in layers])
    doubled = [copy.deepcopy(layer).double() for layer in layers]
    wide = x.detach().double().requires_grad_()
    right = project(wide, [layer.projection() for layer in doubled])
    found = gradients(fused, dys, x, layers)
    wanted = gradients(right, [dy.double() for dy in dys], wide, doubled)
    for one, other in zip(found, wanted, strict=True):
        assert error(one, other) < 1e-5


def test_dropout_has_one_mask_forward_and_backward(seed: int) -> None:
    layer = adapted(nn.Linear(512, 256, bias=False, device="cuda").requires_grad_(False), dropout=0.25).train()
    x = torch.randn(700, 512, device="cuda", requires_grad=True)
    dy, move = torch.randn(700, 256, device="cuda"), torch.randn(700, 512, device="cuda")
    states = [x.detach(), x.detach() + move]
    torch.manual_seed(seed)
    (gradient,) = torch.autograd.grad(project(x, [layer.projection()])[0], x, dy)
    values: list[Tensor] = []
    for state in states:
        torch.manual_seed(seed)
        values.append((project(state, [layer.projection()])[0].double() * dy.double()).sum())
    change = float((gradient.double() * move.double()).sum())  # the map is linear in x
    assert float(values[1] - values[0]) == pytest.approx(change, rel=1e-3, abs=1e-2)


def a_model(seed: int, *, quantised: bool, **settings: Any) -> PreTrainedModel:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=4096,
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=4,
        num_attention_heads=16,
        num_key_value_heads=4,
    )
    model: PreTrainedModel = LlamaForCausalLM(config).to("cuda", torch.bfloat16)
    for layer in model.base_model.layers if quantised else ():
        for block in (layer.self_attn, layer.mlp):
            for name, linear in list(block.named_children()):
                if isinstance(linear, nn.Linear):
                    shape = (linear.out_features, linear.in_features)
                    setattr(block, name, nf4(*shape, double=True, weight=linear.weight.data))
    return attach(model.requires_grad_(False), LoraConfig(r=16, alpha=32, **settings), seed=seed).train()


@pytest.mark.parametrize("quantised", [True, False])
@pytest.mark.parametrize("variant", ["plain", "dora"])
def test_twenty_steps_lose_what_the_modules_do(seed: int, quantised: bool, variant: Any) -> None:
    losses: list[list[float]] = []
    ids = torch.randint(4096, (4, 256), device="cuda")
    for fused in (False, True):
        model = a_model(seed, quantised=quantised, variant=variant)
        if fused:
            fuse(model)
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
            attend_by_bounds(model)
            assert fast_share(model, longest=256) == 1.0
        # a rate at which what is rounded differently doesn't grow from step to step
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-4)
        losses.append([])
        for _ in range(20):
            optimizer.zero_grad()
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
            loss.backward()
            optimizer.step()
            losses[-1].append(float(loss.detach()))
    assert losses[0][-1] < losses[0][0]
    torch.testing.assert_close(*map(torch.tensor, losses), rtol=1e-2, atol=0)


@pytest.mark.parametrize("checkpointed", [True, False])
def test_a_rehearsal_foresees_what_a_step_takes(seed: int, checkpointed: bool) -> None:
    model = a_model(seed, quantised=True)
    fuse(model)
    if checkpointed:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    shape = Shape(rows=4, length=1024, tokens=4096, targets=4096)
    foreseen = rehearse(model, shape, packed=False).activations
    ids = torch.randint(4096, (4, 1024), device="cuda")

    def step() -> None:
        hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
        hidden.backward(torch.ones_like(hidden))
        model.zero_grad()

    for _ in range(2):
        step()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    taken = torch.cuda.max_memory_allocated() - before
    assert 0.7 * taken < foreseen < 1.5 * taken


def test_a_group_keeps_one_dequantised_piece_at_a_time(seed: int) -> None:
    layers = [nf4(8192, 4096, double=True) for _ in range(5)]
    x = torch.randn(512, 4096, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    members = [Projection(layer.weight) for layer in layers]
    weights = [dequantized(layer.weight, torch.bfloat16) for layer in layers]
    wanted = torch.cat([x @ weight.T for weight in weights], 1).detach()
    del weights
    project(x, members[:1])  # cuBLAS takes its workspace
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    found = project(x, members)
    assert torch.cuda.max_memory_allocated() - before < JOINED_BYTES + 5 * 2 * 512 * 8192
    assert error(torch.cat(found, 1), wanted) < 5e-3


def test_held_copies_give_the_same_losses_and_a_rehearsal_knows_of_them(seed: int) -> None:
    model = a_model(seed, quantised=True)
    for parameter in model.parameters():
        if parameter.requires_grad:  # nothing is left at zero
            parameter.data.add_(torch.randn_like(parameter) * 0.02)
    ids = torch.randint(4096, (2, 256), device="cuda")
    fuse(model)

    def step() -> list[Tensor]:
        model.zero_grad()
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        return [loss.detach(), *[p.grad.clone() for p in model.parameters() if p.grad is not None]]

    wanted = step()
    for _ in range(2):
        with holding(model):
            found = step()
        for one, other in zip(found, wanted, strict=True):
            assert error(one, other) < 1e-2
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data.mul_(1.01)
        wanted = step()
    shape = Shape(rows=1, length=64, tokens=64, targets=64)
    assert rehearse(model, shape, packed=False).total > 0
    with holding(model):
        assert all(error(one, other) < 1e-2 for one, other in zip(step(), wanted, strict=True))


@pytest.mark.parametrize("quantised", [True, False])
def test_a_bases_memory_comes_back(seed: int, quantised: bool) -> None:
    ids = torch.randint(4096, (2, 256), device="cuda")

    def left_over() -> int:
        model = a_model(seed, quantised=quantised, targets=["v_proj"])
        fuse(model)
        with holding(model):
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        del model
        gc.collect()
        return torch.cuda.memory_allocated()

    first = left_over()  # workspaces, which stay
    assert left_over() - first < 2**20
