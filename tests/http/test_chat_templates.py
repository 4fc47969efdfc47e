"""Chat templates that came with adapters: tried when they come, and bounded in time, memory and length ever after."""

import asyncio
import os
import random
import signal
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from peftkit.errors import AdapterError, DataError
from peftkit_serve.templates.renderer import TemplateError, TemplateOverran, Templates, TextTooLong

PLAIN = "{% for m in messages %}[{{ m.content }}]{% endfor %}"
ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
OVERRUNNING = {
    "loops": ENDLESS,
    "power": "{{ 9 ** (9 ** (8 + messages | length)) }}",
    "text": "{{ 'x' * 10**10 }}",
    "padding": "{{ 'x'.ljust(10**10) }}",
    "format": "{{ '%01000000000d' | format(7) }}",
    "list": "{{ [1] * 10**9 }}",
    "doubling": "{% set n = namespace(x='ab') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    "filler": "{{ lipsum(n=100000) }}",
    "indent": "{{ messages | tojson(indent=10**9) }}",
}
FAILING = {
    "syntax": ("{% if", "line 1: unexpected"),
    "range": ("{% for i in range(10**9) %}{% endfor %}", "Range too big"),
    "recursion": ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "recursion"),
    "depth": ("{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}", "recursion"),
    "arithmetic": ("{{ 1 // 0 }}", "ZeroDivisionError"),
    "escape": ("{{ ''.__class__.__mro__ }}", "unsafe"),
    "refusal": ("{{ raise_exception('no, never') }}", "no, never"),
    "length": ("{% for i in range(5000) %}{{ 'y' * 1000 }}{% endfor %}", "5000000 characters"),
}
USER = [{"role": "user", "content": "abc"}]


@pytest_asyncio.fixture
async def templates(base_folder: Path) -> AsyncIterator[Templates]:
    """A renderer of its own."""
    made = Templates(AutoTokenizer.from_pretrained(base_folder))
    yield made
    made.close()


@pytest.fixture(scope="module")
def served(
    make_engine: Callable[..., Any],
    serve: Callable[..., Any],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Any]:
    """A server of this module's."""
    with serve(make_engine(), store=tmp_path_factory.mktemp("store")) as server:
        yield server


def said(message: str, then: str) -> str:
    """A template that does something on one message only."""
    return "{% if messages[0].content == '" + message + "' %}" + then + "{% endif %}" + PLAIN


@pytest.fixture
def send(served: Any, write_lora: Callable[..., Path], tmp_path: Path) -> Callable[[str, str], httpx.Response]:
    """Uploads an adapter with a template."""

    def send(name: str, template: str) -> httpx.Response:
        folder = write_lora(tmp_path / name, 1, chat_template={"text": template, "sha256": ""})
        files = [("files", (path.name, path.read_bytes())) for path in sorted(folder.iterdir())]
        return httpx.post(f"{served.url}/v1/adapters", data={"name": name}, files=files, timeout=120)

    return send


def chat(server: Any, model: str, text: str) -> httpx.Response:
    body = {"model": model, "messages": [{"role": "user", "content": text}], "max_tokens": 1}
    return httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=120)


async def test_a_template_says_in_its_process_what_it_says_in_this_one(
    templates: Templates, base_folder: Path, seed: int
) -> None:
    rng = random.Random(seed)
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(base_folder)
    texts = {
        "special tokens": "{{ eos_token }}" + PLAIN + "{{ eos_token }}",
        "tools": "{% for t in tools or [] %}{{ t | tojson }}\n{% endfor %}" + PLAIN,
        "generation": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
        "prompt": PLAIN + "{% if add_generation_prompt %}<go on>{% endif %}",
    }
    words = ["a", "é", "\U0001f600", "\n", '"', "{{ 1 }}", "<|end|>"]
    for text in texts.values():
        for _ in range(5):
            messages = [{"role": "user", "content": "".join(rng.choices(words, k=5))} for _ in range(rng.randint(1, 4))]
            tools: Any = (
                [{"type": "function", "function": {"name": "a", "parameters": {}}}] if "tools" in text else None
            )
            wanted = tokenizer.apply_chat_template(
                messages, tools=tools, chat_template=text, tokenize=False, add_generation_prompt=True
            )
            assert await templates.render(text, messages, tools or (), max_chars=10_000) == wanted


async def test_what_a_template_refuses_or_leaves_out_is_named(templates: Templates) -> None:
    with pytest.raises(DataError, match="the user is first") as caught:
        await templates.render("{{ raise_exception('the user is first') }}", USER, (), max_chars=100)
    assert caught.value.field == "messages"
    tools = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
    with pytest.raises(DataError, match="leaves this out") as caught:
        await templates.render(PLAIN, USER, tools, max_chars=100)
    assert caught.value.field == "tools"
    with pytest.raises(TextTooLong) as long:
        await templates.render(PLAIN, USER, (), max_chars=4)
    assert long.value.num_chars == 5 and await templates.render(PLAIN, USER, (), max_chars=5) == "[abc]"


async def test_a_template_that_takes_too_much_is_ended_and_not_begun_anew(templates: Templates) -> None:
    for does in OVERRUNNING.values():
        template = said("go", does)
        with pytest.raises(TemplateOverran):
            await templates.render(template, [{"role": "user", "content": "go"}], (), max_chars=100)
        assert await templates.render(template, USER, (), max_chars=100) == "[abc]", does


async def test_a_template_that_takes_too_much_at_once_is_not_taken(templates: Templates) -> None:
    for template in (OVERRUNNING["text"], "{{ 9 ** (9 ** 9) }}"):  # the second while it is compiled
        with pytest.raises(AdapterError, match="processor time, or too much memory") as caught:
            await templates.check(template)
        assert caught.value.field == "chat_template"


async def test_others_are_rendered_while_one_never_ends(templates: Templates) -> None:
    await templates.render(PLAIN, USER, (), max_chars=100)
    task = asyncio.create_task(templates.render(ENDLESS, USER, (), max_chars=100))
    rendered = 0
    while not task.done():
        assert await templates.render(PLAIN, USER, (), max_chars=100) == "[abc]"
        rendered += 1
        await asyncio.sleep(0.001)
    with pytest.raises(TemplateOverran):
        await task
    assert rendered > 3, "they had to wait for it"


async def test_who_gives_up_leaves_no_answer_to_the_next(templates: Templates) -> None:
    task = asyncio.create_task(
        templates.render(said("go", ENDLESS), [{"role": "user", "content": "go"}], (), max_chars=9)
    )
    await templates.render(PLAIN, USER, (), max_chars=100)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await templates.render(said("go", ENDLESS), USER, (), max_chars=100) == "[abc]"


async def test_more_templates_than_are_kept_take_turns(templates: Templates) -> None:
    for _ in range(2):
        for number in range(20):
            assert await templates.render(f"{number}{PLAIN}", USER, (), max_chars=100) == f"{number}[abc]"
    assert len(templates._children) == 16


async def test_a_process_that_was_killed_is_started_anew(templates: Templates) -> None:
    await templates.render(PLAIN, USER, (), max_chars=100)
    assert templates._process is not None
    os.kill(templates._process.pid, signal.SIGKILL)
    templates._process.wait()
    assert await templates.render(PLAIN + "!", USER, (), max_chars=100) == "[abc]!"


@pytest.mark.parametrize("kind", FAILING)
def test_an_upload_whose_template_fails_is_400_with_the_reason(
    served: Any, send: Callable[[str, str], httpx.Response], kind: str
) -> None:
    template, reason = FAILING[kind]
    answer = send("bad", template)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert reason in error["message"] and error["param"] == "chat_template" and len(answer.text) < 700
    assert httpx.get(f"{served.url}/v1/adapters").json()["data"] == []
    assert not list(Path(served.service.settings.store).glob("adapters/*/*/*"))


def test_an_upload_whose_template_never_ends_is_400(served: Any, send: Callable[[str, str], httpx.Response]) -> None:
    answer = send("bad", ENDLESS)
    assert answer.status_code == 400 and "processor time" in answer.json()["error"]["message"]


def test_a_template_that_needs_more_than_one_message_is_taken(
    served: Any, send: Callable[[str, str], httpx.Response]
) -> None:
    assert send("odd", "{% if messages[0].role != 'system' %}{{ 1 // 0 }}{% endif %}" + PLAIN).status_code == 201
    assert httpx.delete(f"{served.url}/v1/adapters/odd").status_code == 200


def test_a_hostile_template_costs_its_own_requests_a_400_and_nobody_else_anything(
    served: Any, send: Callable[[str, str], httpx.Response]
) -> None:
    assert send("hostile", said("go", ENDLESS)).status_code == 201
    assert send("good", PLAIN).status_code == 201
    refused: list[httpx.Response] = []
    threads = [threading.Thread(target=lambda: refused.append(chat(served, "hostile", "go"))) for _ in range(3)]
    for thread in threads:
        thread.start()
    answers = [chat(served, model, "abc") for model in ("tiny", "good", "tiny", "good")]
    for thread in threads:
        thread.join()
    assert [answer.status_code for answer in answers] == [200] * 4
    assert [answer.json()["usage"]["prompt_tokens"] for answer in answers[1::2]] == [5, 5]
    for answer in refused:
        error = answer.json()["error"]
        assert answer.status_code == 400 and error["param"] == "messages" and "too much time" in error["message"]
    assert len(refused) == 3 and chat(served, "hostile", "abc").status_code == 200
    long = chat(served, "good", "a" * 50_000)
    assert long.status_code == 400 and long.json()["error"]["code"] == "context_length_exceeded"
    served.wait_idle()


def test_a_stopped_server_leaves_no_process(
    make_engine: Callable[..., Any], serve: Callable[..., Any], adapter_folders: dict[str, Path]
) -> None:
    engine = make_engine()
    engine.adapters.add("own", adapter_folders["own"])
    with serve(engine) as server:
        assert chat(server, "own", "abc").status_code == 200
        process = server.service._templates._process
    assert process.returncode is not None


async def test_a_failure_tells_the_log_its_kind_and_the_sender_its_reason(templates: Templates) -> None:
    with pytest.raises(TemplateError) as caught:
        await templates.render("{{ messages[0].content + 1 // 0 }}", USER, (), max_chars=100)
    assert (caught.value.kind, str(caught.value)) == ("ZeroDivisionError", "ZeroDivisionError")
    assert "division" in caught.value.reason
