"""Steps on padded buffers: what a CUDA graph replays, run as it is, has the bits of the step without padding."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from peftkit.base import BaseInfo
from peftkit_kernels import Segments
from peftkit_serve import Engine, Request, SamplingParams
from peftkit_serve.adapters.packing import PackedAdapter
from peftkit_serve.batch import Extras
from peftkit_serve.decode_inputs import row_buckets, segment_buckets
from peftkit_serve.mixed_inputs import mixed_buckets
from peftkit_serve.plan import Chunk, Sample, StepPlan
from peftkit_serve.runner import Runner
from peftkit_serve.staging import Bucket, Reach

MAX_REQUESTS = 9
BUCKETS = (1, 2, 4, 8, 9)


def test_buckets_hold_every_number_of_rows_and_waste_little() -> None:
    assert row_buckets(9) == BUCKETS and row_buckets(1) == (1,) and row_buckets(8) == (1, 2, 4, 8)
    assert row_buckets(256) == (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256)
    for reach in (Reach.ATTENTION, Reach.LINEARS):
        assert [segment_buckets(rows, reach) for rows in (1, 2, 9)] == [(1,), (2,), (4, 8, 9)]
        assert segment_buckets(64, reach) == (4, 8, 16, 32, 64)
    assert [segment_buckets(rows, Reach.ALL) for rows in (1, 9, 16, 64)] == [(1,), (9,), (16,), (16, 64)]


def test_buckets_of_steps_with_prompts_have_more_tokens_than_requests_and_hold_what_they_say() -> None:
    for max_tokens, max_rows in ((512, 64), (2048, 256), (64, 9), (255, 28), (9, 9), (1, 1), (16, 4)):
        found = mixed_buckets(max_tokens, max_rows)
        assert len(set(found)) == len(found) and all(one.num_tokens > one.num_rows for one in found)
        assert all(one.num_tokens <= min(max_tokens, 1024) and one.num_rows <= max_rows for one in found)
        assert all(one.num_segments <= one.num_rows for one in found)
        plain = {one[:2] for one in found}
        assert plain == {one[:2] for one in found if not one.num_segments}
        for reach in Reach:
            assert plain == {one[:2] for one in found if one.reach is reach and one.num_segments == one.num_rows}
    assert {one.num_tokens for one in mixed_buckets(512, 64)} == {16, 32, 64, 128, 256, 384, 512}
    assert {one[:2] for one in mixed_buckets(64, 64)} == {
        (16, 4), (16, 15), (32, 4), (32, 16), (32, 31), (64, 4), (64, 16), (64, 63)
    }  # fmt: skip
    assert not mixed_buckets(1, 1)


def test_every_step_with_prompts_up_to_some_size_has_a_bucket_that_pads_little() -> None:
    for max_tokens, max_rows in ((512, 64), (2048, 256), (64, 64), (4, 4), (2, 1), (700, 700), (1500, 1200)):
        sizes = {one[:2] for one in mixed_buckets(max_tokens, max_rows)}
        for num_tokens in range(2, min(max_tokens, 1024) + 1):
            for num_rows in {1, 2, num_tokens // 2, num_tokens - 1, 17, 65, max_rows} - {0}:
                if num_rows < num_tokens and num_rows <= max_rows:
                    least = min(size for size in sizes if size[0] >= num_tokens and size[1] >= num_rows)
                    assert least[0] <= max(16, 2 * num_tokens), (max_tokens, max_rows, num_tokens, num_rows)


class Steps:
    """A runner whose steps are computed both ways, over requests that have some text in the pages."""

    def __init__(self, runner: Runner, rng: random.Random, *, exact: bool) -> None:
        self.runner, self.rng, self.exact = runner, rng, exact
        pages = rng.sample(range(runner.num_pages), runner.num_pages)
        self.tables = [tuple(pages[6 * n : 6 * n + 6]) for n in range(MAX_REQUESTS)]
        self.lengths = [rng.randrange(1, 90) for _ in range(MAX_REQUESTS)]
        for kv in runner._kv:
            kv.fill_(float("nan"))
        for table, length in zip(self.tables, self.lengths, strict=True):
            tokens = tuple(rng.randrange(260) for _ in range(length))
            runner.run(StepPlan((Chunk("", tokens, 0, table, -1, 0, None),)))

    def check(self, slots: list[int], requests: list[int], counts: list[int] | None = None) -> Bucket:
        """Computes a step of these requests with these slots both ways; returns its bucket.

        counts: new tokens of each, one by default; of those with more, some draw none.
        """
        rng, graphs, runner = self.rng, self.runner._graphs, self.runner
        assert graphs is not None
        chunks: list[Chunk] = []
        for n, slot, count in zip(requests, slots, counts or [1] * len(slots), strict=True):
            params = SamplingParams(temperature=rng.choice((0.0, 1.5)), top_k=rng.choice((0, 5)))
            sample = Sample(params, rng.randrange(2**63), rng.randrange(9))
            tokens, start = tuple(rng.randrange(260) for _ in range(count)), min(self.lengths[n], 96 - count)
            kept = sample if count == 1 or rng.random() < 0.7 else None
            chunks.append(Chunk(str(n), tokens, start, self.tables[n], slot, 0, kept))
        extras = runner.memory.extras_of(slots)
        assert graphs.takes(chunks, extras)
        drawing = [row for row, chunk in enumerate(chunks) if chunk.sample is not None]
        with torch.inference_mode():
            wanted = runner._logits(runner._batch(chunks))
            drawn = graphs.run(chunks, extras, [-1] * len(chunks))
        found = drawn.logits_NV[drawing]
        assert wanted.isfinite().all()
        if not self.exact:
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
            return self._moved_on(chunks, extras)
        assert torch.equal(found, wanted), (requests, slots, counts)
        runner._graphs = None
        tokens = runner.run(StepPlan(tuple(chunks))).tokens
        runner._graphs = graphs
        assert runner.run(StepPlan(tuple(chunks))).tokens == tokens and len(tokens) == len(drawing), (requests, slots)
        return self._moved_on(chunks, extras)

    def _moved_on(self, chunks: list[Chunk], extras: Extras) -> Bucket:
        """Most requests go on behind these chunks; returns the bucket that they fill."""
        graphs = self.runner._graphs
        assert graphs is not None
        for chunk in chunks:
            end = chunk.start + len(chunk.token_ids)
            self.lengths[int(chunk.request_id)] = min(end - self.rng.randrange(2), 95)
        inputs = graphs._decode if all(len(chunk.token_ids) == 1 for chunk in chunks) else graphs._mixed
        bucket = inputs.write(chunks, [-1] * len(chunks), Reach.of(extras))
        batch = inputs.batch(bucket)
        for table in (batch.segments, batch.sample_segments):  # the slots of rows, which kernels alone read
            if table is not None:
                derived = Segments.of(table.row_X, table.start_G1, table.slot_G)
                assert torch.equal(table.row_slot_X, derived.row_slot_X)
        return bucket


@pytest.fixture
def make_steps(base_folder: Path, seed: int) -> Callable[..., Steps]:
    def make(**settings: Any) -> Steps:
        defaults: dict[str, Any] = {"num_pages": 60, "num_slots": 7, "max_requests": MAX_REQUESTS}
        chosen: dict[str, Any] = defaults | {"deterministic": True} | settings
        runner = Runner(BaseInfo("tiny", base_folder), device="cpu", graphs=True, **chosen)
        return Steps(runner, random.Random(seed), exact=chosen["deterministic"])

    return make


def packed_kinds(engine: Engine, folders: dict[str, Path]) -> list[PackedAdapter]:
    """All kinds that have weights, but no ends, packed; the engine is there for its loader."""
    found = [engine.adapters._loader.submit(folder).result().weights for folder in folders.values()]
    packed = [weights for weights in found if weights is not None and not weights.has_ends]
    assert len(packed) == 8
    return packed


def change_hands(steps: Steps, packed: list[PackedAdapter], loaded: set[int]) -> list[int]:
    """Some slots become free and others get an adapter; returns those that a step's rows may have."""
    for slot in range(7):
        if steps.rng.random() < 0.3:
            if slot in loaded:
                loaded.remove(slot)
                steps.runner.memory.free(slot)
            else:
                loaded.add(slot)
                steps.runner.memory.load(slot, steps.rng.choice(packed))
    least = min(loaded, key=lambda slot: Reach.of(steps.runner.memory.extras_of([slot])), default=-1)
    return steps.rng.choice(([-1], [-1, *loaded], sorted(loaded) or [-1], [least]))


def test_every_crossing_of_buckets_keeps_the_bits(
    make_steps: Callable[..., Steps],
    make_engine: Callable[..., Engine],
    every_kind: Callable[..., dict[str, Path]],
    seed: int,
) -> None:
    steps, loaded = make_steps(), set[int]()
    packed = packed_kinds(make_engine(max_adapters=2), every_kind(seed))
    seen: set[Bucket] = set()
    sizes = [a for one in BUCKETS for other in BUCKETS for a in (one, other)]
    for count in sizes:
        choices = change_hands(steps, packed, loaded)
        size = count if count < 3 else steps.rng.choice((count, count - 1))
        slots = [steps.rng.choice(choices) for _ in range(size)]
        seen.add(steps.check(slots, steps.rng.sample(range(MAX_REQUESTS), size)))
    assert {one.num_rows for one in seen} == set(BUCKETS) == {one.num_tokens for one in seen}
    assert {0} < {one.num_segments for one in seen}
    steps.runner.memory.check_integrity()


@pytest.mark.parametrize("deterministic", [True, False])
def test_steps_with_prompts_keep_their_bits_in_every_bucket(
    make_steps: Callable[..., Steps],
    make_engine: Callable[..., Engine],
    every_kind: Callable[..., dict[str, Path]],
    seed: int,
    deterministic: bool,
) -> None:
    """Where products aren't deterministic the last bits may differ, as these depend on the number of rows."""
    steps, loaded = make_steps(max_tokens_per_step=200, deterministic=deterministic), set[int]()
    packed = packed_kinds(make_engine(max_adapters=2), every_kind(seed))
    seen: set[Bucket] = set()
    for number in range(45):
        choices = change_hands(steps, packed, loaded)
        size = steps.rng.choice((1, 2, 4, 7, 9))
        longest = (5, 14, 60, 80)[number % 4]
        counts = [steps.rng.choice((1, 1, steps.rng.randrange(1, longest))) for _ in range(size)]
        counts[steps.rng.randrange(size)] = longest
        while sum(counts) > 200:
            counts[counts.index(max(counts))] = 2
        slots = [steps.rng.choice(choices) for _ in range(size)]
        seen.add(steps.check(slots, steps.rng.sample(range(MAX_REQUESTS), size), counts))
    assert {one.num_tokens for one in seen} >= {16, 64, 128, 200}
    assert {one.num_rows for one in seen} == {4, 9} and {one.reach for one in seen} == set(Reach)
    assert {0, 4, 9} == {one.num_segments for one in seen}
    assert {one.reach for one in seen if one.num_segments} == set(Reach)
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
    for counts in ((1, 1, 1, 1, 1), (1, 7, 1, 3, 1)):
        lengths = [min(steps.lengths[n], 96 - count) for n, count in zip((3, 0, 7, 1, 2), counts, strict=True)]
        chunks = [
            Chunk("", (5,) * count, length, steps.tables[n], -1, 0, None)
            for n, count, length in zip((3, 0, 7, 1, 2), counts, lengths, strict=True)
        ]
        steps.runner.run(StepPlan(tuple(chunks)))
        positions = [(one, at) for one in chunks for at in range(one.start, one.start + len(one.token_ids))]
        written = {one.block_table[at // 16] * 16 + at % 16 for one, at in positions}
        for kv, old in zip(steps.runner._kv, before, strict=True):
            new, old = kv[:-1].flatten(0, 1), old.flatten(0, 1)
            kept = [cell for cell in range(len(new)) if cell not in written]
            torch.testing.assert_close(new[kept], old[kept], rtol=0, atol=0, equal_nan=True)
            assert new[sorted(written)].isfinite().all()
            old[sorted(written)] = new[sorted(written)]


def test_what_is_too_large_or_has_scores_or_ends_is_no_step_for_a_graph(make_steps: Callable[..., Steps]) -> None:
    graphs = make_steps(max_tokens_per_step=2000).runner._graphs
    assert graphs is not None
    extras = make_steps().runner.memory.extras
    single = Chunk("a", (1,), 0, (0,), -1, 0, None)
    assert graphs.takes([single], extras) and graphs.takes([single], extras._replace(bottlenecks=True, head_lora=True))
    prompt = single._replace(token_ids=(1,) * 1023)
    assert graphs.takes([single, prompt], extras) and not graphs.takes([single, single, prompt], extras)
    assert not graphs.takes([single, prompt._replace(targets=(3,))], extras)
    assert not graphs.takes([single, prompt], extras._replace(ends=True))
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


@pytest.mark.parametrize("sizes", [(9, 64), (1, 1), (9, 9), (1, 40)], ids=str)
def test_an_engine_on_padded_buffers_answers_as_one_without(
    make_engine: Callable[..., Engine], every_kind: Callable[..., dict[str, Path]], seed: int, sizes: tuple[int, int]
) -> None:
    """Requests come and go, adapters of every kind are loaded, replaced and removed, pages run short."""
    rng, chosen = random.Random(seed), {"max_requests": sizes[0], "max_tokens_per_step": sizes[1]}
    engines = [make_engine(graphs=graphs, num_pages=26, max_adapters=3, **chosen) for graphs in (True, False)]
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
    assert not engines[1].has_work() and (num_decodes > 20 or sizes[0] == 1)
