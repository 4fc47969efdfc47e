"""A step's speed and losses in one process or several, each with a GPU or, without one, a share of the CPU.

    python -m peftkit_bench.train_processes 8b:nf4:lora:4x2048 1
    accelerate launch --multi_gpu --num_processes 2 -m peftkit_bench.train_processes 8b:nf4:lora:4x2048 2
    accelerate launch --multi_gpu --num_processes 2 -m peftkit_bench.train_processes 8b:nf4:lora:4x2048 2 full divided

The number is the micro-batches of a step, of which each process takes its share: with as many as processes, twice the
tokens in the same time is an efficiency of 1, and the losses are those of one process with as many. What is recomputed
may follow, `full` unless said, and then `divided`: each process holds a share of the base (`train.shard_base`).
`weight_bytes` are the base's, and `peak_bytes` the most that steps took of the first process's GPU.
"""

import json
import statistics
import sys
from dataclasses import replace
from typing import Any

import torch
from accelerate import Accelerator

from peftkit.base.divided import divide
from peftkit.train.loop import Trainer
from peftkit.train.memory import weight_bytes
from peftkit.train.processes import leave
from peftkit_bench.provenance import hardware
from peftkit_bench.train import Bench, Settings, named_cases, timed

STEPS = 12
_WARM = 3


def main(argv: list[str]) -> None:
    """Prints a line from the first process."""
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    (case,) = named_cases(argv[0], argv[2:3] or ["full"])
    is_divided = argv[3:] == ["divided"]
    case = replace(case, accum=int(argv[1]))
    settings = Settings(accelerator.device)
    bench = Bench(case.shape, case.quant, settings)
    if is_divided:
        divide(bench.model)
    trainer = Trainer(bench.prepared(case), bench.nowhere, {})
    losses: list[float] = []
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()  # of a base that was whole before it was divided

    def step() -> None:
        trainer._step()
        assert trainer.state.loss is not None
        losses.append(trainer.state.loss)

    times = [timed(step, settings.device) for _ in range(STEPS)][_WARM:]
    step_s = statistics.median(times)
    line: dict[str, Any] = {
        "case": "processes",
        "name": case.name,
        "processes": accelerator.num_processes,
        "divided": is_divided,
        "step_ms": round(1e3 * step_s, 2),
        "min_ms": round(1e3 * min(times), 2),
        "max_ms": round(1e3 * max(times), 2),
        "tokens_per_s": round(trainer.state.tokens / STEPS / step_s, 1),
        "weight_bytes": weight_bytes(bench.model),
        "peak_bytes": torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0,
        "losses": losses,
        "hardware": hardware(settings.device.type),
    }
    if accelerator.is_main_process:
        print(json.dumps(line), flush=True)
    leave()


if __name__ == "__main__":
    main(sys.argv[1:])
