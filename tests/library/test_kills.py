"""Kill -9 at random moments, while saving and in between: `--resume` goes on with the bits of a run nobody killed."""

import json
import multiprocessing
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from peftkit.recipe import Recipe
from peftkit.train import train

MakeRecipe = Callable[..., Recipe]

LORA = {"kind": "lora", "r": 4, "alpha": 8.0, "dropout": 0.2}
METHODS: dict[str, Any] = {
    "lora": LORA,
    "dora": {**LORA, "variant": "dora"},
    "pissa": {**LORA, "init": "pissa"},
    "modules_to_save": {**LORA, "targets": ["q_proj"], "modules_to_save": ["layers.1.mlp.up_proj"]},
    "token_rows": {**LORA, "trainable_token_indices": [3, 70]},
    "houlsby": {"kind": "bottleneck", "variant": "houlsby", "reduction_factor": 8},
    "prefix": {"kind": "prefix", "num_virtual_tokens": 4},
    "ptuning_v2": {"kind": "ptuning_v2", "num_virtual_tokens": 4},
    "ptuning": {"kind": "ptuning", "num_virtual_tokens": 4, "encoder": "lstm", "encoder_dropout": 0.1},
    "prompt": {"kind": "prompt", "num_virtual_tokens": 4},
    "lora with prompt": [LORA, {"kind": "prompt", "num_virtual_tokens": 4}],
}
DATA: dict[str, dict[str, Any]] = {
    "padded": {"packing": False},
    "packed": {"packing": True},
    "streamed": {"packing": False, "streaming": True},
    "packed and streamed": {"packing": True, "streaming": True},
}

CHILD = """
import os, signal
from peftkit.recipe import Recipe
from peftkit.train import train

left, taken = {last!r}, 0

def counted(call):
    def run(path, *args, **kwargs):
        global taken
        place = os.readlink(f"/proc/self/fd/{{path}}") if isinstance(path, int) else os.fspath(path)
        taken += str(place).startswith({out!r})
        if left and taken == left:
            os.kill(os.getpid(), signal.SIGKILL)
        return call(path, *args, **kwargs)
    return run

for name in ("fsync", "replace", "unlink", "rmdir"):
    setattr(os, name, counted(getattr(os, name)))
train(Recipe.model_validate_json({recipe!r}), resume={resume!r})
open({out!r} + ".calls", "w").write(str(taken))
"""
"""Trains, and kills itself before the last-th change that it makes to files of the run."""

_forks = multiprocessing.get_context("forkserver")  # the children of one process that has loaded torch once
_forks.set_forkserver_preload(["peftkit.train"])


def begin(recipe: Recipe, *, resume: bool = False, last: int = 0) -> Any:
    code = CHILD.format(recipe=recipe.model_dump_json(), out=recipe.out, resume=resume, last=last)
    child = _forks.Process(target=exec, args=(code, {"__name__": "child"}))
    child.start()
    return child


@pytest.fixture
def ten_steps(make_recipe: MakeRecipe, tmp_path: Path) -> Callable[..., Recipe]:
    """Ten steps over a little more than an epoch, with a checkpoint after each and evaluations."""
    valid = tmp_path / "valid.jsonl"
    valid.write_text("".join(json.dumps({"prompt": "ab" * n, "completion": "b" * n}) + "\n" for n in range(1, 7)))

    def make(name: str, kind: str, data: str, recompute: str) -> Recipe:
        made = make_recipe(
            data={"valid": str(valid), **DATA[data]},
            train={
                "max_steps": 10,
                "batch_size": 2,
                "grad_accum": 2,
                "save_every": 1,
                "gradient_checkpointing": recompute,
            },
            eval={"every": 2},
            out=str(tmp_path / name),
        )
        return Recipe.model_validate({**made.model_dump(), "method": METHODS[kind]})

    return make


def kept(out: Path) -> dict[str, Any]:
    """The adapters' bits, the best and the last among them, and the curves."""
    bits = {str(path.relative_to(out)): path.read_bytes() for path in sorted(out.glob("**/adapter_model.safetensors"))}
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    curve = [(line["event"], line["step"], line["loss"], line.get("grad_norm"), line.get("tokens")) for line in lines]
    summary = json.loads((out / "run.json").read_text())["summary"]
    return {**bits, "curve": curve, **{name: summary[name] for name in ("uid", "best_step", "best_loss", "tokens")}}


@pytest.mark.parametrize("data", list(DATA))
@pytest.mark.parametrize("moment", ["writing", "any"])
def test_a_run_that_is_killed_again_and_again_ends_with_the_same_bits(
    ten_steps: Callable[..., Recipe], data: str, moment: str, seed: int
) -> None:
    rng = random.Random(seed)
    kind, recompute = rng.choice(list(METHODS)), rng.choice(["none", "selective", "full", "offload"])
    print("method:", kind, recompute)
    whole, killed = (ten_steps(name, kind, data, recompute) for name in ("whole", "killed"))
    start = time.perf_counter()
    child = begin(whole)
    child.join()
    seconds = time.perf_counter() - start
    assert child.exitcode == 0
    calls = int(Path(whole.out + ".calls").read_text())
    assert calls > 60
    for resume in (False, True):
        child = begin(killed, resume=resume, last=rng.randint(1, calls) if moment == "writing" else 0)
        if moment == "any":
            child.join(rng.uniform(0.2, 1) * seconds)
            child.kill()
        child.join()
        assert child.exitcode in (0, -signal.SIGKILL)
    summary = train(killed, resume=True)
    assert kept(summary.out) == kept(Path(whole.out))
    assert not list(summary.out.rglob(".*"))
