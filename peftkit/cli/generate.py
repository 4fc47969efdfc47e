"""`peftkit generate`: one answer, streamed to the terminal, or a conversation line by line."""

import sys
import time
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from peftkit.cli import output
from peftkit.cli.chosen import ENGINE_NAME, choose
from peftkit.errors import RunError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from peftkit_serve import Engine, RequestOutput, SamplingParams


def command(
    base: Annotated[str | None, typer.Option(help="Base model; by default the one that the adapter names.")] = None,
    adapter: Annotated[str | None, typer.Option(metavar="DIR", help="The adapter; without it the bare base.")] = None,
    quant: Annotated[
        Literal["nf4", "none"] | None,
        typer.Option(help="How the base's weights are held; by default as the adapter was trained."),
    ] = None,
    prompt: Annotated[str | None, typer.Option(metavar="TEXT", help="The prompt; without it stdin is read.")] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Put the prompt into the chat template; at a terminal, talk line by line.")
    ] = False,
    max_tokens: Annotated[int, typer.Option(min=1, metavar="N", help="Longest answer.")] = 256,
    temperature: Annotated[float, typer.Option(min=0.0, max=2.0, help="0 takes the most likely token.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Keep the most likely tokens that sum to this probability.")] = 1.0,
    seed: Annotated[int | None, typer.Option(help="Fixes the draws at temperatures above 0.")] = None,
) -> None:
    """One answer, streamed to the terminal."""
    from peftkit.chat import encode_prompt, render_chat
    from peftkit_serve import Engine, SamplingParams

    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, top_p=top_p, seed=seed)
    chosen = choose(adapter, base, quant)
    tokenizer = chosen.tokenizer()
    talk = chat and prompt is None and sys.stdin.isatty() and not output.state.json
    if prompt is None and not talk:
        prompt = sys.stdin.read()
    engine = Engine(chosen.base, quant=chosen.quant, max_requests=1, max_adapters=1)
    if chosen.adapter is not None:
        engine.adapters.add(ENGINE_NAME, chosen.adapter)
    if talk:
        _talk(engine, chosen.engine_name, tokenizer, params)
        return
    assert prompt is not None
    ids = render_chat(tokenizer, [{"role": "user", "content": prompt}]) if chat else encode_prompt(tokenizer, prompt)
    start = time.perf_counter()
    answer = _stream(engine, chosen.engine_name, ids, params)
    seconds = time.perf_counter() - start
    result = {
        **chosen.facts(),
        "text": answer.text,
        "finish_reason": answer.finish_reason,
        "prompt_tokens": answer.num_prompt_tokens,
        "generated_tokens": len(answer.token_ids),
        "generated_tokens_per_s": len(answer.token_ids) / seconds,
    }
    output.emit(result, "")


def _talk(
    engine: "Engine", adapter: str | None, tokenizer: "PreTrainedTokenizerBase", params: "SamplingParams"
) -> None:
    """Answers each line that is typed, with the conversation so far before it, until the input ends."""
    from peftkit.chat import render_chat

    output.note("type a message and press Enter; Ctrl-D ends")
    messages: list[dict[str, str]] = []
    while True:
        output.stream("> ")
        line = sys.stdin.readline()
        if not line:
            output.stream("\n")
            return
        if not line.strip():
            continue
        messages.append({"role": "user", "content": line.rstrip("\n")})
        answer = _stream(engine, adapter, render_chat(tokenizer, messages), params)
        output.stream("\n")
        messages.append({"role": "assistant", "content": answer.text})


def _stream(engine: "Engine", adapter: str | None, ids: list[int], params: "SamplingParams") -> "RequestOutput":
    """Writes an answer as it is generated and returns its last output. Raises RunError when the engine fails."""
    from peftkit_serve import Request

    engine.add_request(Request(prompt=ids, adapter=adapter, sampling=params))
    while True:
        for part in engine.step():
            output.stream(part.delta)
            if part.finish_reason == "error":
                raise RunError(f"generation failed: {part.error}")
            if part.finish_reason is not None:
                return part
