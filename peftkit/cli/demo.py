"""`peftkit demo`: the main job, small but real: train two adapters, score them, serve both, merge and export one."""

import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from peftkit import resources
from peftkit.cli import output
from peftkit.errors import InputError, RunError

if TYPE_CHECKING:
    from peftkit.base import BaseInfo
    from peftkit.evaluate import Metric
    from peftkit.merge import MergeReport
    from peftkit.train import RunSummary

BASE, QUANT = "smollm2-135m", "nf4"
ROWS = 60
"""Test rows that each adapter is scored on."""
MIXED = 16
"""Requests that are sent at once, and one after another."""
_MARKER = "demo.json"


@dataclass
class Tenant:
    """One user of the demo: what is trained for it, and what came of it."""

    name: str
    recipe: str
    steps: int
    test: str
    metric: "Metric"
    summary: "RunSummary | None" = None
    scores: dict[str, float] = field(default_factory=dict)
    """The metric on the test rows, by "base" and "adapter"."""


@dataclass(frozen=True)
class Served:
    """The same requests sent one after another, then all at once."""

    requests: int
    alone_s: float
    alone_steps: int
    """Engine steps that they took."""
    mixed_s: float
    mixed_steps: int
    equal: int
    """Requests with the same answer both times."""


def command(
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where everything is written.")] = Path("runs/demo"),
) -> None:
    """Fine-tune two adapters over a 4-bit base, score, serve, merge and export them: minutes on a CPU."""
    start = time.perf_counter()
    tenants = [
        Tenant("address", "recipes/address-lora.yaml", 30, "example:address/test.jsonl", "field_f1"),
        Tenant("reviews", "recipes/sentiment-prompt.yaml", 40, "example:sentiment/test.jsonl", "accuracy"),
    ]
    _claim(out)
    base = _base()
    for tenant in tenants:
        _train(tenant, out / tenant.name)
    _score(base, tenants)
    served = _serve(tenants, out / "server.log")
    report = _merge_and_export(base, tenants[0], out)
    result = {
        "out": out,
        "tenants": [asdict(tenant) for tenant in tenants],
        "served": served,
        "merge": report,
        "seconds": time.perf_counter() - start,
        "peak_memory_bytes": _peak_memory(),
    }
    (out / _MARKER).write_text(json.dumps({"status": "finished"}) + "\n")
    output.emit(result, lambda: _text(result, tenants, served, report))


def _claim(out: Path) -> None:
    """Makes the demo's folder; one that an earlier demo made is replaced."""
    if out.exists():
        if not (out / _MARKER).exists():
            raise InputError(f"--out {out} exists and isn't an earlier demo's folder: name another", field="out")
        shutil.rmtree(out)
    try:
        out.mkdir(parents=True)
        (out / _MARKER).write_text(json.dumps({"status": "unfinished"}) + "\n")
    except OSError as error:
        raise RunError(f"can't write {out}: {error.strerror}") from error


def _base() -> "BaseInfo":
    from peftkit.base import resolve_base

    output.note(f"[1/5] base {BASE} (converted from its GGUF the first time)")
    return resolve_base(BASE)


def _train(tenant: Tenant, out: Path) -> None:
    from peftkit.recipe import load_recipe
    from peftkit.train import train

    settings = [f"train.max_steps={tenant.steps}", f"out={json.dumps(str(out))}", "data.valid=null", "log.samples=0"]
    output.note(f"[2/5] peftkit train {tenant.recipe} train.max_steps={tenant.steps}   (base in 4-bit NF4)")
    recipe = load_recipe(tenant.recipe, settings)
    tenant.summary = train(recipe, progress=output.progress)


def _score(base: "BaseInfo", tenants: Sequence[Tenant]) -> None:
    """Each tenant's test rows, answered by the bare base and by its adapter."""
    from peftkit.cli.eval import generate_answers
    from peftkit.evaluate import read_examples, score
    from peftkit_serve import Engine

    output.note(f"[3/5] {ROWS} test rows each, before and after")
    engine = Engine(base, quant=QUANT, num_pages=1024)
    for tenant in tenants:
        examples = read_examples(tenant.test, engine.tokenizer, max_length=512, limit=ROWS)
        engine.adapters.add(tenant.name, _folder(tenant))
        for who, adapter in (("base", None), ("adapter", tenant.name)):
            answers = generate_answers(engine, adapter, examples, [tenant.metric]).answers
            tenant.scores[who] = score(examples, answers, tenant.metric).value


def _serve(tenants: Sequence[Tenant], log: Path) -> Served:
    """Starts the server as a user would and sends both tenants' and the base's requests with the openai client."""
    from openai import OpenAI

    prompts = {tenant.name: _prompts(tenant.test) for tenant in tenants}
    models = [tenants[0].name, tenants[1].name, tenants[0].name, BASE]
    work = [(models[i % 4], prompts.get(models[i % 4], prompts[tenants[1].name])[i]) for i in range(MIXED)]
    with _server(tenants, log) as url:
        client = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)

        def ask(item: tuple[str, str]) -> str:
            model, prompt = item
            answer = client.completions.create(model=model, prompt=prompt, max_tokens=40, temperature=0)
            return answer.choices[0].text

        ask(work[0])
        steps = [_num_steps(url)]
        times = [time.perf_counter()]
        alone = [ask(item) for item in work]
        times.append(time.perf_counter())
        steps.append(_num_steps(url))
        with ThreadPoolExecutor(MIXED) as pool:
            mixed = list(pool.map(ask, work))
        times.append(time.perf_counter())
        steps.append(_num_steps(url))
    for (model, prompt), text in list(zip(work, mixed, strict=True))[:4]:
        output.note(f"      {model}: {prompt.splitlines()[0]} -> {text.strip()[:90]!r}")
    return Served(
        requests=MIXED,
        alone_s=times[1] - times[0],
        alone_steps=steps[1] - steps[0],
        mixed_s=times[2] - times[1],
        mixed_steps=steps[2] - steps[1],
        equal=sum(a == b for a, b in zip(alone, mixed, strict=True)),
    )


@contextmanager
def _server(tenants: Sequence[Tenant], log: Path) -> Iterator[str]:
    """`peftkit serve` as a process of its own, its log in a file; gives its URL and ends it afterwards."""
    arguments = ["serve", "--base", BASE, "--quant", QUANT, "--port", "0"]
    for tenant in tenants:
        arguments += ["--adapter", f"{tenant.name}={_folder(tenant)}"]
    output.note(f"[4/5] peftkit {' '.join(arguments)}")
    command = [sys.executable, "-m", "peftkit.cli.main", *arguments, "--json"]
    with open(log, "w") as stderr:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True)
    assert process.stdout is not None
    try:
        url = json.loads(process.stdout.readline() or "{}").get("url")
        if url is None:
            raise RunError(f"the server didn't start: {log.read_text().strip() or 'it said nothing'}")
        yield url
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            process.kill()


def _num_steps(url: str) -> int:
    """Steps that the server's engine has made, from its metrics page."""
    import urllib.request

    from prometheus_client.parser import text_string_to_metric_families

    with urllib.request.urlopen(f"{url}/metrics") as page:
        for family in text_string_to_metric_families(page.read().decode()):
            for sample in family.samples:
                if sample.name == "peftkit_steps_total":
                    return int(sample.value)
    raise RunError(f"{url}/metrics has no peftkit_steps_total")


def _prompts(test: str) -> list[str]:
    lines = resources.find(test).read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["prompt"] for line in lines[:MIXED]]


def _merge_and_export(base: "BaseInfo", tenant: Tenant, out: Path) -> "MergeReport":
    from peftkit.merge import export_peft, merge_to_folder

    folder = _folder(tenant)
    output.note(f"[5/5] peftkit merge {folder} --out {out / 'merged'}; peftkit export {folder} --format peft")
    report = merge_to_folder(folder, out / "merged", base)
    export_peft(folder, out / "exported", base_name=str(base.path))
    return report


def _folder(tenant: Tenant) -> Path:
    assert tenant.summary is not None
    return tenant.summary.out


def _peak_memory() -> int:
    """Most memory that this process and, at another time, the server had in use."""
    import resource

    return max(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)) * 1024


def _text(result: dict[str, Any], tenants: Sequence[Tenant], served: Served, report: "MergeReport") -> str:
    rows = []
    for tenant in tenants:
        summary = tenant.summary
        assert summary is not None
        trained = f"{summary.trainable_parameters:,}"
        scores = [tenant.scores["base"], tenant.scores["adapter"]]
        rows.append([tenant.name, trained, summary.steps, f"{summary.seconds:.0f}", tenant.metric, *scores])
    alone, mixed = served.requests / served.alone_s, served.requests / served.mixed_s
    lines = [
        "",
        output.table(["adapter", "parameters", "steps", "seconds", f"metric, {ROWS} rows", "base", "adapter"], rows),
        "",
        f"served over HTTP: {served.requests} requests of {len(tenants)} adapters and the base",
        f"  one after another  {alone:.2f} requests/s in {served.alone_steps} engine steps",
        f"  all at once        {mixed:.2f} requests/s in {served.mixed_steps} engine steps ({mixed / alone:.1f} times)",
        f"  {served.equal} of {served.requests} answers are the same both times",
        f"merged into {report.out}: {report.num_merged} weights, {report.num_bytes / 1e6:,.0f} MB",
    ]
    if report.equivalence is not None:
        found = report.equivalence
        lines.append(
            f"  logits beside base and adapter: relative difference {found.relative:.1e} (limit {found.limit:.1e}), "
            f"the same top token at {found.greedy_agreement:.1%} of {found.num_tokens} positions"
        )
    lines.append(f"exported to {result['out'] / 'exported'}: peft.PeftModel.from_pretrained reads it")
    lines.append(f"{result['seconds']:.0f} s, peak memory {result['peak_memory_bytes'] / 1e9:.1f} GB")
    return "\n".join(lines)
