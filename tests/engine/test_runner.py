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
from peftkit_kernels import Segments
from peftkit_serve.adapters.packing import pack_lora
from peftkit_serve.batch import Batch
from peftkit_serve.budget import default_num_pages
from peftkit_serve.models.spec import read_spec
from peftkit_serve.plan import UNKNOWN, Chunk, Sample, StepPlan, StepResult
from peftkit_serve.request import SamplingParams
from peftkit_serve.runner import Runner
from peftkit_serve.step_inputs import StepInputs

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


def lay_out(chunks: list[Chunk], last: tuple[int, ...] = (), sources: list[int] | None = None) -> Batch:
    inputs = StepInputs(torch.device("cpu"))
    return inputs.lay_out(chunks, torch.tensor(last, dtype=torch.int64), sources or [-1] * len(chunks)).batch


def test_a_batch_has_the_plans_order_with_adapted_rows_sorted_beside_it() -> None:
    batch = lay_out(
        [
            chunk("a", [5, 6, 7], 15, (9, 4, 8), slot=1),
            chunk("b", [3], 0, (2,), sample=None),
            chunk("c", [1, 2], 2, (7,), slot=0, num_virtual=2),
        ],
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
    batch = lay_out([chunk("a", [1], 0, (0,))])
    assert batch.segments is None


def naive(chunks: list[Chunk]) -> dict[str, list[int] | list[list[int]]]:
    """A step's rows one after the other."""
    rows = [(one, one.start + n, token) for one in chunks for n, token in enumerate(one.token_ids)]
    first = [sum(len(one.token_ids) for one in chunks[:n]) for n in range(len(chunks) + 1)]
    asked = [
        (one, first[n] + m)
        for n, one in enumerate(chunks)
        for m in [*range(len(one.targets)), *([len(one.token_ids) - 1] if one.sample else [])]
    ]
    adapted = sorted((one.slot, row) for row, (one, _, _) in enumerate(rows) if one.slot >= 0)
    answering = sorted((one.slot, row) for row, (one, _) in enumerate(asked) if one.slot >= 0)
    return {
        "token": [token for _, _, token in rows],
        "position": [position for _, position, _ in rows],
        "cell": [one.block_table[position // 16] * 16 + position % 16 for one, position, _ in rows],
        "cu_seqlens": first,
        "sample_row": [row for _, row in asked],
        "segment_row": [row for _, row in adapted],
        "segment_slot": sorted({slot for slot, _ in adapted}),
        "sample_row_of_slot": [row for _, row in answering],
    }


def test_any_step_is_laid_out_row_by_row(seed: int) -> None:
    rng, inputs = random.Random(seed), StepInputs(torch.device("cpu"))
    for _ in range(40):
        chunks: list[Chunk] = []
        for n in range(rng.randint(1, 9)):
            tokens, start = (
                [rng.randrange(99) for _ in range(rng.choice((1, 1, rng.randint(2, 40))))],
                rng.randrange(50),
            )
            table = tuple(rng.sample(range(99), -(-(start + len(tokens)) // 16) + rng.randrange(3)))
            fields: dict[str, Any] = {"slot": rng.randint(-1, 2), "sample": rng.choice((None, GREEDY))}
            targets = tuple(tokens[: rng.choice((0, 0, len(tokens) - 1))])
            chunks.append(chunk(str(n), tokens, start, table, targets=targets, **fields))
        batch, draws = inputs.lay_out(chunks, torch.zeros(0, dtype=torch.int64), [-1] * len(chunks))
        wanted, widest = naive(chunks), max(-(-(one.start + len(one.token_ids)) // 16) for one in chunks)
        assert [batch.token_T.tolist(), batch.position_T.tolist()] == [wanted["token"], wanted["position"]]
        assert [batch.cell_T.tolist(), batch.sample_row_X.tolist()] == [wanted["cell"], wanted["sample_row"]]
        assert batch.cu_seqlens_N1.tolist() == wanted["cu_seqlens"] and batch.page_NM.shape[1] == widest
        for name, segments in (("segment_row", batch.segments), ("sample_row_of_slot", batch.sample_segments)):
            assert (segments is None) == (not wanted[name])
            if segments is not None:
                assert segments.row_X.tolist() == wanted[name]
                derived = Segments.of(segments.row_X, segments.start_G1, segments.slot_G)
                assert segments.row_slot_X.tolist() == derived.row_slot_X.tolist()
                assert (
                    segments.start_G1[-1] == len(segments.row_X) and len(segments.start_G1) == len(segments.slot_G) + 1
                )
        assert batch.segments is None or batch.segments.slot_G.tolist() == wanted["segment_slot"]
        assert len(draws.seed) == sum(one.sample is not None for one in chunks)
        assert all(tensor.data_ptr() % 64 == 0 for tensor in (batch.token_T, batch.page_NM, draws.top_p) if len(tensor))


@pytest.mark.parametrize("graphs", [False, True])
def test_a_token_that_is_not_known_is_the_one_drawn_in_the_step_before(
    make_runner: MakeRunner, seed: int, graphs: bool
) -> None:
    rng = random.Random(seed)
    ahead, plain = make_runner(graphs=graphs), make_runner(graphs=False)
    texts = {str(n): [rng.randrange(260) for _ in range(rng.randint(1, 9))] for n in range(4)}
    drawn = plain.run(StepPlan(tuple(chunk(name, text, 0, (int(name),)) for name, text in texts.items()))).tokens
    ahead.launch(StepPlan(tuple(chunk(name, text, 0, (int(name),)) for name, text in texts.items())))
    for step in range(5):
        names = rng.sample(sorted(drawn), len(drawn) if step < 2 else 3)
        prompt = [chunk("new", [1, 2, 3], 0, (9,), sample=None)] if step == 1 else []  # a step of both kinds
        start = {name: len(texts[name]) + step for name in names}
        known = [chunk(name, [drawn[name]], start[name], (int(name),)) for name in names]
        unknown = [chunk(name, [UNKNOWN], start[name], (int(name),)) for name in names]
        drawn = plain.run(StepPlan((*prompt, *known))).tokens
        launched = ahead.launch(StepPlan((*prompt, *unknown)))
        assert not isinstance(launched, StepResult) and ahead.collect(launched).tokens == drawn


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
    assert runner.split.kv == 10 * 16 * spec.kv_bytes_per_token(torch.float32) == 10 * 16 * 2 * 2 * 2 * 8 * 4
    assert (
        runner.weight_bytes
        == runner.split.weights
        == sum(tensor.nbytes for tensor in load_file(base_folder / "model.safetensors").values())
    )


def test_the_split_of_memory_adds_up_and_is_told(make_runner: MakeRunner, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        split = make_runner(num_pages=10, adapter_bytes=5 << 16).split
    assert split.adapters == 5 << 16 and split.graphs == 0 and split.steps > 0
    assert f"kv {split.kv / 2**20:.0f} MiB" in caplog.text


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
