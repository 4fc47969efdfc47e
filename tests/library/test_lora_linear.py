"""The fused linear layers against the mathematics: outputs, gradients, dropout's mask, what is saved."""

import gc
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from bitsandbytes.functional import quantize_4bit
from bitsandbytes.nn import Linear4bit, Params4bit
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from peftkit.methods import LoraConfig, LoraSite
from peftkit.methods.frozen import Reader, dequantized
from peftkit.methods.lora_group import Copies, Group, Projection, Update
from peftkit.methods.lora_layers import LoraLinear
from peftkit.methods.lora_linear import fits, frozen_projection, project

KINDS: dict[str, dict[str, Any]] = {
    "lora": {},
    "rslora": {"variant": "rslora"},
    "bias": {"lora_bias": True},
    "dora": {"variant": "dora"},
}


def frozen(inputs: int, outputs: int, *, bias: bool = False, dtype: torch.dtype = torch.float32) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=bias, dtype=dtype).requires_grad_(False)


def nf4(inputs: int, outputs: int, *, double: bool, dtype: torch.dtype = torch.float32) -> nn.Linear:
    layer = Linear4bit(inputs, outputs, bias=False, compute_dtype=dtype, compress_statistics=double, quant_type="nf4")
    layer.support_avx512bf16_for_cpu = False
    layer.weight.data = torch.randn(outputs, inputs, dtype=dtype) / inputs**0.5
    return layer.to("cpu").requires_grad_(False)


def adapted(base: nn.Linear, r: int = 3, *, scale: float = 1.7, start: bool = False, **settings: Any) -> LoraLinear:
    """A layer with random weights everywhere, as after some steps."""
    site = LoraSite(r=r, scale=scale, out_features=base.out_features, in_features=base.in_features)
    layer = LoraLinear(base, site, LoraConfig(r=r, **settings), torch.Generator().manual_seed(0))
    if start:
        layer.begin(torch.randn_like(layer.lora_A), torch.randn_like(layer.lora_B), subtracted=True)
    for parameter in layer.trained().values():
        with torch.no_grad():
            parameter.copy_(torch.randn_like(parameter) * 0.3 + (1.0 if parameter.dim() == 1 else 0.0))
    return layer


def gradients(outputs: Sequence[Tensor], x: Tensor, layers: Sequence[nn.Module], seed: int) -> list[Tensor]:
    """Of a random linear function of the outputs, by x and by every trained parameter."""
    generator = torch.Generator().manual_seed(seed)
    loss = torch.stack([(y * torch.randn(y.shape, generator=generator).to(y)).sum() for y in outputs]).sum()
    trained = [parameter for layer in layers for parameter in layer.parameters() if parameter.requires_grad]
    return list(torch.autograd.grad(loss, [x, *trained]))


def assert_near(found: Sequence[Tensor], wanted: Sequence[Tensor], limit: float) -> None:
    assert len(found) == len(wanted)
    for one, other in zip(found, wanted, strict=True):
        assert one.shape == other.shape and one.dtype == other.dtype
        assert (one - other).detach().double().norm() <= limit * other.detach().double().norm()


def projection(layer: nn.Module) -> Projection:
    return layer.projection() if isinstance(layer, LoraLinear) else Projection(layer.weight, layer.bias)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", KINDS)
def test_a_group_equals_its_layers_each_alone(seed: int, kind: str, dtype: torch.dtype) -> None:
    layers: list[nn.Module] = [
        adapted(frozen(24, 40, bias=True), 4, **KINDS[kind]),
        frozen(24, 8),
        adapted(frozen(24, 16), 2, start=True, scale=0.4, **KINDS[kind]),
        frozen(24, 5, bias=True),
    ]
    layers = [layer.to(dtype) for layer in layers]
    x = torch.randn(2, 7, 24, dtype=dtype, requires_grad=True)
    expected = [layer(x) for layer in layers]
    found = project(x, [projection(layer) for layer in layers])
    limit = 1e-6 if dtype == torch.float32 else 1e-12
    assert_near(found, expected, limit)
    assert_near(
        gradients(found, x, layers, seed), gradients(expected, x, layers, seed), 1e-5 if limit > 1e-9 else limit
    )


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_agree_with_finite_differences(seed: int, kind: str) -> None:
    layers = [adapted(frozen(6, 5, bias=True), 2, **KINDS[kind]), adapted(frozen(6, 4), 3, start=True, **KINDS[kind])]
    layers = [layer.double() for layer in layers]
    x = torch.randn(3, 6, dtype=torch.float64, requires_grad=True)
    trained = [parameter for layer in layers for parameter in layer.trained().values()]
    norms = [layer.row_norms() if layer.lora_magnitude_vector is not None else None for layer in layers]

    def outputs(x: Tensor, *_: Tensor) -> tuple[Tensor, ...]:
        with (
            pytest.MonkeyPatch.context() as patch
        ):  # the norm is a constant (§4.3 of DoRA's paper), so it is held still
            held = iter(norms)
            patch.setattr("peftkit.methods.lora_linear.Update.row_norms", lambda *_: next(held))
            return project(x, [layer.projection() for layer in layers])

    assert torch.autograd.gradcheck(outputs, (x, *trained), eps=1e-6, atol=1e-6)


@pytest.mark.parametrize("double", [False, True])
def test_nf4_weights_are_what_bitsandbytes_multiplies_by(seed: int, double: bool) -> None:
    layers = [adapted(nf4(64, 32, double=double), 4), nf4(64, 16, double=double)]
    x = torch.randn(5, 64, requires_grad=True)
    expected = [layer(x) for layer in layers]
    found = project(x, [projection(layer) for layer in layers])
    assert_near(found, expected, 1e-6)
    assert_near(gradients(found, x, layers, seed), gradients(expected, x, layers, seed), 1e-5)


def test_nf4_weights_come_out_in_the_dtype_that_is_asked_for(seed: int) -> None:
    code, state = quantize_4bit(torch.randn(32, 64, dtype=torch.bfloat16), compress_statistics=True, quant_type="nf4")
    weight = nn.Parameter(code, requires_grad=False)
    weight.quant_state = state  # type: ignore[attr-defined]
    assert dequantized(weight).dtype == torch.bfloat16
    assert dequantized(weight, torch.float32).dtype == torch.float32


def test_half_precision_agrees_to_its_rounding_and_keeps_float32_gradients(seed: int) -> None:
    layers = [adapted(frozen(64, 48, dtype=torch.bfloat16), 8), adapted(frozen(64, 32, dtype=torch.bfloat16), 8)]
    x = torch.randn(256, 64, dtype=torch.bfloat16, requires_grad=True)
    found = project(x, [layer.projection() for layer in layers])
    expected = [layer(x) for layer in layers]
    assert_near(found, expected, 1e-2)
    assert_near(gradients(found, x, layers, seed), gradients(expected, x, layers, seed), 1e-2)


@pytest.mark.parametrize("variant", ["plain", "dora"])
def test_dropout_has_one_mask_forward_and_backward(seed: int, variant: str) -> None:
    layers = [adapted(frozen(40, 30), 4, dropout=0.25, variant=variant), adapted(frozen(40, 20), 3, dropout=0.25)]
    layers = [layer.double().train() for layer in layers]
    x = torch.randn(16, 40, dtype=torch.float64, requires_grad=True)
    torch.manual_seed(seed)
    found = project(x, [layer.projection() for layer in layers])
    torch.manual_seed(seed)
    again = project(x, [layer.projection() for layer in layers])
    assert_near(found, again, 0.0)
    # what went through the updates tells the mask: u Aᵀ = h, with more rows of A than inputs
    probe = adapted(frozen(40, 40), 40, dropout=0.25, scale=1.0).double().train()
    with torch.no_grad():
        probe.base_layer.weight.zero_()
        probe.lora_A.copy_(torch.eye(40))
        probe.lora_B.copy_(torch.eye(40))
    torch.manual_seed(seed)
    (dropped,) = project(x, [probe.projection()])
    mask = dropped / x
    assert set(mask.detach().round(decimals=9).unique().tolist()) == {0.0, round(1 / 0.75, 9)}
    assert 0.15 < float((mask == 0).double().mean()) < 0.35
    for layer in layers:
        layer.eval()
    A_masked = [layer(x * mask.detach()) - layer.base_layer(x * mask.detach()) for layer in layers]
    if variant == "plain":
        expected = [layer.base_layer(x) + update for layer, update in zip(layers, A_masked, strict=True)]
        assert_near(found, expected, 1e-12)
        assert_near(gradients(found, x, layers, seed), gradients(expected, x, layers, seed), 1e-12)


def test_dropout_keeps_the_mean(seed: int) -> None:
    layer = adapted(frozen(16, 8), 4, dropout=0.3).double().train()
    x = torch.randn(1, 16, dtype=torch.float64).expand(40_000, 16)
    (y,) = project(x, [layer.projection()])
    spread = y.std(0) / 200
    assert bool(((y.mean(0) - layer.eval()(x[:1])[0]).abs() < 5 * spread).all())


def test_dropouts_gradient_agrees_with_finite_differences(seed: int) -> None:
    layer = adapted(frozen(6, 5), 2, dropout=0.4, variant="rslora").double().train()
    x = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)

    def outputs(x: Tensor, *_: Tensor) -> tuple[Tensor, ...]:
        torch.manual_seed(seed)
        return project(x, [layer.projection()])

    assert torch.autograd.gradcheck(outputs, (x, layer.lora_A, layer.lora_B))


def test_the_input_is_kept_once_and_nothing_as_wide_as_an_output(seed: int) -> None:
    layers = [adapted(frozen(64, 512), 4), adapted(frozen(64, 256), 4), frozen(64, 128)]
    x = torch.randn(32, 64, requires_grad=True)
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        ys = project(x, [projection(layer) for layer in layers])
    factors = 4 * 8 * (64 + 512 + 256 + 128)  # A, and B of all outputs, with zeros beside each update's own
    assert sum(kept.values()) == x.nbytes + 4 * 32 * 8 + factors
    kept.clear()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        ys = project(x, [projection(layers[2])])
    assert sum(kept.values()) == 0 and ys[0].requires_grad


def test_an_input_without_gradient_and_a_frozen_update_get_none(seed: int) -> None:
    layer = adapted(frozen(8, 6), 2)
    x = torch.randn(4, 8)
    project(x, [layer.projection()])[0].sum().backward()
    assert layer.lora_A.grad is not None and x.grad is None
    layer.requires_grad_(False)
    assert not project(x, [layer.projection()])[0].requires_grad
    x.requires_grad_()
    project(x, [layer.projection()])[0].sum().backward()
    assert x.grad is not None


def test_an_output_that_is_not_used_counts_for_nothing(seed: int) -> None:
    layers = [adapted(frozen(8, 6), 2), adapted(frozen(8, 4), 2)]
    x = torch.randn(4, 8, requires_grad=True)
    y, _ = project(x, [layer.projection() for layer in layers])
    y.sum().backward()
    assert layers[1].lora_A.grad is not None and not layers[1].lora_A.grad.any()


def test_inputs_that_are_not_contiguous_are_taken(seed: int) -> None:
    layer = adapted(frozen(8, 6), 2)
    x = torch.randn(8, 3, 2).permute(1, 2, 0).requires_grad_()
    (y,) = project(x, [layer.projection()])
    assert_near(
        gradients([y.transpose(0, 1)], x, [layer], seed), gradients([layer(x).transpose(0, 1)], x, [layer], seed), 1e-6
    )


def test_what_does_not_fit_is_left_to_the_layer(seed: int) -> None:
    layer, x = frozen(8, 6), torch.randn(4, 8, requires_grad=True)
    assert fits(layer, x)
    assert not fits(layer, x.double())
    with torch.no_grad():
        assert not fits(layer, x)
    assert not fits(nf4(64, 32, double=True), torch.randn(4, 64, dtype=torch.bfloat16))
    assert not fits(frozen(8, 6).requires_grad_(), x)
    layer.register_forward_hook(lambda *_: None)
    assert not fits(layer, x)


def test_nothing_is_warned_of(seed: int) -> None:
    layer = adapted(frozen(8, 6), 2, variant="dora", dropout=0.1).train()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        project(torch.randn(4, 8, requires_grad=True), [layer.projection()])[0].sum().backward()


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_known_of_a_group_follows_its_layers(seed: int, kind: str) -> None:
    layers = [adapted(frozen(8, 6, bias=True), 2, dropout=0.5, **KINDS[kind]).eval(), frozen(8, 4, bias=True)]
    layers.append(adapted(frozen(8, 5), 3, **KINDS[kind]))
    first, second, third = layers
    x, plain = torch.randn(4, 8, requires_grad=True), dict[nn.Linear, Projection]()

    def member(layer: LoraLinear | nn.Linear) -> Projection:
        if isinstance(layer, LoraLinear):
            return layer.projection()
        known = plain[layer] = frozen_projection(layer, plain.get(layer))
        return known

    def check(train: bool = False) -> None:
        members = [member(layer) for layer in layers]
        found, expected = project(x, members), [layer(x) for layer in layers]
        if train:  # with other numbers
            assert not torch.equal(found[0], project(x, members)[0])
            return
        assert_near(found, expected, 1e-6)
        assert_near(gradients(found, x, layers, seed), gradients(expected, x, layers, seed), 1e-5)

    check()
    kept = [member(layer) for layer in layers]
    assert all(member(layer) is known for layer, known in zip(layers, kept, strict=True))
    changes: list[Callable[[], Any]] = [
        lambda: first.lora_A.data.mul_(2.0),  # as fused optimisers do, unseen by autograd
        lambda: first.assign({name: torch.randn_like(one) for name, one in first.tensors().items()}),
        lambda: first.base_layer.weight.data.mul_(1.0 if kind == "dora" else 3.0),
        lambda: setattr(second, "weight", nn.Parameter(torch.randn(4, 8), requires_grad=False)),
        lambda: setattr(second.weight, "data", torch.randn(4, 8)),
        lambda: setattr(second, "bias", None),
        lambda: setattr(first, "scale", 0.3),
        lambda: setattr(third, "lora_B", nn.Parameter(torch.randn(5, 3))),
        lambda: setattr(third, "start_A", torch.randn(3, 8)) or setattr(third, "start_B", torch.randn(5, 3)),
        lambda: setattr(third, "lora_A", nn.Parameter(third.lora_A.detach().clone())),
        lambda: layers.reverse(),
        lambda: layers.pop(),
    ]
    for change in changes:
        change()
        check()
    layers[:] = [first, third]
    first.train()
    check(train=True)
    first.eval()
    check()


def test_another_rank_and_dtype_are_noticed(seed: int) -> None:
    layer, x = adapted(frozen(8, 6), 2), torch.randn(4, 8, requires_grad=True)
    assert_near(project(x, [layer.projection()]), [layer(x)], 1e-6)
    layer.lora_A.data, layer.lora_B.data = torch.randn(5, 8), torch.randn(6, 5)
    assert_near(project(x, [layer.projection()]), [layer(x)], 1e-6)
    layer.double()
    assert not fits(layer.base_layer, x)
    assert_near(project(x.double(), [layer.projection()]), [layer(x.double())], 1e-12)


def test_a_weight_in_4_bits_is_read_where_it_is(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Params4bit, "is_cuda", True, raising=False)  # the layout that a GPU's kernel takes
    layer, other = nf4(64, 32, double=True), nf4(64, 32, double=True)
    weight: Any = layer.weight
    reader = Reader(weight)

    def check() -> None:
        wanted = dequantized(weight, torch.float32)
        for _ in range(2):
            assert torch.equal(reader.dense(torch.float32), wanted)

    check()
    before = reader.dense(torch.bfloat16)
    assert before.dtype == torch.bfloat16
    weight.data.copy_(other.weight.data)
    check()
    state = weight.quant_state
    state.absmax = torch.randint(256, state.absmax.shape, dtype=torch.uint8)
    check()
    state.offset = state.offset * 2
    check()
    state.state2.absmax = state.state2.absmax * 3
    check()
    weight.data = weight.data.flip(0).contiguous()
    check()
    weight.quant_state = other.weight.quant_state  # type: ignore[union-attr]
    check()
    assert not torch.equal(reader.dense(torch.bfloat16), before)


def held_layers() -> tuple[list[LoraLinear], Copies]:
    """A group with a start, biases and unequal scales and ranks, and copies that they share."""
    layers = [
        adapted(frozen(8, 6, bias=True), 2, lora_bias=True),
        adapted(frozen(8, 4), 3, start=True, scale=0.4),
    ]
    copies = Copies()
    for layer in layers:
        layer.copies = copies
    return layers, copies


def test_held_copies_serve_all_passes_and_are_made_anew_the_next_time(seed: int) -> None:
    layers, copies = held_layers()
    x = torch.randn(4, 8, requires_grad=True)
    casts: list[int] = []
    for round in range(3):
        with pytest.MonkeyPatch.context() as patch:
            factors = Update.factors
            patch.setattr(Update, "factors", lambda one: (casts.append(round), factors(one))[1])  # noqa: B023
            with copies.hold():
                for _ in (1, 2):
                    found = project(x, [layer.projection() for layer in layers])
                    grads = gradients(found, x, layers, seed)
        expected = [layer(x) for layer in layers]
        assert_near(found, expected, 1e-6)
        assert_near(grads, gradients(expected, x, layers, seed), 1e-5)
        casts.append(-1)
        for parameter in (one for layer in layers for one in layer.trained().values()):
            parameter.data.mul_(1.5)  # as fused optimisers do, unseen by autograd
    assert casts == [0, 0, -1, 1, 1, -1, 2, 2, -1]  # each update once a round
    assert_near(project(x, [layer.projection() for layer in layers]), [layer(x) for layer in layers], 1e-6)


def test_a_graph_goes_back_after_its_copies_were_held(seed: int) -> None:
    layers, copies = held_layers()
    x = torch.randn(4, 8, requires_grad=True)
    expected = gradients([layer(x) for layer in layers], x, layers, seed)
    with copies.hold():
        found = project(x, [layer.projection() for layer in layers])
    assert_near(gradients(found, x, layers, seed), expected, 1e-5)


def test_a_rehearsal_leaves_held_copies_as_they_were(seed: int) -> None:
    layers, copies = held_layers()
    x = torch.randn(4, 8, requires_grad=True)
    for _ in range(2):
        with FakeTensorMode(allow_non_fake_inputs=True) as mode, copies.hold():
            project(mode.from_tensor(x), [layer.projection() for layer in layers])
        with copies.hold():
            found = project(x, [layer.projection() for layer in layers])
            assert_near(found, [layer(x) for layer in layers], 1e-6)


def test_copies_hold_no_layer(seed: int) -> None:
    layers, copies = held_layers()
    with copies.hold():
        project(torch.randn(4, 8), [layer.projection() for layer in layers])
    kept = [weakref.ref(layer.lora_A) for layer in layers]
    gc.disable()
    try:
        layers.clear()
        assert [one() for one in kept] == [None, None]
    finally:
        gc.enable()


@pytest.mark.parametrize("sizes", [(64, 128), (64, 64, 128)], ids=str)
def test_weights_in_4_bits_are_read_together(
    seed: int, sizes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Params4bit, "is_cuda", True, raising=False)  # the layout that a GPU's kernel takes
    layers: list[nn.Module] = [adapted(nf4(64, size, double=True), 4) for size in sizes[:-1]]
    layers.append(nf4(64, sizes[-1], double=True))
    members = [projection(layer) for layer in layers]
    assert [piece.columns for piece in Group.of(tuple(members)).pieces] == [slice(0, sum(sizes))]
    x = torch.randn(5, 64, requires_grad=True)

    def check() -> None:
        weights = [dequantized(one.weight, torch.float32) for one in members]
        assert torch.equal(Group.of(tuple(members)).pieces[0].reader.dense(torch.float32), torch.cat(weights))
        found = project(x, members)
        expected = []
        for weight, layer in zip(weights, layers, strict=True):
            low = layer.scale * (x @ layer.lora_A.T) @ layer.lora_B.T if isinstance(layer, LoraLinear) else 0.0
            expected.append(x @ weight.T + low)
        assert_near(found, expected, 1e-6)
        assert_near(gradients(found, x, layers, seed), gradients(expected, x, layers, seed), 1e-5)

    check()
    weight: Any = members[1].weight
    weight.quant_state.absmax = weight.quant_state.absmax.flip(0).contiguous()
    check()
    weight.data = weight.data.flip(0).contiguous()
    check()


def test_weights_that_are_too_large_scaled_or_ragged_are_read_apart(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def pieces(*layers: nn.Module) -> list[int]:
        group = Group.of(tuple([projection(layer) for layer in layers]))
        return [piece.columns.stop - piece.columns.start for piece in group.pieces]

    plain = [nf4(64, 64, double=True) for _ in range(4)]
    assert pieces(*plain) == [64, 64, 64, 64]  # not on a GPU
    monkeypatch.setattr(Params4bit, "is_cuda", True, raising=False)
    assert pieces(*plain) == [192, 64]
    assert pieces(plain[0], nf4(64, 63, double=True), plain[1], plain[2]) == [64, 63, 128]
    assert pieces(plain[0], nf4(64, 64, double=False), frozen(64, 64)) == [64, 64, 64]
    assert pieces(adapted(nf4(64, 64, double=True), 2, variant="dora"), *plain[:2]) == [64, 128]
    monkeypatch.setattr("peftkit.methods.frozen.JOINED_BYTES", 2 * 2 * 64 * 64)
    assert pieces(*plain) == [128, 128]
