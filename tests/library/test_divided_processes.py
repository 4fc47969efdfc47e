"""Two processes on a base whose layers are divided over them, beside two with a whole base each."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel

from peftkit.base.divided import division
from peftkit.recipe import Recipe, Runs
from peftkit.train import fit, leave, train_runs
from peftkit.train.prepare import prepare
from peftkit.train.recompute import decoder_layers

RUNS: dict[str, dict[str, dict[str, Any]]] = {
    "nf4": {  # each with another number of micro-batches and rows: one row in a step, three micro-batches for two
        "lora": {"method": {"kind": "lora", "r": 4, "dropout": 0.2}, "train": {"batch_size": 1}},
        "prefix": {
            "method": {"kind": "prefix", "num_virtual_tokens": 3},
            "train": {"batch_size": 2, "grad_accum": 3, "gradient_checkpointing": "full"},
        },
        "bottleneck": {
            "method": {"kind": "bottleneck", "bottleneck_size": 8, "dropout": 0.1},
            "train": {"batch_size": 3, "gradient_checkpointing": "selective"},
        },
        "pissa": {"method": {"kind": "lora", "r": 2, "init": "pissa", "variant": "dora"}},
    },
    "none": {
        "lora": {"method": {"kind": "lora", "r": 4}, "train": {"batch_size": 5}},
        "whole modules": {
            "method": {
                "kind": "lora",
                "r": 4,
                "targets": ["q_proj"],
                "modules_to_save": ["layers.1.mlp.up_proj", "embed_tokens"],
            },
            "train": {"gradient_checkpointing": True},
        },
    },
}
STEPS = 3
LAUNCH = (
    "-m accelerate.commands.launch --multi_gpu --num_processes 2 --num_machines 1 --main_process_port 0 "
    "--mixed_precision no --dynamo_backend no"
)


def recipes(folder: Path, base: Path, quant: str, *, shard: bool) -> list[Recipe]:
    """The runs over a base that is held so, each in a folder of its own, with all that a run does besides steps."""
    made = []
    for name, sections in RUNS[quant].items():
        train = {"max_steps": STEPS, "batch_size": 4, "gradient_checkpointing": False, "shard_base": shard}
        content = {
            "base": str(base),
            "quant": {"kind": quant},
            "method": sections["method"],
            "data": {"train": str(folder / "train.jsonl"), "valid": str(folder / "valid.jsonl"), "max_length": 128},
            "optim": {"lr": 5e-3, "schedule": "constant", "warmup": 0.0},
            "train": {**train, **sections.get("train", {})},
            "eval": {"every": 0, "metric": "exact_match" if name == "prefix" else "loss", "rows": 3},
            "log": {"every": 1, "tensorboard": False, "samples": int(name == "prefix")},
            "out": str(folder / ("divided" if shard else "whole") / quant / name),
        }
        made.append(Recipe.model_validate(content))
    return made


def in_each_process(folder: Path, base: Path) -> None:
    """What either of two processes does: all runs on a whole base, then on a divided one."""
    for quant in RUNS:
        for shard in (False, True):
            train_runs(Runs(tuple(recipes(folder, base, quant, shard=shard))))
    first, *_ = recipes(folder, base, "none", shard=False)
    content = {**first.model_dump(), "out": str(folder / "resumed")}
    for steps, shard in ((2, False), (STEPS, True)):
        content["train"].update(max_steps=steps, shard_base=shard)
        train_runs(Runs((Recipe.model_validate(content),)), resume=shard)
    held, refusals = {}, []
    for quant in RUNS:
        held[quant] = []
        for shard in (False, True):
            one, *_ = recipes(folder, base, quant, shard=shard)
            prepared = prepare(one)
            held[quant].append(held_bytes(prepared.model))
            memory = fit.estimate(prepared)
            with pytest.MonkeyPatch.context() as patched:  # what a process is resident of isn't the same twice
                patched.setattr(fit, "estimate", lambda _, memory=memory: memory)
                refusals.append(fit.why_not(prepared, memory, memory.total - 1000))
    (folder / f"facts-{dist.get_rank()}.json").write_text(json.dumps({"held": held, "refusals": refusals}))
    leave()


def held_bytes(model: PreTrainedModel) -> dict[str, int]:
    """Bytes of all storages that a base's layers hold, the buffers apart."""
    divided, tensors = division(model), list[Tensor]()
    for layer in decoder_layers(model):
        for parameter in layer.parameters():
            if parameter.requires_grad:
                continue
            state = getattr(parameter, "quant_state", None)
            nested = getattr(state, "state2", None)
            for one in (parameter, *(getattr(s, name) for s in (state, nested) if s for name in ("absmax", "offset"))):
                tensors += [] if one is None else [one]
    if divided is not None:
        tensors += divided._pieces
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    buffers = [] if divided is None else divided._buffers
    shared = [storages.pop(buffer.untyped_storage().data_ptr()) for buffer in buffers]
    return {"pieces": sum(storages.values()), "buffers": sum(shared)}


@pytest.fixture(scope="module")
def trained(deep_base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of all runs, which two processes have trained."""
    folder = tmp_path_factory.mktemp("two")
    for name, count in (("train", 24), ("valid", 5)):
        lines = [{"prompt": f"{name}{n}" * (n % 5 + 1), "completion": " " + "ab" * (n % 4 + 1)} for n in range(count)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    ended = subprocess.run(
        [sys.executable, *LAUNCH.split(), __file__, str(folder), str(deep_base)],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PEFTKIT_HOME": str(folder / "home")},
        timeout=900,
    )
    assert ended.returncode == 0, ended.stderr
    return folder


def outcome(out: Path) -> dict[str, Any]:
    """Weights, curves and answers of a run."""
    weights = {folder: (out / folder / "adapter_model.safetensors").read_bytes() for folder in ("", "best", "last")}
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    timed = ("seconds", "tokens_per_s", "memory_gb")
    return {
        "weights": weights,
        "curves": [{key: value for key, value in line.items() if key not in timed} for line in lines],
        "samples": json.loads((out / "run.json").read_bytes())["samples"],
        "moments": (out / "state" / f"step-{STEPS}" / "optimizer.safetensors").read_bytes(),
    }


@pytest.mark.parametrize(("quant", "name"), [(quant, name) for quant, runs in RUNS.items() for name in runs])
def test_two_processes_give_the_bits_of_two_with_a_whole_base_each(trained: Path, quant: str, name: str) -> None:
    whole, divided = (outcome(trained / how / quant / name) for how in ("whole", "divided"))
    assert whole == divided
    assert len(whole["curves"]) == STEPS + 1


def test_a_run_on_a_whole_base_is_resumed_on_a_divided_one(trained: Path) -> None:
    found = []
    for out in (trained / "resumed", trained / "whole" / "none" / "lora"):
        one = outcome(out)  # one of them was evaluated after its first steps too
        curves = [line for line in one["curves"] if line["event"] == "train"]
        found.append((one["weights"]["last"], one["moments"], one["samples"], curves))
    assert found[0] == found[1] and len(found[0][-1]) == STEPS


def test_each_process_holds_half_of_the_layers(trained: Path) -> None:
    for rank in range(2):
        held = json.loads((trained / f"facts-{rank}.json").read_bytes())["held"]
        for whole, divided in held.values():
            padding = 128 * 40 * 5
            assert whole["pieces"] / 2 <= divided["pieces"] <= (whole["pieces"] + padding) / 2
            assert divided["buffers"] <= 2 * (whole["pieces"] + padding) / 5


def test_a_run_that_would_fit_if_the_base_were_divided_is_told_so(trained: Path) -> None:
    for rank in range(2):
        nf4, divided_nf4, none, divided_none = json.loads((trained / f"facts-{rank}.json").read_bytes())["refusals"]
        assert nf4.endswith("it would with train.shard_base=true") and none.endswith("train.shard_base=true")
        assert "use a smaller base" in divided_nf4
        assert divided_none.endswith("it would with quant.kind=nf4")


if __name__ == "__main__":
    in_each_process(*(Path(argument) for argument in sys.argv[1:]))
