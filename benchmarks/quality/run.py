"""Trains and scores every method on every task, peftkit beside HF PEFT: one JSON line a run.

    python benchmarks/quality/run.py --data DIR --out results.jsonl [--base B] [--quant nf4] [--jobs 8]

For each library, method and task the learning rates of `tasks.RATES` are tried on the validation rows with seed 0; the
best one is then trained with seeds 0, 1, 2 and scored on all test rows. Budgets, batches, schedule and scoring are the
same for both: HF PEFT trains and saves with its own code, and the saved adapter is scored by ours (tests/parity shows
that both compute the same logits of one folder).
"""

import argparse
import json
import os
import random
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, fields
from multiprocessing import get_context
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import torch.nn.functional as F
from table import best_trials, table
from tasks import OUR_METHODS, PEER_METHODS, RATES, TASKS, VARIANTS, WARMUP, our_config, peer_config

from peftkit import evaluate
from peftkit.artifact import load_adapter
from peftkit.base import load_base, resolve_base
from peftkit.data import Sample, load_dataset
from peftkit.recipe import Data, Eval, Log, Optim, Quant, Recipe, Train
from peftkit.train import train


@dataclass(frozen=True)
class Spec:
    """One training with its scores."""

    library: str
    method: str
    task: str
    lr: float
    seed: int
    split: str


@dataclass(frozen=True)
class Place:
    """Where things lie, the same for all runs."""

    base: str
    quant: str
    compute_dtype: str
    """What peftkit trains in; HF PEFT keeps what isn't quantised in float32 and its 4-bit products in bfloat16."""
    data: Path
    work: Path
    limit: int | None


def run(spec: Spec, place: Place) -> dict[str, Any]:
    """Trains by `spec` and scores the adapter on the split's rows."""
    torch.set_num_threads(1)
    start = time.monotonic()
    folder = place.work / "-".join([spec.library, spec.method, spec.task, f"{spec.lr:g}", str(spec.seed)])
    if spec.method == "full":
        model, tokenizer = _train_full(spec, place)
    else:
        (_train_ours if spec.library == "peftkit" else _train_peer)(spec, place, folder)
        model, tokenizer = load_base(place.base, quant=place.quant)  # type: ignore[arg-type]
        load_adapter(model, folder)
    seconds = time.monotonic() - start
    scores = _scores(spec, place, model.eval(), tokenizer)
    return {**asdict(spec), "train_s": round(seconds, 1), "total_s": round(time.monotonic() - start, 1), **scores}


def _train_ours(spec: Spec, place: Place, folder: Path) -> None:
    task = TASKS[spec.task]
    recipe = Recipe(
        base=place.base,
        quant=Quant(kind=place.quant, compute_dtype=place.compute_dtype),  # type: ignore[arg-type]
        method=our_config(spec.method, task),
        data=Data(train=str(place.data / spec.task / "train.jsonl"), max_length=512),
        optim=Optim(lr=spec.lr, schedule="linear", warmup=WARMUP),
        train=Train(max_steps=task.steps, batch_size=task.batch_size, seed=spec.seed, save_every=0),
        eval=Eval(every=0),
        log=Log(tensorboard=False),
        out=str(folder),
    )
    train(recipe, overwrite=True)


def _train_peer(spec: Spec, place: Place, folder: Path) -> None:
    import peft

    torch.manual_seed(spec.seed)
    model, tokenizer = load_base(place.base, quant=place.quant)  # type: ignore[arg-type]
    if place.quant == "nf4":
        model = peft.prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    config = peer_config(spec.method, TASKS[spec.task], str(resolve_base(place.base).path))
    wrapped = peft.get_peft_model(model, config)
    _loop(spec, place, wrapped, tokenizer)
    wrapped.save_pretrained(folder)


def _train_full(spec: Spec, place: Place) -> tuple[Any, Any]:
    torch.manual_seed(spec.seed)
    model, tokenizer = load_base(place.base, dtype="float32")
    model.requires_grad_(True)
    _loop(spec, place, model, tokenizer)
    return model, tokenizer


def _loop(spec: Spec, place: Place, model: Any, tokenizer: Any) -> None:
    """The peers' plain loop: AdamW, linear schedule with warm-up, gradients clipped to norm 1."""
    task = TASKS[spec.task]
    rows = load_dataset(str(place.data / spec.task / "train.jsonl"), tokenizer, max_length=512).samples
    order = random.Random(spec.seed)
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=spec.lr, weight_decay=0.0)
    warmup = max(1, int(WARMUP * task.steps))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda s: (s + 1) / warmup if s < warmup else max(0.0, (task.steps - s) / max(1, task.steps - warmup)),
    )
    model.train()
    pool: list[int] = []
    for _ in range(task.steps):
        if len(pool) < task.batch_size:
            pool = list(range(len(rows)))
            order.shuffle(pool)
        loss = model(**_batch([rows[pool.pop()] for _ in range(task.batch_size)], model.device)).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()


def _batch(samples: list[Sample], device: torch.device) -> dict[str, torch.Tensor]:
    width = max(len(sample.ids) for sample in samples)
    ids, labels, mask = [], [], []
    for sample in samples:
        pad = width - len(sample.ids)
        row = torch.as_tensor(sample.ids)
        ids.append(F.pad(row, (0, pad)))
        labels.append(F.pad(row.masked_fill(~torch.as_tensor(sample.trained), -100), (0, pad), value=-100))
        mask.append(F.pad(torch.ones_like(row), (0, pad)))
    stacked = {"input_ids": ids, "attention_mask": mask, "labels": labels}
    return {name: torch.stack(rows).long().to(device) for name, rows in stacked.items()}


def _scores(spec: Spec, place: Place, model: Any, tokenizer: Any) -> dict[str, Any]:
    path = str(place.data / spec.task / f"{spec.split}.jsonl")
    examples = evaluate.read_examples(path, tokenizer, max_length=512, limit=place.limit)
    metrics = TASKS[spec.task].metrics
    generated = [metric for metric in metrics if metric != "nll"]
    answers = _answers(model, tokenizer, examples, max(evaluate.max_answer_tokens(examples, generated)))
    scores = [evaluate.score(examples, answers, metric) for metric in generated]
    if "nll" in metrics:
        scores.append(evaluate.nll(model, examples))
    return {"n": len(examples), "scores": {s.metric: [round(s.value, 4), round(s.stderr, 4)] for s in scores}}


@torch.inference_mode()
def _answers(model: Any, tokenizer: Any, examples: list[evaluate.Example], max_tokens: int) -> list[evaluate.Answer]:
    """Greedy answers, 100 rows of like length at a time, padded on the left."""
    order = sorted(range(len(examples)), key=lambda i: len(examples[i].prompt_ids))
    answers: dict[int, evaluate.Answer] = {}
    eos = tokenizer.eos_token_id
    for at in range(0, len(order), 100):
        rows = order[at : at + 100]
        width = max(len(examples[i].prompt_ids) for i in rows)
        prompts = [torch.tensor(examples[i].prompt_ids) for i in rows]
        ids = torch.stack([F.pad(p, (width - len(p), 0)) for p in prompts]).to(model.device)
        mask = torch.stack([F.pad(torch.ones_like(p), (width - len(p), 0)) for p in prompts]).to(model.device)
        out = model.generate(
            input_ids=ids, attention_mask=mask, max_new_tokens=max_tokens, do_sample=False, pad_token_id=eos
        )
        for i, row in zip(rows, out[:, width:].tolist(), strict=True):
            kept = row[: row.index(eos)] if eos in row else row
            answers[i] = evaluate.Answer(tokenizer.decode(kept, skip_special_tokens=True), tuple(kept))
    return [answers[i] for i in range(len(examples))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with a sub-folder for each task")
    parser.add_argument("--out", type=Path, required=True, help="JSON lines; what is there isn't run again")
    parser.add_argument("--base", default="smollm2-135m")
    parser.add_argument("--quant", default="nf4", choices=["nf4", "none"])
    parser.add_argument("--compute-dtype", default="float32", choices=["auto", "float32", "bfloat16"])
    parser.add_argument("--tasks", default=",".join(TASKS))
    parser.add_argument("--methods", default=",".join(OUR_METHODS))
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--work", type=Path, default=Path("runs/quality"))
    parser.add_argument("--trials-only", action="store_true", help="try the learning rates and stop")
    parser.add_argument("--limit", type=int, default=None, help="score this many rows only")
    args = parser.parse_args()
    place = Place(args.base, args.quant, args.compute_dtype, args.data, args.work, args.limit)
    resolve_base(args.base)  # converted once, before several processes want it
    pairs = [
        (library, method, task)
        for task in args.tasks.split(",")
        for method in args.methods.split(",")
        for library, methods in (("peftkit", (*OUR_METHODS, *VARIANTS)), ("peft", PEER_METHODS))
        if method in methods
    ]
    with ProcessPoolExecutor(args.jobs, mp_context=get_context("spawn")) as pool:
        trials = [Spec(*pair, lr, 0, "valid") for pair in pairs for lr in rates(pair[1])]
        best = best_trials(run_all(trials, place, pool, args.out))
        if args.trials_only:
            return
        seeds = [int(seed) for seed in args.seeds.split(",")]
        finals = [Spec(*pair, best[pair]["lr"], seed, "test") for pair in pairs if pair in best for seed in seeds]
        run_all(finals, place, pool, args.out)
    print(table([json.loads(line) for line in args.out.read_text().splitlines()]))


def rates(method: str) -> tuple[float, ...]:
    """The learning rates that a method, or the method that it is a variant of, is tried at."""
    return RATES[VARIANTS[method][0] if method in VARIANTS else method]


def run_all(specs: list[Spec], place: Place, pool: ProcessPoolExecutor, out: Path) -> list[dict[str, Any]]:
    """Results of all `specs` that succeeded, in their order; what `out` holds already isn't run again."""
    lines = out.read_text().splitlines() if out.exists() else []
    known = {_spec_of(result): result for line in lines if "error" not in (result := json.loads(line))}
    futures = {pool.submit(run, spec, place): spec for spec in specs if spec not in known}
    with open(out, "a") as file:
        for future in as_completed(futures):
            spec = futures[future]
            try:
                known[spec] = result = future.result()
            except Exception as error:  # one run's failure is a line of the results, not the end of the others
                result = {**asdict(spec), "error": f"{type(error).__name__}: {error}"[:500]}
            file.write(json.dumps(result) + "\n")
            file.flush()
    return [known[spec] for spec in specs if spec in known]


def _spec_of(result: dict[str, Any]) -> Spec:
    return Spec(**{field.name: result[field.name] for field in fields(Spec)})


if __name__ == "__main__":
    main()
