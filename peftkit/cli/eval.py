"""`peftkit eval`: scores an adapter, or the bare base, on a data file."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from peftkit.cli import output
from peftkit.cli.chosen import ENGINE_NAME, Chosen, choose
from peftkit.errors import InputError, RunError, did_you_mean

if TYPE_CHECKING:
    from peftkit.evaluate import Answer, Example, Metric, Score
    from peftkit_serve import Engine


@dataclass(frozen=True)
class Generated:
    """An engine's answers, in the order of the examples."""

    answers: list["Answer"]
    num_tokens: int
    seconds: float


def command(
    data: Annotated[str, typer.Option(metavar="FILE.jsonl", help="Rows to score on; example:SET/test.jsonl too.")],
    adapter: Annotated[str | None, typer.Option(metavar="DIR", help="The adapter; without it the bare base.")] = None,
    base: Annotated[str | None, typer.Option(help="Base model; by default the one that the adapter names.")] = None,
    quant: Annotated[
        Literal["nf4", "none"] | None,
        typer.Option(help="How the base's weights are held; by default as the adapter was trained."),
    ] = None,
    metric: Annotated[
        list[str] | None,
        typer.Option(
            metavar="exact_match|accuracy|field_f1|rouge_l|nll",
            help="What to measure; repeat it for more. By default exact_match.",
        ),
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, metavar="N", help="Only the first N rows.")] = None,
) -> None:
    """Score an adapter, or the bare base, on a data file."""
    from transformers import AutoConfig

    from peftkit.evaluate import read_examples

    metrics = _metrics(metric or ["exact_match"])
    chosen = choose(adapter, base, quant)
    context = AutoConfig.from_pretrained(chosen.base.path).max_position_embeddings
    num_virtual = chosen.artifact.num_virtual if chosen.artifact else 0
    examples = read_examples(data, chosen.tokenizer(), max_length=context - num_virtual, limit=limit)
    generated, scores = evaluate(chosen, examples, metrics)
    result = {
        "data": data,
        **chosen.facts(),
        "n": len(examples),
        "metrics": {score.metric: {"value": score.value, "stderr": score.stderr} for score in scores},
        "generated_tokens": generated.num_tokens if generated else None,
        "generated_tokens_per_s": generated.num_tokens / generated.seconds if generated else None,
    }
    output.emit(result, lambda: _text(scores, generated))


def _metrics(names: Sequence[str]) -> list["Metric"]:
    """The metrics of these names, each once. Raises InputError for an unknown one."""
    from peftkit.evaluate import METRICS

    for name in names:
        if name not in METRICS:
            raise InputError(
                f"--metric {name}: the metrics are {', '.join(METRICS)}{did_you_mean(name, METRICS)}", field="metric"
            )
    return [metric for metric in METRICS if metric in names]


def evaluate(
    chosen: Chosen, examples: Sequence["Example"], metrics: Sequence["Metric"]
) -> tuple[Generated | None, list["Score"]]:
    """Scores in the order of `metrics`, and what was generated for those that need answers."""
    from peftkit.evaluate import score

    generated = None
    if set(metrics) != {"nll"}:
        from peftkit_serve import Engine

        if chosen.quant == "nf4" and not chosen.double_quant:
            output.note(
                "warning: the adapter was trained with quant.double_quant false; answers are generated over NF4 with "
                "double quantisation, the only one that the engine has (nll is over what it was trained on)"
            )
        engine = Engine(chosen.base, quant=chosen.quant)
        if chosen.adapter is not None:
            engine.adapters.add(ENGINE_NAME, chosen.adapter)
        generated = generate_answers(engine, chosen.engine_name, examples, metrics)
        del engine  # its weights make room for the model that nll asks
    scores = []
    for metric in metrics:
        if metric == "nll":
            scores.append(_nll(chosen, examples))
        else:
            assert generated is not None
            scores.append(score(examples, generated.answers, metric))
    return generated, scores


def generate_answers(
    engine: "Engine", adapter: str | None, examples: Sequence["Example"], metrics: Sequence["Metric"]
) -> Generated:
    """Greedy answers of one of an engine's adapters (None: the bare base), as long as the metrics need them.

    Raises RunError when the engine fails on one.
    """
    from peftkit.evaluate import Answer, max_answer_tokens
    from peftkit_serve import Request, SamplingParams

    limits = max_answer_tokens(examples, metrics)
    requests = [
        Request(
            prompt=list(example.prompt_ids),
            adapter=adapter,
            sampling=SamplingParams(max_tokens=limit, temperature=0.0),
            request_id=str(index),
        )
        for index, (example, limit) in enumerate(zip(examples, limits, strict=True))
    ]
    answers: dict[int, Answer] = {}
    start = time.perf_counter()
    with output.progress("generate", total=len(examples), unit="row") as bar:
        for one in engine.generate(requests):
            if one.finish_reason == "error":
                raise RunError(f"{examples[int(one.request_id)].where}: {one.error}")
            answers[int(one.request_id)] = Answer(one.text, one.token_ids)
            bar.update(1)
    seconds = time.perf_counter() - start
    ordered = [answers[index] for index in range(len(examples))]
    return Generated(ordered, sum(len(answer.token_ids) for answer in ordered), seconds)


def _nll(chosen: Chosen, examples: Sequence["Example"]) -> "Score":
    from peftkit.artifact import load_adapter
    from peftkit.base import load_base
    from peftkit.evaluate import nll

    model, _ = load_base(chosen.base, quant=chosen.quant, double_quant=chosen.double_quant)
    if chosen.adapter is not None:
        load_adapter(model, chosen.adapter)
    with output.progress("nll", total=len(examples), unit="row") as bar:
        return nll(model, examples, on_rows=bar.update)


def _text(scores: Sequence["Score"], generated: Generated | None) -> str:
    rows = [[score.metric, score.value, score.stderr, score.n] for score in scores]
    text = output.table(["metric", "value", "stderr", "rows"], rows)
    if generated is not None:
        rate = generated.num_tokens / generated.seconds
        text += f"\n{generated.num_tokens:,} tokens generated, {rate:.0f} tokens/s"
    return text
