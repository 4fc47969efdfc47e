"""The training step's speed and memory on bases with random weights: the ordinary `peftkit train` path, timed.

    mfu_4n    4 N T / (step time · rate)                       what a step needs: forward, and back to the inputs
    mfu_6n    (6 N T + 4.5 attention) / (step time · rate)     what it does when every layer is computed twice

N matrix parameters, T tokens of a step, attention the operations of its forward pass (its backward takes 2.5 times as
many), rate that of a dense bfloat16 product in the same run.
"""

import gc
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from transformers import PreTrainedModel

from peftkit.base import BaseInfo, Quant
from peftkit.data import Dataset
from peftkit.data.encode import Sample
from peftkit.methods import (
    AnyConfig,
    BottleneckConfig,
    LoraConfig,
    PrefixTuningConfig,
    PromptTuningConfig,
    PTuningConfig,
    PTuningV2Config,
    detach,
    fast_share,
)
from peftkit.recipe import Data, Log, Optim, Recipe, Train
from peftkit.recipe import Quant as QuantSettings
from peftkit.train.fit import estimate
from peftkit.train.loop import Trainer
from peftkit.train.memory import num_trainable
from peftkit.train.prepare import Prepared, Resident, Rows, adapt
from peftkit_bench.provenance import commit, hardware, versions
from peftkit_bench.timing import product_tflops
from peftkit_bench.train_model import attention_flops, matrix_parameters, random_base
from peftkit_bench.train_profile import profile_step

METHODS: dict[str, AnyConfig] = {
    "lora": LoraConfig(r=16, alpha=32, targets="all-linear"),
    "dora": LoraConfig(r=16, alpha=32, targets="all-linear", variant="dora"),
    "bottleneck": BottleneckConfig(),
    "prefix": PrefixTuningConfig(),
    "ptuning_v2": PTuningV2Config(),
    "ptuning": PTuningConfig(),
    "prompt": PromptTuningConfig(),
}
_GOALS = {
    ("8b", 1, 4096): ((11_200, 6.8), (12_700, None)),
    ("8b", 4, 2048): ((12_500, 7.8), (15_500, None)),
    ("8b", 8, 2048): ((16_000, None),),
    ("1.5b", 4, 2048): ((30_000, 2.9), (36_000, None)),
}
"""(shape, rows, length) → tokens/s at least at so many GiB; None is any memory. For LoRA over NF4 on an H200."""
_PACKAGES = ("peftkit", "torch", "triton", "transformers", "bitsandbytes", "accelerate")
_WARM_STEPS = 3
_LEAST_STEPS = 3
_MOST_STEPS = 10

LEVELS = ("auto", "none", "selective", "full", "offload")
Line = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """One step that is timed."""

    shape: str
    quant: Quant
    method: str
    rows: int
    length: int
    level: Any = "full"
    packed: bool = False
    """Rows of several sequences of random lengths, where else each is one."""
    accum: int = 1
    """Micro-batches of a step."""

    @property
    def name(self) -> str:
        """How it is chosen by `--only`."""
        sizes = f"{self.rows}x{self.length}" + (f"x{self.accum}" if self.accum > 1 else "")
        packed = " packed" if self.packed else ""
        return f"{self.shape} {self.quant} {self.method} {sizes}{packed} {self.level}"


@dataclass(frozen=True)
class Settings:
    """How cases are measured."""

    device: torch.device
    seconds: float = 8.0
    """A case's steps end after so long, but not before the third."""
    limit_s: float | None = None
    """No case begins after so long."""
    seed: int = 0
    profiled: bool = False

    @property
    def dtype(self) -> torch.dtype:
        """Of the arithmetic."""
        return torch.bfloat16 if self.device.type == "cuda" else torch.float32


def all_cases(levels: Sequence[str] = ("full", "none")) -> list[Case]:
    """The most telling first: each step with each level of recomputation."""
    telling: list[tuple[str, Quant, str, int, int]] = [
        ("8b", "nf4", "lora", 4, 2048),
        ("8b", "nf4", "lora", 1, 4096),
        ("1.5b", "nf4", "lora", 4, 2048),
    ]
    others: list[tuple[str, Quant, str, int, int]] = [
        *(("8b", "nf4", "lora", rows, length) for rows, length in ((8, 2048), (1, 16384))),
        *(("8b", "nf4", method, 4, 2048) for method in ("bottleneck", "prefix")),
        *(("8b", "none", "lora", rows, length) for rows, length in ((4, 2048), (1, 4096), (8, 2048), (1, 16384))),
        *(("1.5b", "nf4", "lora", rows, length) for rows, length in ((1, 4096), (8, 2048), (1, 16384))),
        *(("1.5b", "none", "lora", rows, length) for rows, length in ((4, 2048), (1, 4096), (8, 2048), (1, 16384))),
    ]
    cases = [Case(*sizes, level=level) for sizes in (*telling, *others) for level in levels]
    packed = [Case("8b", "nf4", "lora", 4, 2048, level=level, packed=True) for level in levels]
    return [*cases[: 3 * len(levels)], *packed, *cases[3 * len(levels) :]]


def quick_cases(levels: Sequence[str] = ("full", "none")) -> list[Case]:
    """The three steps that say most."""
    return all_cases(levels)[: 3 * len(levels)]


def named_cases(text: str, levels: Sequence[str]) -> list[Case]:
    """Cases as they are written, with commas between: `toy:nf4:lora:2x32`, a further `:packed` packs rows."""
    cases: list[Case] = []
    for part in text.split(","):
        shape, quant, method, sizes, *packed = part.strip().split(":")
        count, length = (int(size) for size in sizes.split("x"))
        held: Quant = "nf4" if quant == "nf4" else "none"
        cases += [Case(shape, held, method, count, length, level, packed == ["packed"]) for level in levels]
    return cases


def measure(cases: Sequence[Case], settings: Settings, rate_tflops: float) -> Iterator[Line]:
    """A line for each case as soon as it is measured; one that fails has its error, one that comes too late says so."""
    begun = time.perf_counter()
    bench: Bench | None = None
    for case in cases:
        if settings.limit_s is not None and time.perf_counter() - begun > settings.limit_s:
            yield {"case": "train", "name": case.name, "skipped": f"{settings.limit_s:.0f} s are over"}
            continue
        if bench is None or bench.base != (case.shape, case.quant):
            bench = None  # a base goes before the next one is made
            let_go()
            bench = Bench(case.shape, case.quant, settings)
        yield bench.line(case, rate_tflops)
        let_go()
    bench = None
    let_go()  # for the peers, which are processes of their own


class Bench:
    """One base on the device, which cases work on in turn."""

    def __init__(self, shape: str, quant: Quant, settings: Settings) -> None:
        self.base = (shape, quant)
        self.nowhere = Path(shape)
        """The folder of a run that writes nothing."""
        self._settings = settings
        begun = time.perf_counter()
        model = random_base(shape, quant, settings.dtype, settings.device, seed=settings.seed)
        accelerator = Accelerator(cpu=settings.device.type == "cpu")
        tokenizer: Any = None  # no text is read or written
        self._resident = Resident(accelerator, BaseInfo(shape, Path(shape)), model, tokenizer)
        _synchronise(settings.device)
        self.seconds = time.perf_counter() - begun

    @property
    def model(self) -> PreTrainedModel:
        """The base."""
        return self._resident.model

    def line(self, case: Case, rate_tflops: float) -> Line:
        """The case's figures, or its error."""
        head: Line = {"case": "train", "name": case.name, **vars(case), "base_s": round(self.seconds, 2)}
        try:
            return head | self._measured(case, rate_tflops)
        except Exception as error:  # one case's failure is its line's, and the command's exit code
            return head | {"error": f"{type(error).__name__}: {error}"[:400]}
        finally:
            detach(self._resident.model)

    def prepared(self, case: Case) -> Prepared:
        """A run with the case's adapter attached, which the caller takes off again."""
        data = random_data(case, int(self._resident.model.config.vocab_size), self._settings.seed)
        return adapt(self._resident, recipe(case, self._settings), Rows(data, None, [], []))

    def _measured(self, case: Case, rate_tflops: float) -> Line:
        settings, cuda = self._settings, self._settings.device.type == "cuda"
        trainer = Trainer(self.prepared(case), self.nowhere, {})
        model, recompute = self._resident.model, trainer._prepared.recompute
        estimated = estimate(trainer._prepared).total if cuda else 0  # a CPU's holds what this process held before
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated() if cuda else 0
        losses: list[float] = []

        def step() -> None:
            trainer._step()
            assert trainer.state.loss is not None
            losses.append(trainer.state.loss)

        warm_s = sum(timed(step, settings.device) for _ in range(_WARM_STEPS))
        before, times = trainer.state.tokens, list[float]()
        while len(times) < _LEAST_STEPS or (len(times) < _MOST_STEPS and sum(times) < settings.seconds):
            times.append(timed(step, settings.device))
        tokens = (trainer.state.tokens - before) / len(times)
        peak = torch.cuda.max_memory_allocated() if cuda else 0
        line = {
            **speed(case, statistics.median(times), tokens, rate_tflops),
            "min_ms": round(1e3 * min(times), 2),
            "max_ms": round(1e3 * max(times), 2),
            "steps": len(times),
            "warm_s": round(warm_s, 2),
            "peak_bytes": peak,
            "held_bytes": held,
            "estimate_bytes": estimated,
            "recompute": str(recompute),
            "fast_share": round(fast_share(model, case.length) or 0.0, 4),
            "trainable": num_trainable(model),
            "loss_first": round(losses[0], 4),
            "loss_last": round(losses[-1], 4),
            "skipped_steps": trainer.state.skipped,
        }
        line["goals"] = goals(case, line["tokens_per_s"], peak) if cuda else {}
        if settings.profiled:
            line["profile"] = profile_step(step, settings.device)
        return line


def speed(case: Case, step_s: float, tokens: float, rate_tflops: float) -> Line:
    """Tokens a second and what share of the card's arithmetic that is, both ways."""
    matrices, rate = 4.0 * matrix_parameters(case.shape), rate_tflops * 1e12
    attention = 4.5 * attention_flops(case.shape, case.length)
    return {
        "tokens_per_s": round(tokens / step_s, 1),
        "step_ms": round(1e3 * step_s, 2),
        "tokens": round(tokens, 1),
        "mfu_4n": round(matrices * tokens / step_s / rate, 4),
        "mfu_6n": round((1.5 * matrices + attention) * tokens / step_s / rate, 4),
        "floor_tokens_per_s": round(rate / matrices),
    }


def goals(case: Case, tokens_per_s: float, peak_bytes: int) -> dict[str, bool]:
    """Each goal of a step → whether it is met."""
    if case.method != "lora" or case.quant != "nf4" or case.packed:
        return {}
    return {
        f"{least} tokens/s" + ("" if gib is None else f" at {gib} GiB"): tokens_per_s >= least
        and (gib is None or peak_bytes <= gib * 2**30)
        for least, gib in _GOALS.get((case.shape, case.rows, case.length), ())
    }


def recipe(case: Case, settings: Settings) -> Recipe:
    """The case as a run of `peftkit train`; 8-bit moments are not paged, where there is a GPU."""
    return Recipe(
        base=case.shape,
        quant=QuantSettings(kind=case.quant),
        method=METHODS[case.method],
        data=Data(train="random", max_length=case.length, packing=case.packed),
        optim=Optim(
            name="adamw_8bit" if settings.device.type == "cuda" else "adamw", lr=1e-4, schedule="constant", warmup=0.0
        ),
        train=Train(
            max_steps=10_000,
            batch_tokens=case.rows * case.length,
            batch_size=None if case.packed else case.rows,
            grad_accum=case.accum,
            seed=settings.seed,
            gradient_checkpointing=case.level,
        ),
        log=Log(samples=0, tensorboard=False),
        out="unwritten",
    )


def random_data(case: Case, vocabulary: int, seed: int, batches: int = 4) -> Dataset:
    """Sequences of random tokens, all of them trained, for so many micro-batches before they come again."""
    random = np.random.default_rng(seed)
    lengths = [case.length] * (case.rows * batches)
    if case.packed:  # a quarter of a row on average, from a sixteenth on
        lengths = random.integers(case.length // 16, 7 * case.length // 16, 4 * len(lengths)).tolist()
    samples = []
    for length in lengths:
        trained = np.arange(length) > 0
        samples.append(Sample("random", random.integers(10, vocabulary - 10, length, dtype=np.int32), trained))
    return Dataset("random", "0" * 64, samples)


def facts(settings: Settings) -> Line:
    """What all lines of a run share; the dense rate is measured now."""
    cuda = settings.device.type == "cuda"
    size, dtype = (8192, torch.bfloat16) if cuda else (512, torch.float32)
    return {
        "hardware": hardware(settings.device.type),
        "versions": versions(_PACKAGES),
        "commit": commit(),
        "seed": settings.seed,
        "dense_tflops": round(product_tflops(settings.device, dtype, size), 3),
    }


def timed(step: Any, device: torch.device) -> float:
    """Seconds of one call, the device's work among them."""
    begun = time.perf_counter()
    step()
    _synchronise(device)
    return time.perf_counter() - begun


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def let_go() -> None:
    """Gives back what is held by nothing but itself, and a GPU's memory that is free."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


PROFILE_HEADERS = ("case", "group", "ms", "of the step")
LOSS_HEADERS = ("losses of 20 steps", "first", "last", "reference", "largest difference", "limit", "met")
HEADERS = ("case", "tokens/s", "step ms", "spread", "4N", "6N+attn", "peak GiB", "goals", "peers: tokens/s (GiB)")


def rows(lines: Sequence[Mapping[str, Any]], peers: Sequence[Mapping[str, Any]] = ()) -> list[list[object]]:
    """The table: each step's figures beside the peers' of the same shape and batch."""
    table: list[list[object]] = []
    for line in lines:
        if line["case"] != "train":
            continue
        if "tokens_per_s" not in line:
            why = str(line.get("error") or line.get("skipped"))
            table.append([line["name"], None, None, why[:60], None, None, None, None, None])
            continue
        met = ", ".join(f"{goal}: {'yes' if reached else 'NO'}" for goal, reached in line["goals"].items())
        table.append(
            [
                line["name"],
                line["tokens_per_s"],
                line["step_ms"],
                f"{line['min_ms']:.4g}..{line['max_ms']:.4g}",
                line["mfu_4n"],
                line["mfu_6n"],
                round(line["peak_bytes"] / 2**30, 2),
                met,
                _peers(line, peers),
            ]
        )
    return table


def _peers(line: Mapping[str, Any], peers: Sequence[Mapping[str, Any]]) -> str:
    same = [
        peer
        for peer in peers
        if (peer.get("case"), peer.get("shape"), peer.get("batch"), peer.get("seq"))
        == ("train", line["shape"], line["rows"], line["length"])
    ]
    return ", ".join(f"{peer['peer']} {peer['tok_s']:.0f} ({peer['peak_gib']})" for peer in same)


def profile_rows(lines: Sequence[Mapping[str, Any]]) -> list[list[object]]:
    """The groups of each profiled step, the longest first."""
    return [
        [line["name"], group, ms, f"{ms / line['profile']['span_ms']:.1%}"]
        for line in lines
        if "profile" in line
        for group, ms in line["profile"]["groups_ms"].items()
    ]


def loss_rows(lines: Sequence[Mapping[str, Any]]) -> list[list[object]]:
    """Each comparison with the reference path."""
    return [
        [
            line["name"],
            line["first"][0],
            line["last"][0],
            line["last"][1],
            line["largest_difference"],
            line["limit"],
            "yes" if line["met"] else "NO",
        ]
        for line in lines
        if line["case"] == "losses"
    ]
