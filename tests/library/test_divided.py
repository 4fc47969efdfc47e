"""A frozen base whose layers are divided over processes: the bits of a whole one, in a share of its memory.

Of one process the pieces are whole layers, and all else is as with several: two buffers, filled again and again.
"""

import json
import logging
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

import peftkit.base.divided
from peftkit.base import load_base
from peftkit.base.divided import divide, division
from peftkit.base.fill import Filling
from peftkit.data import Sample, collate
from peftkit.data.sampler import Shape
from peftkit.errors import RecipeError
from peftkit.methods import attach, detach, fuse
from peftkit.recipe import Recipe, Runs
from peftkit.train import train_runs
from peftkit.train.loop import accumulate_gradients, idle_pass
from peftkit.train.memory import estimate_memory, weight_bytes
from peftkit.train.recompute import Recompute, decoder_layers, set_recompute
from peftkit_bench import train_processes

METHODS: dict[str, dict[str, Any]] = {
    "lora": {"r": 4, "dropout": 0.2},
    "dora": {"kind": "lora", "r": 4, "variant": "dora"},
    "pissa": {"kind": "lora", "r": 2, "init": "pissa"},
    "some layers": {"kind": "lora", "r": 4, "targets": r".*layers\.[23]\.mlp\..*"},
    "bottleneck": {"bottleneck_size": 8, "dropout": 0.2},
    "prefix": {"num_virtual_tokens": 3},
    "prompt": {"num_virtual_tokens": 3},
}
LEVELS = [Recompute(), Recompute("selective"), Recompute("selective", 2), Recompute("full")]


@pytest.fixture(scope="module")
def alone() -> Iterator[None]:
    """A group of this process alone."""
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield
    dist.destroy_process_group()


Pair = tuple[PreTrainedModel, PreTrainedModel]


@pytest.fixture(scope="module")
def pairs(deep_base: Path, alone: None) -> dict[str, Pair]:
    """A base that is whole and the same divided, by how it is held."""
    held: dict[str, dict[str, Any]] = {
        "none": {"quant": "none"},
        "nf4": {"quant": "nf4"},
        "single": {"quant": "nf4", "double_quant": False},
    }
    found = {}
    for name, how in held.items():
        whole, divided = (load_base(str(deep_base), device="cpu", **how)[0] for _ in range(2))
        divide(divided)
        found[name] = (whole, divided)
    return found


@pytest.fixture
def bare(pairs: dict[str, Pair]) -> Iterator[dict[str, Pair]]:
    """The same, each left as it was found."""
    yield pairs
    for model in (model for pair in pairs.values() for model in pair):
        set_recompute(model, Recompute())
        detach(model).eval()


def adapted(model: PreTrainedModel, name: str) -> PreTrainedModel:
    method = {"kind": name, **METHODS[name]}
    attach(model, Recipe.model_validate({"method": method, "data": {"train": "x"}}).methods[0], seed=3)
    generator = torch.Generator().manual_seed(5)
    for parameter in model.parameters():
        if parameter.requires_grad:  # nothing is left at zero
            parameter.data += 0.05 * torch.randn(parameter.shape, generator=generator).to(parameter)
    return model.train()


def rows(seed: int, longer: int = 0) -> Any:
    torch.manual_seed(seed)
    ids = [torch.randint(97, (length + longer,)).numpy().astype("int32") for length in (5, 11, 7)]
    return collate([Sample("", row, torch.arange(len(row)).numpy() > 0) for row in ids])


def gradients(model: PreTrainedModel) -> list[Tensor]:
    found = [p.grad.clone() for p in model.parameters() if p.requires_grad and p.grad is not None]
    model.zero_grad()
    assert found and all(grad.any() for grad in found)
    return found


def steps(model: PreTrainedModel) -> list[Tensor]:
    """Losses and gradients of two micro-batches, with a pass without gradients before them."""
    with torch.no_grad():
        found: list[Tensor] = [model(input_ids=rows(9).input_ids_BT).logits]
    torch.manual_seed(7)
    for seed in (0, 1):
        found.append(torch.tensor(accumulate_gradients(model, [rows(seed)])))
        found += gradients(model)
    return found


def assert_same(one: list[Tensor], other: list[Tensor]) -> None:
    assert len(one) == len(other)
    for a, b in zip(one, other, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("quant", "name"), [*(("nf4", name) for name in METHODS), ("none", "lora"), ("none", "dora"), ("none", "prefix")]
)
def test_losses_and_gradients_have_the_bits_of_a_whole_base(bare: dict[str, Pair], name: str, quant: str) -> None:
    for model in bare[quant]:
        adapted(model, name)
    for is_fused in (False, True):
        for level in LEVELS if is_fused else (LEVELS[0], LEVELS[-1]):
            found = []
            for model in bare[quant]:
                set_recompute(model, level)
                found.append(steps(model))
            assert_same(*found)
        if not is_fused:
            for model in bare[quant]:
                fuse(model)


def test_scales_that_are_not_quantised_are_divided_too(bare: dict[str, Pair]) -> None:
    assert_same(*(steps(adapted(model, "lora")) for model in bare["single"]))


@pytest.mark.parametrize("quant", ["nf4", "none"])
@pytest.mark.parametrize("is_fused", [False, True])
def test_a_graph_goes_back_twice_and_after_another_pass(
    bare: dict[str, Pair], quant: str, is_fused: bool, seed: int
) -> None:
    """retain_graph, and passes forward that are between a pass and its way back."""
    found: list[list[Tensor]] = []
    for model in bare[quant]:
        adapted(model, "bottleneck")  # whose backward pass needs all layers
        if is_fused:
            fuse(model)
        torch.manual_seed(seed)
        losses = [model(input_ids=rows(n).input_ids_BT, labels=rows(n).input_ids_BT).loss for n in (0, 1)]
        own: list[Tensor] = [*losses]
        # a fused feed-forward writes over what it saved
        ways: list[tuple[int, bool]] = [(0, False), (1, False)] if is_fused else [(0, True), (1, False), (0, False)]
        for place, again in ways:
            losses[place].backward(retain_graph=again)
            own += gradients(model)
        found.append(own)
    assert_same(*found)


def test_torch_s_own_checkpointing_finds_the_layers(bare: dict[str, Pair]) -> None:
    found = []
    for model in bare["none"]:
        adapted(model, "prefix")
        for layer in decoder_layers(model):
            layer.gradient_checkpointing = True
            layer._gradient_checkpointing_func = partial(checkpoint, use_reentrant=False)
        found.append(steps(model))
    assert_same(*found)


def test_layers_are_gathered_once_on_the_way_there_and_once_on_the_way_back(
    bare: dict[str, Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = adapted(bare["nf4"][1], "lora")
    divided = division(model)
    assert divided is not None
    sent: list[int] = []
    gather = peftkit.base.divided._all_gather

    def noted(whole_U: Tensor, piece_U: Tensor, **how: Any) -> Any:
        sent.append(next(place for place, piece in enumerate(divided._pieces) if piece is piece_U))
        return gather(whole_U, piece_U, **how)

    monkeypatch.setattr(peftkit.base.divided, "_all_gather", noted)
    orders = []
    for level in (Recompute(), *LEVELS):  # the first pass finds others in the buffers
        set_recompute(model, level)
        sent.clear()
        accumulate_gradients(model, [rows(0)])
        orders.append(list(sent))
    # the last two are there when the way back begins, the first two when the next pass does
    assert orders[1:] == [[2, 3, 4, 2, 1, 0]] * len(LEVELS)


def test_what_is_held_is_a_share_and_two_layers(bare: dict[str, Pair]) -> None:
    for whole, model in bare.values():
        divided = division(model)
        assert divided is not None and division(whole) is None
        layers = [parameter for layer in decoder_layers(model) for parameter in layer.parameters()]
        storages = {parameter.untyped_storage().data_ptr() for parameter in layers}
        assert len(storages) == 2  # the buffers
        a_layer = divided.whole_bytes / 5
        padding = 128 * 40  # of less than 40 tensors
        assert a_layer <= (divided.held_bytes - divided.whole_bytes) / 2 <= a_layer + 4 * padding
        assert weight_bytes(model) - weight_bytes(whole) == divided.held_bytes - divided.whole_bytes
        # of the embeddings and the last norm nothing is taken
        embedding, head = model.get_parameter("model.embed_tokens.weight"), model.get_parameter("lm_head.weight")
        assert embedding.data_ptr() not in storages and embedding is head


@pytest.mark.parametrize("quant", ["nf4", "none"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_base_that_is_divided_while_it_is_loaded_is_the_same(
    deep_base: Path, alone: None, monkeypatch: pytest.MonkeyPatch, quant: str, dtype: str
) -> None:
    how: dict[str, Any] = {"quant": quant, "dtype": dtype, "compute_dtype": dtype, "device": "cpu"}
    whole, _ = load_base(str(deep_base), **how)
    most, fill_module = [0], Filling.fill_module

    def noted(self: Filling, path: str) -> None:
        fill_module(self, path)
        layers = [p for layer in decoder_layers(self._model) for p in layer.parameters() if p.device.type == "cpu"]
        most.append(sum(parameter.nbytes for parameter in layers))

    monkeypatch.setattr(Filling, "fill_module", noted)
    divided, _ = load_base(str(deep_base), divided=True, **how)
    a_layer = sum(parameter.nbytes for parameter in decoder_layers(whole)[0].parameters())
    assert most == [0] + 5 * [a_layer]  # no other is there beside the one that was loaded last
    ids = rows(0).input_ids_BT
    with torch.no_grad():
        assert torch.equal(whole(input_ids=ids).logits, divided(input_ids=ids).logits)
    for name, buffer in whole.named_buffers():
        assert torch.equal(divided.get_buffer(name), buffer)
    assert [name for name, _ in whole.named_parameters()] == [name for name, _ in divided.named_parameters()]
    assert divided.get_parameter("lm_head.weight") is divided.get_parameter("model.embed_tokens.weight")
    assert whole.generation_config == divided.generation_config and not divided.training
    assert (whole.dtype, whole.device) == (divided.dtype, divided.device)
    assert not any(parameter.requires_grad for parameter in divided.parameters())


def test_a_base_whose_trunk_was_saved_alone_is_divided_too(deep_base: Path, alone: None, tmp_path: Path) -> None:
    shutil.copytree(deep_base, tmp_path / "base")
    file = tmp_path / "base" / "model.safetensors"
    tensors = {name.removeprefix("model."): tensor.clone() for name, tensor in load_file(file).items()}
    save_file(tensors, file, metadata={"format": "pt"})
    ids = rows(0).input_ids_BT
    with torch.no_grad():
        one, other = (
            load_base(str(folder), device="cpu", divided=divided)[0](input_ids=ids).logits
            for folder, divided in ((deep_base, False), (tmp_path / "base", True))
        )
    assert torch.equal(one, other)


def test_the_estimate_of_a_step_is_that_of_a_whole_base(bare: dict[str, Pair]) -> None:
    shape = Shape(rows=2, length=16, tokens=32, targets=30)
    memory = [estimate_memory(adapted(model, "lora"), [shape], packed=False) for model in bare["nf4"]]
    assert memory[0].activations == memory[1].activations > 0
    divided = division(bare["nf4"][1])
    assert divided is not None
    assert memory[1].weights - memory[0].weights == divided.held_bytes - divided.whole_bytes


def test_an_idle_pass_leaves_nothing_behind(bare: dict[str, Pair]) -> None:
    model = adapted(bare["none"][1], "lora")
    accumulate_gradients(model, [rows(0)])
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    trained[0].grad = None
    before = [None if parameter.grad is None else parameter.grad.clone() for parameter in trained]
    batch = rows(1)
    state = torch.get_rng_state()
    idle_pass(model, batch)
    assert torch.equal(torch.get_rng_state(), state)
    for parameter, grad in zip(trained, before, strict=True):
        assert (parameter.grad is None) == (grad is None)
        assert grad is None or torch.equal(parameter.grad, grad)  # type: ignore[arg-type]


def test_the_benchmark_of_processes_measures_a_divided_base(
    alone: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(train_processes, "leave", lambda: None)  # other tests are in the group
    for how in ([], ["full"], ["full", "divided"]):
        train_processes.main(["toy:nf4:lora:1x16", "2", *how])
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{")]
    assert [line["divided"] for line in lines] == [False, False, True]
    assert lines[0]["losses"] == lines[1]["losses"] == lines[2]["losses"]
    assert lines[0]["weight_bytes"] < lines[2]["weight_bytes"]  # of one process: two layers more


def test_one_process_is_told_that_nothing_is_divided(
    make_recipe: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "peftkit")
    summaries = [
        train_runs(Runs((make_recipe(train={"max_steps": 1, "shard_base": shard}, out=str(tmp_path / str(shard))),)))
        for shard in (False, True)
    ]
    assert [record.message for record in caplog.records if "shard_base" in record.message] == [
        "train.shard_base: there is one process, so the base stays whole"
    ]
    assert summaries[0][0].uid == summaries[1][0].uid


def test_runs_on_one_base_agree_on_dividing_it(make_recipe: Any, tmp_path: Path) -> None:
    one, other = (make_recipe(train={"shard_base": shard}, out=str(tmp_path / str(shard))) for shard in (False, True))
    with pytest.raises(RecipeError, match=r"train\.shard_base: all runs share one base"):
        train_runs(Runs((one, other)))
