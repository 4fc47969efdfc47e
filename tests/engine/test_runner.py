"""The runner over a tiny random Llama: page copies, draws, prefixes, failures of one row, and its byte budgets."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig

from peftkit.artifact import read_adapter
from peftkit.base import BaseInfo, module_shapes
from peftkit.errors import InputError, RunError
from peftkit.methods import LoraConfig
from peftkit_serve.adapters.packing import pack_lora
from peftkit_serve.batch import build_batch
from peftkit_serve.models.spec import read_spec
from peftkit_serve.plan import Chunk, Sample, StepPlan
from peftkit_serve.request import SamplingParams
from peftkit_serve.runner import Runner, default_num_pages

GREEDY = Sample(SamplingParams(temperature=0.0), 0, 0)
MakeRunner = Callable[..., Runner]


@pytest.fixture
def make_runner(base_folder: Path) -> MakeRunner:
    def make(**settings: Any) -> Runner:
        defaults: dict[str, Any] = {"device": "cpu", "num_pages": 32, "num_slots": 2, "deterministic": True}
        return Runner(BaseInfo("tiny", base_folder), **(defaults | settings))

    return make


def chunk(name: str, tokens: list[int], start: int, table: tuple[int, ...], **fields: Any) -> Chunk:
    return Chunk(name, tuple(tokens), start, table, **({"slot": -1, "num_virtual": 0, "sample": GREEDY} | fields))


def test_a_batch_has_the_plans_order_with_adapted_rows_sorted_beside_it() -> None:
    batch = build_batch(
        [
            chunk("a", [5, 6, 7], 15, (9, 4, 8), slot=1),
            chunk("b", [3], 0, (2,), sample=None),
            chunk("c", [1, 2], 2, (7,), slot=0, num_virtual=2),
        ],
        page_tokens=16,
        device=torch.device("cpu"),
    )
    assert batch.token_T.tolist() == [5, 6, 7, 3, 1, 2]
    assert batch.position_T.tolist() == [15, 16, 17, 0, 2, 3]
    assert batch.cell_T.tolist() == [9 * 16 + 15, 4 * 16, 4 * 16 + 1, 2 * 16, 7 * 16 + 2, 7 * 16 + 3]
    assert batch.cu_seqlens_N1.tolist() == [0, 3, 4, 6] and batch.context_N.tolist() == [18, 1, 4]
    assert batch.page_NM.tolist() == [[9, 4], [2, 0], [7, 0]], "pages for tokens to come are left out"
    assert batch.num_virtual_N.tolist() == [0, 0, 2] and batch.sample_row_X.tolist() == [2, 5]
    assert batch.segments is not None
    assert batch.segments.row_X.tolist() == [4, 5, 0, 1, 2] and batch.segments.slot_G.tolist() == [0, 1]


def test_a_batch_of_bare_rows_has_no_segments() -> None:
    batch = build_batch([chunk("a", [1], 0, (0,))], page_tokens=16, device=torch.device("cpu"))
    assert batch.segments is None


def test_tokens_come_back_by_request_for_the_chunks_that_draw(make_runner: MakeRunner, seed: int) -> None:
    runner = make_runner()
    plan = StepPlan((chunk("a", [1, 2], 0, (0,)), chunk("b", [3], 0, (1,), sample=None), chunk("c", [4], 0, (2,))))
    tokens = runner.run(plan).tokens
    assert set(tokens) == {"a", "c"} and all(0 <= token < 260 for token in tokens.values())
    assert runner.run(StepPlan((chunk("b", [3], 0, (1,), sample=None),))).tokens == {}


def test_pages_are_copied_before_the_step_reads_them(make_runner: MakeRunner, seed: int) -> None:
    runner, rng = make_runner(), random.Random(seed)
    text = [rng.randrange(260) for _ in range(20)]
    (wanted,) = runner.run(StepPlan((chunk("whole", text, 0, (0, 1)),))).tokens.values()
    runner.run(StepPlan((chunk("head", text[:10], 0, (5,), sample=None),)))
    copied = StepPlan((chunk("fork", text[10:], 10, (7, 8)),), copies=((5, 7),))
    assert runner.run(copied).tokens == {"fork": wanted}
    assert runner.run(StepPlan((chunk("again", text[10:], 10, (5, 9)),))).tokens == {"again": wanted}


def test_a_prefix_is_computed_as_embedded_tokens_would_be(make_runner: MakeRunner, seed: int) -> None:
    runner, rng = make_runner(), random.Random(seed)
    text = [rng.randrange(260) for _ in range(30)]
    (wanted,) = runner.run(StepPlan((chunk("text", text, 0, (0, 1)),))).tokens.values()
    runner.compute_prefix(runner._decoder._weights.embedding_VH[text[:18]], (3, 4))
    assert runner.run(StepPlan((chunk("rest", text[18:], 18, (3, 4), num_virtual=18),))).tokens == {"rest": wanted}


def test_virtual_tokens_of_an_adapter_with_weights_are_computed_with_them(
    make_runner: MakeRunner, base_folder: Path, lora_folder: Callable[..., Path], seed: int
) -> None:
    runner, rng = make_runner(), random.Random(seed)
    artifact = read_adapter(lora_folder(seed))
    assert isinstance(artifact.config, LoraConfig)
    sites = artifact.config.resolve(module_shapes(AutoConfig.from_pretrained(base_folder)))
    runner.memory.load(1, pack_lora(artifact.tensors, sites, runner.spec, base_linear=runner.base_linear))
    text = [rng.randrange(260) for _ in range(30)]
    (wanted,) = runner.run(StepPlan((chunk("text", text, 0, (0, 1), slot=1),))).tokens.values()
    runner.compute_prefix(runner._decoder._weights.embedding_VH[text[:18]], (3, 4), 1)
    rest = chunk("rest", text[18:], 18, (3, 4), slot=1, num_virtual=18)
    assert runner.run(StepPlan((rest,))).tokens == {"rest": wanted}


@pytest.mark.parametrize("num_virtual", [3, 16, 18])
def test_a_written_prefix_is_what_computing_it_leaves_in_the_pages(
    make_runner: MakeRunner, seed: int, num_virtual: int
) -> None:
    runner, rng = make_runner(), random.Random(seed)
    text = [rng.randrange(260) for _ in range(30)]
    (wanted,) = runner.run(StepPlan((chunk("text", text, 0, (0, 1)),))).tokens.values()
    rows = [kv[[0, 1]].flatten(0, 1)[:num_virtual] for kv in runner._kv]
    for kv in runner._kv:
        kv[[5, 3]] = float("nan")
    runner.write_prefix(torch.stack(rows, dim=1), (5, 3))
    rest = chunk("rest", text[num_virtual:], num_virtual, (5, 3), num_virtual=num_virtual)
    assert runner.run(StepPlan((rest,))).tokens == {"rest": wanted}
    for kv in runner._kv:
        kv[[5, 3]] = 0.0
    runner.write_prefix(torch.stack(rows, dim=1), (5, 3)[: -(-num_virtual // 16)])
    assert all(kv[[5, 3]].flatten(0, 1)[num_virtual:].eq(0).all() for kv in runner._kv), "no cell behind is written"


def test_draws_follow_seed_and_step_whatever_else_is_drawn(make_runner: MakeRunner, seed: int) -> None:
    runner, rng = make_runner(), random.Random(seed)

    def sampled(number: int, draw_seed: int, step: int) -> Chunk:
        sample = Sample(SamplingParams(temperature=2.0), draw_seed, step)
        return chunk(str(number), [number], 0, (number,), sample=sample)

    chunks = [sampled(n, rng.randrange(2**63), rng.randrange(100)) for n in range(12)]
    together = runner.run(StepPlan(tuple(rng.sample(chunks, 12)))).tokens
    for one in chunks:
        assert runner.run(StepPlan((one,))).tokens[one.request_id] == together[one.request_id]
    same = [sampled(0, 7, 0), *(sampled(0, s, t) for s in range(20) for t in range(3))]
    assert len({next(iter(runner.run(StepPlan((one,))).tokens.values())) for one in same}) > 5


def test_an_adapter_that_overflows_draws_nothing_and_harms_nobody(
    make_runner: MakeRunner, base_folder: Path, lora_folder: Callable[..., Path], seed: int
) -> None:
    runner = make_runner()
    artifact = read_adapter(lora_folder(seed))
    assert isinstance(artifact.config, LoraConfig)
    sites = artifact.config.resolve(module_shapes(AutoConfig.from_pretrained(base_folder)))
    huge = {name: tensor * 1e30 for name, tensor in artifact.tensors.items()}
    runner.memory.load(0, pack_lora(huge, sites, runner.spec, base_linear=runner.base_linear))
    good = chunk("good", [1, 2, 3], 0, (0,))
    alone = runner.run(StepPlan((good,))).tokens
    bad = chunk("bad", [1, 2, 3], 0, (1,), slot=0)
    assert runner.run(StepPlan((bad, good))).tokens == alone | {"bad": -1}
    next_plan = StepPlan((chunk("good", [4], 3, (0,)), chunk("heir", [9], 0, (1,))))
    fresh = make_runner()
    fresh.run(StepPlan((good,)))
    assert runner.run(next_plan).tokens == fresh.run(next_plan).tokens, "the heir of the page meets none of it"


def test_bytes_are_those_of_the_tensors(make_runner: MakeRunner, base_folder: Path) -> None:
    runner = make_runner(num_pages=10)
    spec = read_spec(base_folder)
    assert runner.num_pages == 10
    assert runner.kv_bytes == 10 * 16 * spec.kv_bytes_per_token(torch.float32) == 10 * 16 * 2 * 2 * 2 * 8 * 4
    assert runner.weight_bytes == sum(tensor.nbytes for tensor in load_file(base_folder / "model.safetensors").values())


def test_kv_memory_is_no_more_than_all_requests_at_full_length_can_use(make_runner: MakeRunner) -> None:
    assert make_runner(num_pages=None, max_requests=3).num_pages == 3 * (160 // 16)


def test_pages_fill_a_byte_budget(base_folder: Path) -> None:
    spec = read_spec(base_folder)
    page_bytes = 16 * spec.kv_bytes_per_token(torch.float32)
    assert default_num_pages(spec, 7 * page_bytes + page_bytes - 1, torch.float32) == 7
    with pytest.raises(RunError, match=f"a page takes {page_bytes} bytes, 5 are free"):
        default_num_pages(spec, 5, torch.float32)


def test_a_number_of_pages_that_makes_no_sense_is_refused(make_runner: MakeRunner) -> None:
    with pytest.raises(InputError, match="num_pages is 0: it must be at least 1") as error:
        make_runner(num_pages=0)
    assert error.value.field == "num_pages"
    with pytest.raises(RunError, match=r"KV pages take [0-9]+ bytes, too many for cpu: lower num_pages"):
        make_runner(num_pages=2**48)
