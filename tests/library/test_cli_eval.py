"""`peftkit eval` and `peftkit generate` from the outside, against transformers' own generation."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import peftkit
from peftkit.chat import render_chat
from peftkit.cli.main import run
from peftkit.evaluate import nll, read_examples
from peftkit.methods import AnyConfig, LoraConfig, PromptTuningConfig, attached

Capture = pytest.CaptureFixture[str]
KINDS = {"lora": LoraConfig(r=4, alpha=8), "prompt": PromptTuningConfig(num_virtual_tokens=5)}
PROMPTS = ["abcabc", "the cat sat on", "one, two,", "x", "An address: 12 Main St"]
OWN_TEMPLATE = "{% for m in messages %}({{ m['content'] }}){% endfor %}"


def save(base: Path, folder: Path, config: AnyConfig, **record: Any) -> Path:
    model, _ = peftkit.load_base(base)
    peftkit.attach(model, config)
    for parameter in attached(model)[0].parameters().values():
        torch.nn.init.normal_(parameter, std=0.1)
    peftkit.save_adapter(model, folder, **record)
    return folder


def greedy(base: Path, adapter: Path | None, ids: list[int], count: int) -> tuple[list[int], str]:
    """transformers' greedy answer: ids with the end token if it came, and the text."""
    model, tokenizer = peftkit.load_base(base)
    if adapter is not None:
        peftkit.load_adapter(model, adapter)
    inputs = torch.tensor([ids])
    answer = model.generate(
        inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=count, do_sample=False, pad_token_id=0
    )[0, len(ids) :].tolist()
    text = tokenizer.decode(answer, skip_special_tokens=True)
    assert isinstance(text, str)
    return answer, text


def write_rows(path: Path, completions: dict[str, str]) -> Path:
    rows = [json.dumps({"prompt": prompt, "completion": text}) for prompt, text in completions.items()]
    path.write_text("\n".join(rows), encoding="utf-8")
    return path


def answer(capsys: Capture, *argv: str | Path) -> tuple[int, str, str]:
    capsys.readouterr()
    code = run([str(arg) for arg in argv])
    out, err = capsys.readouterr()
    return code, out, err


@pytest.mark.parametrize("kind", [None, *KINDS])
def test_metrics_are_those_of_transformers_greedy_answers(
    kind: str | None, seed: int, tiny_base: Path, tmp_path: Path, capsys: Capture
) -> None:
    adapter = None if kind is None else save(tiny_base, tmp_path / "a", KINDS[kind])
    _, tokenizer = peftkit.load_base(tiny_base)
    answers = {prompt: greedy(tiny_base, adapter, tokenizer.encode(prompt), 4)[0] for prompt in PROMPTS}
    # three references are what the model says, as far as their bytes are text; two are not
    said = {prompt: tokenizer.decode(ids, skip_special_tokens=True) for prompt, ids in answers.items()}
    known = {
        # the byte that begins U+FFFD is one that a broken answer may end with
        prompt: "\ufffd" not in text and tokenizer.encode(text)[:4] == answers[prompt][:4]
        for prompt, text in said.items()
    }
    rows = {prompt: text if known[prompt] and text.strip() else "zzzz" for prompt, text in said.items()}
    data = write_rows(tmp_path / "rows.jsonl", rows)
    wanted = sum(text != "zzzz" for text in rows.values()) / len(rows)
    options = ["--adapter", adapter] if adapter else ["--base", tiny_base]
    code, out, err = answer(
        capsys, "eval", "--data", data, *options, "--metric", "accuracy", "--metric", "nll", "--json"
    )
    assert code == 0, err
    result = json.loads(out)
    assert result["metrics"]["accuracy"]["value"] == pytest.approx(wanted)
    assert result["metrics"]["nll"]["value"] > 0 and result["metrics"]["nll"]["stderr"] > 0
    assert (result["n"], result["base"], result["quant"]) == (5, str(tiny_base), "none")
    assert result["generated_tokens"] > 0 and result["generated_tokens_per_s"] > 0


def test_eval_prints_a_table_of_what_was_asked(tiny_base: Path, tmp_path: Path, capsys: Capture) -> None:
    data = write_rows(tmp_path / "rows.jsonl", dict.fromkeys(PROMPTS, "yes"))
    code, out, _ = answer(
        capsys,
        "eval",
        "--data",
        data,
        "--base",
        tiny_base,
        "--metric",
        "rouge_l",
        "--metric",
        "accuracy",
        "--limit",
        "3",
    )
    lines = out.splitlines()
    assert code == 0
    assert lines[0].split() == ["metric", "value", "stderr", "rows"]
    assert [line.split()[0] for line in lines[2:4]] == ["accuracy", "rouge_l"]
    assert lines[2].split()[-1] == "3" and "tokens/s" in lines[4]


def test_nll_alone_generates_nothing(tiny_base: Path, tmp_path: Path, capsys: Capture) -> None:
    data = write_rows(tmp_path / "rows.jsonl", {"a": "b"})
    code, out, _ = answer(capsys, "eval", "--data", data, "--base", tiny_base, "--metric", "nll", "--json")
    assert code == 0 and json.loads(out)["generated_tokens"] is None


def test_quantisation_is_the_adapters_unless_said(tiny_base: Path, tmp_path: Path, capsys: Capture) -> None:
    data = write_rows(tmp_path / "rows.jsonl", {"abc": "def"})
    adapter = save(tiny_base, tmp_path / "a", KINDS["lora"], quant="nf4")
    values = {}
    for options in ([], ["--quant", "none"]):
        _, out, _ = answer(capsys, "eval", "--data", data, "--adapter", adapter, "--metric", "nll", *options, "--json")
        values[json.loads(out)["quant"]] = json.loads(out)["metrics"]["nll"]["value"]
    assert values.keys() == {"nf4", "none"} and values["nf4"] != values["none"]


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        ([], "name an adapter with --adapter, or a base with --base"),
        (["--base", "BASE", "--metric", "acuracy"], "did you mean 'accuracy'?"),
        (["--adapter", "nowhere"], "there is no adapter folder nowhere"),
        (["--adapter", "RUN"], "the run in it hasn't exported its adapter yet: go on with peftkit train … --resume"),
        (["--base", "BASE", "--data", "DATA"], "rows.jsonl:2: broken JSON"),
    ],
)
def test_bad_input_is_one_line(
    options: list[str], fault: str, tiny_base: Path, tmp_path: Path, capsys: Capture
) -> None:
    data = tmp_path / "rows.jsonl"
    data.write_text('{"prompt": "a", "completion": "b"}\n{"prompt": \n')
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").touch()
    places = {"BASE": str(tiny_base), "DATA": str(data), "RUN": str(tmp_path / "run")}
    code, out, err = answer(capsys, "eval", "--data", data, *(places.get(option, option) for option in options))
    assert (code, out) == (2, "") and fault in err and len(err.splitlines()) == 1


@pytest.mark.parametrize("kind", [None, *KINDS])
def test_generate_streams_transformers_greedy_answer(
    kind: str | None, seed: int, tiny_base: Path, tmp_path: Path, capsys: Capture
) -> None:
    adapter = None if kind is None else save(tiny_base, tmp_path / "a", KINDS[kind])
    _, tokenizer = peftkit.load_base(tiny_base)
    ids, text = greedy(tiny_base, adapter, tokenizer.encode(PROMPTS[1]), 12)
    options = ["--adapter", adapter] if adapter else ["--base", tiny_base]
    command = ["generate", *options, "--prompt", PROMPTS[1], "--max-tokens", "12"]
    code, out, err = answer(capsys, *command)
    assert (code, out) == (0, text + "\n"), err
    _, out, _ = answer(capsys, *command, "--json")
    result = json.loads(out)
    assert (result["text"], result["generated_tokens"]) == (text, len(ids))
    assert result["prompt_tokens"] == len(tokenizer.encode(PROMPTS[1]))


def test_chat_uses_the_adapters_template_and_stdin(
    seed: int, tiny_base: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = save(tiny_base, tmp_path / "a", KINDS["lora"], chat_template={"text": OWN_TEMPLATE, "sha256": ""})
    _, tokenizer = peftkit.load_base(tiny_base)
    _, text = greedy(tiny_base, adapter, tokenizer.encode("(hello)"), 6)
    monkeypatch.setattr("sys.stdin", io.StringIO("hello"))
    code, out, err = answer(capsys, "generate", "--adapter", adapter, "--chat", "--max-tokens", "6")
    assert (code, out) == (0, text + "\n"), err


def test_a_conversation_goes_on_until_the_input_ends(
    tiny_base: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    _, tokenizer = peftkit.load_base(tiny_base)
    messages = [{"role": "user", "content": "hi"}]
    _, first = greedy(tiny_base, None, render_chat(tokenizer, messages), 5)
    messages += [{"role": "assistant", "content": first}, {"role": "user", "content": "and?"}]
    _, second = greedy(tiny_base, None, render_chat(tokenizer, messages), 5)
    monkeypatch.setattr("sys.stdin", Terminal("hi\n\nand?\n"))
    code, out, err = answer(capsys, "generate", "--base", tiny_base, "--chat", "--max-tokens", "5")
    assert code == 0 and "Ctrl-D ends" in err
    assert out == f"> {first}\n> > {second}\n> \n"


def test_two_methods_together_are_answered_by_and_scored(tiny_base: Path, tmp_path: Path, capsys: Capture) -> None:
    model, tokenizer = peftkit.load_base(tiny_base)
    for config in KINDS.values():
        peftkit.attach(model, config)
    for method in attached(model):
        for parameter in method.parameters().values():
            torch.nn.init.normal_(parameter, std=0.1)
    peftkit.save_adapter(model, tmp_path / "a")
    wanted = greedy(tiny_base, tmp_path / "a", tokenizer(PROMPTS[0]).input_ids, 8)[1]
    code, out, err = answer(
        capsys, "generate", "--adapter", tmp_path / "a", "--prompt", PROMPTS[0], "--max-tokens", "8", "--json"
    )
    assert code == 0, err
    assert json.loads(out)["text"] == wanted
    data = write_rows(tmp_path / "rows.jsonl", {PROMPTS[0]: wanted})
    code, out, err = answer(capsys, "eval", "--adapter", tmp_path / "a", "--data", data, "--metric", "nll", "--json")
    assert code == 0, err
    assert json.loads(out)["n"] == 1


def test_a_seed_repeats_a_drawn_answer(tiny_base: Path, capsys: Capture) -> None:
    command = ["generate", "--base", tiny_base, "--prompt", "abc", "--temperature", "1.5", "--max-tokens", "16"]
    outs = [answer(capsys, *command, "--seed", seed)[1] for seed in ("1", "1", "2")]
    assert outs[0] == outs[1] != outs[2]


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        (["--prompt", ""], "the prompt is empty"),
        (["--prompt", "a", "--top-p", "0"], "top_p"),
        (["--prompt", "a" * 300], "context"),
    ],
)
def test_generates_bad_input_is_one_line(options: list[str], fault: str, tiny_base: Path, capsys: Capture) -> None:
    code, out, err = answer(capsys, "generate", "--base", tiny_base, *options)
    assert (code, out) == (2, "") and fault in err and len(err.splitlines()) == 1


def test_nll_is_over_the_quantisation_that_the_adapter_was_trained_on(
    tiny_base: Path, tmp_path: Path, capsys: Capture
) -> None:
    record = {"recipe": {"quant": {"kind": "nf4", "double_quant": False}}}
    model, tokenizer = peftkit.load_base(tiny_base, quant="nf4", double_quant=False)
    peftkit.attach(model, KINDS["lora"])
    peftkit.save_adapter(model, tmp_path / "a", **record)
    data = write_rows(tmp_path / "rows.jsonl", {prompt: " yes" for prompt in PROMPTS})
    _, out, _ = answer(capsys, "eval", "--data", data, "--adapter", tmp_path / "a", "--metric", "nll", "--json")
    examples = read_examples(str(data), tokenizer, max_length=256)
    found = json.loads(out)["metrics"]["nll"]["value"]
    assert found == pytest.approx(nll(model, examples).value, rel=1e-5)
    doubled, _ = peftkit.load_base(tiny_base, quant="nf4")
    assert found != pytest.approx(nll(doubled, examples).value, rel=1e-4)
