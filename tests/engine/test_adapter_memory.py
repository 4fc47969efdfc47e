"""Packing LoRAs and bottleneck adapters, and the memory that holds them: layout, churn, holes, refusals."""

import random
from collections.abc import Mapping
from dataclasses import replace
from itertools import count
from typing import Any

import pytest
import torch
from torch import Tensor

from peftkit.errors import AdapterError, UnsupportedError
from peftkit.methods import BottleneckConfig
from peftkit.methods.lora import LoraSite
from peftkit_kernels import BOTTLENECK_INPUTS, NON_LINEARITIES
from peftkit_serve.adapters.memory import AdapterMemory
from peftkit_serve.adapters.packing import SUB_LAYERS, UNIT_BYTES, PackedAdapter, pack_bottleneck, pack_lora
from peftkit_serve.models.spec import PROJECTIONS, ModelSpec

SPEC = ModelSpec(
    architecture="LlamaForCausalLM",
    num_layers=3,
    hidden_size=40,
    intermediate_size=200,
    num_heads=4,
    num_kv_heads=2,
    head_dim=10,
    vocab_size=50,
    max_position=100,
    norm_eps=1e-5,
    activation="silu",
    inv_freq=(1.0, 0.5, 0.25, 0.1, 0.05),
    rope_magnitude=1.0,
    windows=(None, None, None),
    qkv_bias=False,
    o_bias=False,
    mlp_bias=False,
    qk_norm=False,
    tied_embeddings=True,
    eos_token_ids=(),
)
SHAPES = dict(zip(PROJECTIONS, SPEC.projection_shapes, strict=True))


def no_base(path: str) -> tuple[Tensor, Tensor | None]:
    raise AssertionError(f"only DoRA needs the base's {path}")


def pack(tensors: Mapping[str, Tensor], sites: Mapping[str, LoraSite], **settings: Any) -> PackedAdapter:
    return pack_lora(tensors, sites, SPEC, base_linear=no_base, **settings)


class Lora:
    """A random LoRA: PEFT tensors and sites."""

    def __init__(self, ranks: Mapping[tuple[int, str], int]) -> None:
        self.sites: dict[str, LoraSite] = {}
        self.tensors: dict[str, Tensor] = {}
        for (layer, name), r in ranks.items():
            path, (out, inside) = f"model.layers.{layer}.{name}", SHAPES[name]
            self.sites[path] = LoraSite(r, random.random() + 0.5, out, inside)
            self.tensors[f"base_model.model.{path}.lora_A.weight"] = torch.randn(r, inside)
            self.tensors[f"base_model.model.{path}.lora_B.weight"] = torch.randn(out, r)

    def pack(self, **settings: Any) -> PackedAdapter:
        return pack(self.tensors, self.sites, **settings)


class Bottleneck:
    """Random bottleneck adapters: config and tensors under their keys."""

    def __init__(self, **fields: Any) -> None:
        self.config = BottleneckConfig.model_validate(fields).resolved(SPEC.hidden_size)
        shapes = self.config.expected_tensors(SPEC.num_layers, SPEC.hidden_size)
        self.tensors = {name: torch.randn(shape) for name, shape in shapes.items()}

    def pack(self, **settings: Any) -> PackedAdapter:
        return pack_bottleneck(self.tensors, self.config, SPEC, **settings)


def everywhere(r: int) -> Lora:
    return Lora({(layer, name): r for layer in range(3) for name in PROJECTIONS})


def random_lora(rng: random.Random) -> Lora:
    """Some projections of some layers, at ranks that differ."""
    sites = [(layer, name) for layer in range(3) for name in PROJECTIONS]
    return Lora({site: rng.choice([1, 7, 40, 90]) for site in rng.sample(sites, rng.randint(1, len(sites)))})


def random_bottleneck(rng: random.Random) -> Bottleneck:
    layers = rng.sample(range(3), rng.randint(1, 3))
    variant = rng.choice(["houlsby", "pfeiffer", "parallel"])
    return Bottleneck(variant=variant, bottleneck_size=rng.choice([1, 30, 300]), layers_to_transform=layers)


def make_memory(units: int, **settings: Any) -> AdapterMemory:
    defaults: dict[str, Any] = {"num_slots": 4, "dtype": torch.float32, "device": torch.device("cpu")}
    return AdapterMemory(SPEC, budget_bytes=units * UNIT_BYTES, **(defaults | settings))


def assert_holds(
    memory: AdapterMemory, slot: int, adapter: Lora | Bottleneck | None, dtype: torch.dtype = torch.float32
) -> None:
    """The tables of a slot lead to the adapter's own weights everywhere, and to nothing where it has none."""
    assert_holds_bottleneck(memory, slot, adapter if isinstance(adapter, Bottleneck) else None, dtype)
    lora = adapter if isinstance(adapter, Lora) else None
    for layer in range(3):
        offset_a, offset_b, rank, scale, _ = (table[:, slot].tolist() for table in memory.tables(layer))
        for p, name in enumerate(PROJECTIONS):
            path = f"model.layers.{layer}.{name}"
            if lora is None or path not in lora.sites:
                assert rank[p] == 0
                continue
            site, key = lora.sites[path], f"base_model.model.{path}"
            a = memory.weights[offset_a[p] :][: site.r * site.in_features].view(site.r, site.in_features)
            b = memory.weights[offset_b[p] :][: site.r * site.out_features].view(site.r, site.out_features)
            assert rank[p] == site.r and scale[p] == pytest.approx(site.scale)
            assert torch.equal(a, lora.tensors[f"{key}.lora_A.weight"].to(dtype))
            assert torch.equal(b, lora.tensors[f"{key}.lora_B.weight"].T.to(dtype))


def assert_holds_bottleneck(memory: AdapterMemory, slot: int, adapter: Bottleneck | None, dtype: torch.dtype) -> None:
    for layer in range(3):
        for place, tables in zip(SUB_LAYERS, memory.bottleneck_tables(layer), strict=False):
            offset, width, scale, (source, function, normed) = (table[slot].tolist() for table in tables)
            key = f"base_model.model.model.layers.{layer}.{place}."
            if adapter is None or f"{key}down.weight" not in adapter.tensors:
                assert width == 0
                continue
            names = ["down.weight", "up.weight", "up.bias", *["norm.weight", "norm.bias"] * normed, "down.bias"]
            parts = [
                adapter.tensors[key + name].T if name == "up.weight" else adapter.tensors[key + name] for name in names
            ]
            flat = torch.cat([part.flatten() for part in parts]).to(dtype)
            assert torch.equal(memory.weights[offset:][: flat.numel()], flat)
            assert width == adapter.config.bottleneck_size and scale == pytest.approx(adapter.config.scaling)
            sources = {"houlsby": "output", "pfeiffer": "sum", "parallel": "residual"}
            assert BOTTLENECK_INPUTS[source] == sources[adapter.config.variant]
            assert NON_LINEARITIES[function] == (adapter.config.non_linearity or "").replace("swish", "silu")
            assert normed == adapter.config.ln_before


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("variant", ["houlsby", "pfeiffer", "parallel"])
def test_a_loaded_bottleneck_is_found_through_the_tables(seed: int, variant: str, dtype: torch.dtype) -> None:
    memory = make_memory(64, dtype=dtype)
    assert not memory.extras.bottlenecks, "without any, no step looks for one"
    adapter = Bottleneck(variant=variant, bottleneck_size=7, ln_before=True, layers_to_transform=[0, 2])
    memory.load(3, adapter.pack(dtype=dtype))
    memory.load(1, (lora := everywhere(2)).pack(dtype=dtype))
    assert_holds(memory, 3, adapter, dtype)
    assert_holds(memory, 1, lora, dtype)
    memory.check_integrity()
    memory.free(3)
    assert not memory.extras.bottlenecks
    memory.check_integrity()


def test_bottleneck_widths_are_true() -> None:
    assert Bottleneck(bottleneck_size=1).pack().nbytes == 3 * UNIT_BYTES
    wide = Bottleneck(variant="pfeiffer", bottleneck_size=700, layers_to_transform=[1]).pack()
    assert wide.nbytes == -(-4 * (2 * 700 * 40 + 40 + 700) // UNIT_BYTES) * UNIT_BYTES


def test_bottleneck_tensors_that_do_not_fit_are_refused_by_name() -> None:
    adapter = Bottleneck(bottleneck_size=3)
    name = "base_model.model.model.layers.1.mlp_adapter.up.bias"
    with pytest.raises(AdapterError, match=r"tensor base_model\.model\.model\.norm belongs to no bottleneck"):
        pack_bottleneck(adapter.tensors | {"base_model.model.model.norm": torch.zeros(3)}, adapter.config, SPEC)
    with pytest.raises(AdapterError, match=rf"tensor {name} has shape \[4\], the base needs \[40\]"):
        pack_bottleneck(adapter.tensors | {name: torch.zeros(4)}, adapter.config, SPEC)
    del adapter.tensors[name]
    with pytest.raises(AdapterError, match=f"tensor {name} is missing"):
        adapter.pack()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_loaded_adapter_is_found_through_the_tables(seed: int, dtype: torch.dtype) -> None:
    rng = random.Random(seed)
    memory, lora = make_memory(64, dtype=dtype), random_lora(rng)
    packed = lora.pack(dtype=dtype)
    memory.load(2, packed)
    assert_holds(memory, 2, lora, dtype)
    assert memory.used_bytes() == packed.nbytes and packed.nbytes % UNIT_BYTES == 0
    assert all(span.offset_a * dtype.itemsize % 64 == 0 for layer in packed.layers for span in layer.lora)
    memory.check_integrity()


def test_ranks_are_true_a_small_adapter_takes_less(seed: int) -> None:
    assert everywhere(1).pack().nbytes == 3 * UNIT_BYTES
    small, large = everywhere(16).pack().nbytes, everywhere(64).pack().nbytes
    assert 3 * small <= large <= 4 * small
    exact = 64 * 4 * sum(out + inside for out, inside in SPEC.projection_shapes)
    assert large == 3 * -(-exact // UNIT_BYTES) * UNIT_BYTES
    assert Lora({(1, "mlp.up_proj"): 4}).pack().nbytes == UNIT_BYTES, "untouched layers take nothing"


def test_churn_keeps_every_resident_adapter_whole(seed: int) -> None:
    rng = random.Random(seed)
    memory = make_memory(26, num_slots=6)
    resident: dict[int, Lora | Bottleneck] = {}
    num_loads = 0
    for _ in range(120):
        slot = rng.randrange(6)
        if slot in resident:
            memory.free(slot)
            del resident[slot]
        else:
            adapter = rng.choice([random_lora, random_bottleneck])(rng)
            packed = adapter.pack()
            if memory.fits(packed.nbytes):
                memory.load(slot, packed)
                resident[slot] = adapter
                num_loads += 1
        memory.check_integrity()
        for number in range(6):
            assert_holds(memory, number, resident.get(number))
        assert memory.used_bytes() == sum(adapter.pack().nbytes for adapter in resident.values())
    assert num_loads > 10


def test_holes_are_slid_together_when_none_is_long_enough(seed: int) -> None:
    memory = make_memory(9, num_slots=6)
    wide = [Lora({(layer, "mlp.up_proj"): 100}) for layer in range(3)]  # 2 units each
    thin = [Lora({(0, "self_attn.q_proj"): 10}) for _ in range(3)]  # 1 unit each
    for slot, lora in enumerate([wide[0], thin[0], wide[1], thin[1], wide[2], thin[2]]):
        memory.load(slot, lora.pack())
    assert not memory.fits(1)
    memory.free(0)
    memory.free(2)
    large = Lora({(0, "mlp.down_proj"): 200})
    assert large.pack().nbytes == 3 * UNIT_BYTES, "longer than either hole"
    memory.load(0, large.pack())
    memory.check_integrity()
    for slot, lora in ((0, large), (1, thin[0]), (3, thin[1]), (4, wide[2]), (5, thin[2])):
        assert_holds(memory, slot, lora)


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_a_slide_that_fails_midway_leaves_every_resident_adapter_whole(
    seed: int, monkeypatch: pytest.MonkeyPatch, failing: int
) -> None:
    memory, move, moves = make_memory(9, num_slots=6), AdapterMemory._move, count()
    wide = [Lora({(layer, "mlp.up_proj"): 100}) for layer in range(3)]  # 2 units each
    thin = [Lora({(0, "self_attn.q_proj"): 10}) for _ in range(4)]  # 1 unit each
    for slot, lora in enumerate([wide[0], thin[0], wide[1], thin[1], wide[2], thin[2]]):
        memory.load(slot, lora.pack())
    memory.free(0)
    memory.free(2)

    def fails(self: AdapterMemory, *where: int) -> None:
        if next(moves) == failing:
            raise torch.OutOfMemoryError("out of memory")
        move(self, *where)

    monkeypatch.setattr(AdapterMemory, "_move", fails)
    with pytest.raises(torch.OutOfMemoryError):
        memory.load(0, Lora({(0, "mlp.down_proj"): 200}).pack())
    memory.check_integrity()
    memory.load(0, thin[3].pack())
    memory.free(1)
    memory.load(2, wide[0].pack())
    memory.check_integrity()
    for slot, lora in ((0, thin[3]), (2, wide[0]), (3, thin[1]), (4, wide[2]), (5, thin[2])):
        assert_holds(memory, slot, lora)


def test_what_fits_is_exact(seed: int) -> None:
    memory = make_memory(10)
    assert memory.capacity_bytes == 10 * UNIT_BYTES and memory.used_bytes() == 0
    memory.load(0, everywhere(1).pack())
    assert memory.fits(7 * UNIT_BYTES) and not memory.fits(7 * UNIT_BYTES + 1)
    with pytest.raises(AssertionError, match="bytes wanted"):
        memory.load(1, everywhere(90).pack())
    memory.check_integrity()


def test_a_load_that_fails_midway_leaves_nothing(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = make_memory(20)
    packed = everywhere(4).pack()
    broken = replace(packed.layers[2], weights=torch.zeros(packed.layers[2].weights.numel(), device="meta"))
    with pytest.raises(NotImplementedError):
        memory.load(1, PackedAdapter((*packed.layers[:2], broken, packed.layers[3])))
    memory.check_integrity()
    assert memory.used_bytes() == 0
    memory.load(1, packed)


def test_slots_are_loaded_and_freed_once(seed: int) -> None:
    memory = make_memory(20)
    memory.load(0, everywhere(1).pack())
    with pytest.raises(AssertionError, match="slot 0 is taken"):
        memory.load(0, everywhere(1).pack())
    memory.free(0)
    with pytest.raises(AssertionError, match="slot 0 is free already"):
        memory.free(0)


def test_grouped_tables_are_those_of_the_fused_linears(seed: int) -> None:
    memory = make_memory(20)
    memory.load(3, everywhere(2).pack())
    tables, groups = memory.tables(1), memory.grouped_tables(1)
    assert [group.rank_PS.shape[0] for group in groups] == [3, 1, 2, 1]
    for whole, *parts in zip(tables, *groups, strict=True):
        assert torch.equal(whole, torch.cat(parts))


@pytest.mark.parametrize("path", ["model.norm", "model.layers.3.mlp.up_proj", "model.layers.0.mlp.gate"])
def test_modules_that_are_no_linear_projection_are_refused_by_name(path: str) -> None:
    lora = Lora({(0, "mlp.up_proj"): 2})
    sites = lora.sites | {path: LoraSite(2, 1.0, 8, 8)}
    with pytest.raises(UnsupportedError, match=f"LoRA on {path} can't be served: self_attn.q_proj, "):
        pack(lora.tensors, sites)


def test_tensors_that_would_not_be_applied_are_refused_by_name() -> None:
    lora = Lora({(0, "mlp.up_proj"): 2})
    extra = "base_model.model.model.layers.0.mlp.up_proj.lora_bias"
    with pytest.raises(UnsupportedError, match=f"tensor {extra} can't be served"):
        pack(lora.tensors | {extra: torch.zeros(3)}, lora.sites)


def test_tensors_that_are_missing_or_misshapen_are_refused_by_name() -> None:
    lora = Lora({(0, "mlp.up_proj"): 2})
    name = "base_model.model.model.layers.0.mlp.up_proj.lora_B.weight"
    with pytest.raises(AdapterError, match=rf"tensor {name} has shape \[200, 3\], the base needs \[200, 2\]"):
        pack(lora.tensors | {name: torch.zeros(200, 3)}, lora.sites)
    del lora.tensors[name]
    with pytest.raises(AdapterError, match=f"tensor {name} is missing"):
        lora.pack()
