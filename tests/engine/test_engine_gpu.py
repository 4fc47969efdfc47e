"""The engine on a GPU: what it generates is what transformers finds most likely, for every row of a mixed batch."""

import copy
import importlib
import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from peftkit.artifact import load_adapter, save_adapter
from peftkit.methods import (
    BottleneckConfig,
    LoraConfig,
    MethodConfig,
    PromptTuningConfig,
    attach,
    attached,
    detach,
)
from peftkit_kernels import dispatch, rms_norm
from peftkit_serve import Engine, Request, SamplingParams
from peftkit_serve.decode_inputs import row_buckets, segment_buckets
from peftkit_serve.mixed_inputs import mixed_buckets
from peftkit_serve.plan import Chunk, Sample, StepPlan
from peftkit_serve.staging import Reach

pytestmark = pytest.mark.gpu

CONFIGS: dict[str, MethodConfig] = {
    "lora": LoraConfig(r=4, alpha=8),
    "prompt": PromptTuningConfig(num_virtual_tokens=21),
}
KINDS: list[MethodConfig] = [
    LoraConfig(r=4, alpha=8),
    LoraConfig(r=9, alpha=9, targets=["q_proj", "down_proj"], variant="dora"),
    LoraConfig(r=3, alpha=9, targets=["v_proj", "lm_head"]),
    BottleneckConfig(bottleneck_size=5),
    BottleneckConfig(bottleneck_size=7, variant="parallel", ln_before=True),
]
DRAWN = Sample(SamplingParams(temperature=1.5, top_k=9, top_p=0.9), 7, 3)


def random_adapter(model: Any, config: MethodConfig, folder: Path) -> Path:
    """Random weights with an effect, in a folder of their own."""
    attach(model, config)
    for parameter in attached(model)[0].parameters().values():
        torch.nn.init.normal_(parameter, std=0.3)
    path = folder / f"{config.kind}-{len(list(folder.iterdir()))}"
    save_adapter(model, path)
    detach(model)
    return path


def test_greedy_tokens_are_transformers_most_likely(
    tiny_base: Path, own_cache: None, tmp_path: Path, seed: int
) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_base, dtype=torch.float32).cuda()
    engine = Engine(tiny_base, device="cuda", num_pages=64)
    for name, config in CONFIGS.items():
        attach(model, config)
        for parameter in attached(model)[0].parameters().values():
            torch.nn.init.normal_(parameter, std=0.1)
        save_adapter(model, tmp_path / name)
        detach(model)
        engine.adapters.add(name, tmp_path / name)
    prompts = {
        name: torch.randint(3, 200, (length,)).tolist() for name, length in (("lora", 9), ("prompt", 30), ("", 17))
    }
    greedy = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
    requests = [
        Request(prompt=ids, adapter=name or None, sampling=greedy, request_id=name) for name, ids in prompts.items()
    ]
    for output in engine.generate(requests):
        name, prompt = output.request_id, prompts[output.request_id]
        if name:
            load_adapter(model, tmp_path / name)
        ids = torch.tensor([prompt + list(output.token_ids)], device="cuda")
        logits, rounded = (
            each(input_ids=ids).logits[0, len(prompt) - 1 : -1].float()
            for each in (model, copy.deepcopy(model).bfloat16())
        )
        chosen = logits.gather(1, ids[0, len(prompt) :, None])[:, 0]
        # the engine computes in bfloat16: a token may lose to one that is as likely within what rounding does here
        assert (logits.max(-1).values - chosen <= 3 * (logits - rounded).abs().max()).all(), name
        detach(model)
    engine.check_integrity()


def test_a_start_compiles_on_threads_alone_and_all_graphs_leave_their_logits_in_one_place(
    tiny_base: Path, own_cache: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    knobs = importlib.import_module("triton.knobs")
    threads: set[str] = set()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(
        knobs.compilation, "listener", lambda **_: threads.add(threading.current_thread().name.rpartition("_")[0])
    )
    for name in dispatch.TRITON.values():
        for kernel in vars(importlib.import_module(f"peftkit_kernels.{name}")).values():
            if hasattr(kernel, "device_caches"):
                kernel.device_caches.clear()
    engine = Engine(tiny_base, device="cuda", max_requests=33, max_tokens_per_step=700)
    assert threads == {"peftkit-compile"}
    graphs = engine._runner._graphs
    assert graphs is not None
    places = {one.logits_NV.untyped_storage().data_ptr() for one in graphs._graphs.values()}
    assert len(places) == 1 and graphs.num_graphs > 20


@pytest.fixture
def compilations() -> Iterator[list[str]]:
    """Names of the Triton kernels that are compiled or loaded while it is watched."""
    runtime = importlib.import_module("triton.knobs").runtime
    seen: list[str] = []
    runtime.jit_post_compile_hook = lambda *_, fn, **__: seen.append(fn.name)
    yield seen
    runtime.jit_post_compile_hook = None


def test_replayed_graphs_have_the_bits_of_eager_steps_at_every_crossing_of_buckets(
    tiny_base: Path, own_cache: None, tmp_path: Path, seed: int
) -> None:
    rng = random.Random(seed)
    engine = Engine(tiny_base, device="cuda", num_pages=64, max_requests=9, max_adapters=6, deterministic=True)
    runner = engine._runner
    graphs = runner._graphs
    assert graphs is not None
    mixed, rows = len(mixed_buckets(512, 9)), row_buckets(9)
    decode = sum(1 + sum(len(segment_buckets(size, reach)) for reach in Reach) for size in rows)
    assert graphs.num_graphs == decode + mixed and mixed > 40 and decode > 20
    model = AutoModelForCausalLM.from_pretrained(tiny_base, dtype=torch.float32)
    packed = [engine.adapters._loader.submit(random_adapter(model, one, tmp_path)).result().weights for one in KINDS]
    pages = rng.sample(range(64), 64)
    tables = [tuple(pages[6 * n : 6 * n + 6]) for n in range(9)]
    for table in tables:
        runner.run(StepPlan((Chunk("", tuple(rng.randrange(200) for _ in range(90)), 0, table, -1, 0, None),)))
    loaded: set[int] = set()
    for step in range(150):
        for slot in rng.sample(range(6), 2):
            if slot in loaded:
                runner.memory.free(slot)
            elif (weights := rng.choice(packed)) is not None:
                runner.memory.load(slot, weights)
            loaded ^= {slot}
        count = rng.randrange(1, 10)
        choices = [-1, *loaded] if step % 3 else [-1]
        longest = rng.choice((1, 1, 9, 30, 80))
        sizes = [longest, *(rng.randrange(1, min(longest, 50) + 1) for _ in range(count - 1))]
        chunks = [
            Chunk(
                str(n), tuple(rng.randrange(200) for _ in range(size)), rng.randrange(96 - size), tables[n],
                rng.choice(choices), 0, DRAWN,
            )
            for n, size in zip(rng.sample(range(9), count), sizes, strict=True)
        ]  # fmt: skip
        runner.memory.wait_for(one.slot for one in chunks)
        with torch.inference_mode():
            wanted = runner._logits(runner._batch(chunks))
            drawn = graphs.run(chunks, runner.memory.extras_of(one.slot for one in chunks), [-1] * count)
        assert torch.equal(drawn.logits_NV[:count], wanted), (step, [one.slot for one in chunks])
        tokens = runner.run(StepPlan(tuple(chunks))).tokens
        runner._graphs = None
        assert runner.run(StepPlan(tuple(chunks))).tokens == tokens
        runner._graphs = graphs


def test_a_load_keeps_the_host_and_other_steps_free_and_the_step_that_reads_it_waits_on_the_device(
    tiny_base: Path, own_cache: None, tmp_path: Path, seed: int
) -> None:
    engine = Engine(tiny_base, device="cuda", num_pages=64, max_adapters=4, deterministic=True)
    runner, memory = engine._runner, engine._runner.memory
    model = AutoModelForCausalLM.from_pretrained(tiny_base, dtype=torch.float32)
    first, second = (
        engine.adapters._loader.submit(random_adapter(model, one, tmp_path)).result().weights for one in KINDS[:2]
    )
    assert first is not None and second is not None and memory._loading is not None

    def draw(slot: int, page: int) -> int:
        sample = Sample(SamplingParams(temperature=0.0), 0, 0)
        tokens = runner.run(StepPlan((Chunk("x", (5, 6, 7, 8), 0, (page,), slot, 0, sample),))).tokens
        return tokens["x"]

    memory.load(0, first)
    memory.load(1, second)
    wanted, bare = (draw(0, 0), draw(1, 1)), draw(-1, 2)
    for _ in range(3):
        memory.free(0)
        memory.free(1)
        with torch.cuda.stream(memory._loading):
            torch.cuda._sleep(2_000_000_000)  # about a second
        begun = time.perf_counter()
        memory.load(1, first)
        memory.load(0, second)
        assert draw(-1, 2) == bare and time.perf_counter() - begun < 0.4, "the host or a step of others waited"
        assert (draw(1, 0), draw(0, 1)) == wanted
        assert time.perf_counter() - begun > 0.4, "the load was not held up: the test shows nothing"
        memory.check_integrity()
        memory.free(0)
        memory.free(1)
        memory.load(0, first)
        memory.load(1, second)


def test_an_engine_takes_no_more_memory_than_its_split_says(tiny_base: Path, own_cache: None, seed: int) -> None:
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    torch.cuda.reset_peak_memory_stats()
    engine = Engine(tiny_base, device="cuda", max_requests=48, max_tokens_per_step=1024)
    params = SamplingParams(max_tokens=30, logprobs=2, ignore_eos=True)
    list(engine.generate([Request([5] * 200, None, params) for _ in range(100)]))
    split = engine._runner.split
    taken = torch.cuda.max_memory_reserved() - before
    assert min(split.steps, split.graphs, split.kv) > 0
    # beside the split: cuBLAS' workspace and what is left of blocks
    assert taken <= split.weights + split.adapters + split.kv + split.steps + split.graphs + (128 << 20)


@pytest.mark.parametrize("deterministic", [False, True])
def test_nothing_compiles_once_the_engine_is_ready(
    tiny_base: Path, own_cache: None, tmp_path: Path, seed: int, deterministic: bool, compilations: list[str]
) -> None:
    rng = random.Random(seed)
    engine = Engine(tiny_base, device="cuda", num_pages=400, max_requests=40, deterministic=deterministic)
    model = AutoModelForCausalLM.from_pretrained(tiny_base, dtype=torch.float32)
    for number, config in enumerate([*KINDS, CONFIGS["prompt"]]):  # a prompt's last page is copied
        engine.adapters.add(str(number), random_adapter(model, config, tmp_path))
    compilations.clear()
    for number in range(120):
        params = SamplingParams(
            max_tokens=rng.randrange(1, 30), temperature=rng.choice((0.0, 1.0)), top_p=rng.choice((1.0, 0.7)),
            logprobs=rng.choice((None, 2)), frequency_penalty=rng.choice((0.0, 0.4)), ignore_eos=True,
        )  # fmt: skip
        prompt = [rng.randrange(3, 200) for _ in range(rng.choice((1, 9, 100)))]
        adapter = rng.choice([None, *engine.adapters.names()])
        engine.add_request(Request(prompt=prompt, adapter=adapter, request_id=str(number), sampling=params))
        if number % 3 == 0:
            engine.step()
    while engine.has_work():
        engine.step()
    assert not compilations
    width = rng.randrange(3000, 4000)  # that no test has met in this process
    rms_norm(torch.ones(1, width, device="cuda"), torch.ones(width, device="cuda"), 1e-6)
    assert compilations, "what compiles is seen"
    engine.check_integrity()
