"""Decode steps on padded buffers: what a CUDA graph replays, run as it is, has the bits of the step without padding."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from peftkit.base import BaseInfo
from peftkit_serve import Engine, Request, SamplingParams
from peftkit_serve.decode_inputs import row_buckets, segment_buckets
from peftkit_serve.plan import Chunk, Sample, StepPlan
from peftkit_serve.runner import Runner

MAX_REQUESTS = 9
BUCKETS = (1, 2, 4, 8, 9)


def test_buckets_hold_every_number_of_rows_and_waste_little() -> None:
    assert row_buckets(9) == BUCKETS and row_buckets(1) == (1,) and row_buckets(8) == (1, 2, 4, 8)
    assert row_buckets(256) == (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256)
    assert segment_buckets(1) == (1,) and segment_buckets(2) == (2,) and segment_buckets(9) == (4, 8, 9)
    assert segment_buckets(64) == (4, 8, 16, 32, 64)


class Steps:
    """A runner whose decode steps are computed both ways, over requests that have some text in the pages."""

    def __init__(self, runner: Runner, rng: random.Random) -> None:
        self.runner, self.rng = runner, rng
        pages = rng.sample(range(runner.num_pages), runner.num_pages)
        self.tables = [tuple(pages[6 * n : 6 * n + 6]) for n in range(MAX_REQUESTS)]
        self.lengths = [rng.randrange(1, 90) for _ in range(MAX_REQUESTS)]
        for kv in runner._kv:
            kv.fill_(float("nan"))
        for table, length in zip(self.tables, self.lengths, strict=True):
            tokens = tuple(rng.randrange(260) for _ in range(length))
            runner.run(StepPlan((Chunk("", tokens, 0, table, -1, 0, None),)))

    def check(self, slots: list[int], requests: list[int]) -> tuple[int, int]:
        """Computes a step of these requests with these slots both ways; returns its bucket's rows and segments."""
        params = [SamplingParams(temperature=self.rng.choice((0.0, 1.5)), top_k=self.rng.choice((0, 5))) for _ in slots]
        chunks = [
            Chunk(
                str(n), (self.rng.randrange(260),), self.lengths[n], self.tables[n], slot, 0,
                Sample(one, self.rng.randrange(2**63), self.rng.randrange(9)),
            )
            for n, slot, one in zip(requests, slots, params, strict=True)
        ]  # fmt: skip
        graphs, runner = self.runner._graphs, self.runner
        assert graphs is not None
        extras = runner.memory.extras_of(slots)
        assert graphs.takes(chunks, extras)
        with torch.inference_mode():
            wanted = runner._logits(runner._batch(chunks))
            drawn = graphs.run(chunks, extras, [-1] * len(chunks))
        assert torch.equal(drawn.logits_NV[: len(chunks)], wanted), (requests, slots)
        assert wanted.isfinite().all()
        runner._graphs = None
        tokens = runner.run(StepPlan(tuple(chunks))).tokens
        runner._graphs = graphs
        assert runner.run(StepPlan(tuple(chunks))).tokens == tokens, (requests, slots)
        for n in requests:
            self.lengths[n] = min(self.lengths[n] + self.rng.randrange(2), 95)
        bucket = graphs._inputs.write(chunks, [-1] * len(chunks))
        return bucket.num_rows, bucket.num_segments


@pytest.fixture
def make_steps(base_folder: Path, seed: int) -> Callable[..., Steps]:
    def make(**settings: Any) -> Steps:
        defaults: dict[str, Any] = {"num_pages": 60, "num_slots": 7, "max_requests": MAX_REQUESTS}
        base = BaseInfo("tiny", base_folder)
        runner = Runner(base, device="cpu", deterministic=True, graphs=True, **(defaults | settings))
        return Steps(runner, random.Random(seed))

    return make


def test_every_crossing_of_buckets_keeps_the_bits(
    make_steps: Callable[..., Steps],
    make_engine: Callable[..., Engine],
    every_kind: Callable[..., dict[str, Path]],
    seed: int,
) -> None:
    steps = make_steps()
    engine = make_engine(max_adapters=2)  # for its loader
    packed = [
        weights
        for folder in every_kind(seed).values()
        if (weights := engine.adapters._loader.submit(folder).result().weights) is not None
    ]
    assert len(packed) == 6
    seen: set[tuple[int, int]] = set()
    loaded: set[int] = set()
    sizes = [a for one in BUCKETS for other in BUCKETS for a in (one, other)]
    for count in sizes:
        for slot in range(7):
            if steps.rng.random() < 0.3:
                if slot in loaded:
                    loaded.remove(slot)
                    steps.runner.memory.free(slot)
                else:
                    loaded.add(slot)
                    steps.runner.memory.load(slot, steps.rng.choice(packed))
        size = count if count < 3 else steps.rng.choice((count, count - 1))
        choices = steps.rng.choice(([-1], [-1, *loaded], sorted(loaded) or [-1], [min(loaded, default=-1)]))
        slots = [steps.rng.choice(choices) for _ in range(size)]
        seen.add(steps.check(slots, steps.rng.sample(range(MAX_REQUESTS), size)))
    assert {rows for rows, _ in seen} == set(BUCKETS)
    assert {0} < {segments for _, segments in seen}
    steps.runner.memory.check_integrity()


def test_a_slot_that_changes_hands_between_two_steps_of_the_same_requests_is_seen(
    make_steps: Callable[..., Steps], make_engine: Callable[..., Engine], lora_folder: Callable[..., Path], seed: int
) -> None:
    steps, loader = make_steps(), make_engine().adapters._loader
    one, other = (loader.submit(lora_folder(seed + n, 3 + 4 * n)).result().weights for n in range(2))
    assert one is not None and other is not None
    steps.runner.memory.load(2, one)
    steps.check([2, -1, 2], [0, 1, 2])
    steps.runner.memory.free(2)
    steps.check([2, -1, 2], [0, 1, 2])
    steps.runner.memory.load(2, other)
    steps.check([2, -1, 2], [0, 1, 2])
    steps.runner.memory.load(0, one)
    steps.check([2, 0, 2], [0, 1, 2])
    steps.check([-1, -1, -1], [0, 1, 2])
    steps.check([2, 2, 2], [0, 1, 2])


def test_rows_behind_the_requests_write_nowhere_but_in_the_scratch_page(make_steps: Callable[..., Steps]) -> None:
    steps = make_steps()
    steps.check([-1] * 9, list(range(9)))
    before = [kv[:-1].clone() for kv in steps.runner._kv]
    chunks = [Chunk("", (5,), steps.lengths[n], steps.tables[n], -1, 0, None) for n in (3, 0, 7, 1, 2)]
    steps.runner.run(StepPlan(tuple(chunks)))
    written = {one.block_table[one.start // 16] * 16 + one.start % 16 for one in chunks}
    for kv, old in zip(steps.runner._kv, before, strict=True):
        new = kv[:-1].flatten(0, 1)
        kept = [cell for cell in range(len(new)) if cell not in written]
        torch.testing.assert_close(new[kept], old.flatten(0, 1)[kept], rtol=0, atol=0, equal_nan=True)
        assert new[sorted(written)].isfinite().all()


def test_what_has_prompts_scores_or_ends_is_no_step_for_a_graph(make_steps: Callable[..., Steps]) -> None:
    graphs = make_steps().runner._graphs
    assert graphs is not None
    extras = make_steps().runner.memory.extras
    single = Chunk("a", (1,), 0, (0,), -1, 0, None)
    assert graphs.takes([single], extras) and graphs.takes([single], extras._replace(bottlenecks=True, head_lora=True))
    assert not graphs.takes([single, single._replace(token_ids=(1, 2))], extras)
    assert not graphs.takes([single._replace(targets=(3,))], extras)
    assert not graphs.takes([single], extras._replace(ends=True))


def random_request(rng: random.Random, number: int, names: list[str]) -> Request:
    """Of any adapter, with any way of drawing."""
    fields: dict[str, Any] = {"temperature": rng.choice((0.0, 0.7, 1.3)), "ignore_eos": rng.random() < 0.7}
    special: list[dict[str, Any]] = [
        {"top_k": 7, "top_p": 0.8}, {"min_p": 0.1}, {"logprobs": 2}, {"repetition_penalty": 1.4},
        {"frequency_penalty": 0.8}, {"logit_bias": ((65, 30.0),)}, {"prompt_logprobs": 1},
    ]  # fmt: skip
    fields |= rng.choice([{}, {}, *special])
    return Request(
        prompt=[rng.randrange(256) for _ in range(rng.randrange(1, 40))],
        adapter=rng.choice([None, *names]),
        request_id=str(number),
        sampling=SamplingParams(max_tokens=rng.randrange(1, 20), seed=number, **fields),
    )


def test_an_engine_on_padded_buffers_answers_as_one_without(
    make_engine: Callable[..., Engine], every_kind: Callable[..., dict[str, Path]], seed: int
) -> None:
    """Requests come and go, adapters of every kind are loaded, replaced and removed, pages run short."""
    rng = random.Random(seed)
    engines = [make_engine(graphs=graphs, num_pages=26, max_requests=9, max_adapters=3) for graphs in (True, False)]
    folders = every_kind(seed)
    names: list[str] = []
    number = num_decodes = 0
    for step in range(150):
        if rng.random() < 0.2:
            kind = rng.choice(sorted(folders))
            for engine in engines:
                if kind in names:
                    engine.adapters.remove(kind)
                else:
                    engine.adapters.add(kind, folders[kind])
            names = sorted({*names} ^ {kind})
        for _ in range(rng.choice((0, 0, 1, 3)) if step < 120 else 0):
            request = random_request(rng, number, names)
            number += 1
            for engine in engines:
                engine.add_request(request)
        if number and rng.random() < 0.1:
            gone = str(rng.randrange(number))
            assert len({engine.abort(gone) for engine in engines}) == 1
        padded, plain = (engine.step() for engine in engines)
        assert padded == plain
        num_decodes += len(plain) > 1
    while engines[0].has_work():
        assert engines[0].step() == engines[1].step()
    assert not engines[1].has_work() and num_decodes > 20
