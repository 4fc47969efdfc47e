"""The console: its headers, and what a person sees and does in a real browser."""

import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from peftkit_serve.tenants.records import Limits

CHROMIUM = shutil.which("chromium")


@pytest.mark.parametrize("path", ["console", "docs"])
def test_the_pages_are_open_and_let_a_browser_load_nothing_of_others(server: Any, path: str) -> None:
    page = httpx.get(f"{server.url}/{path}")
    assert page.status_code == 200 and page.headers["content-type"].startswith("text/html")
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy and "frame-ancestors 'none'" in policy
    assert page.headers["x-content-type-options"] == "nosniff"
    assert not re.search(r"<script(?![^>]*\bsrc=)|\son[a-z]+=|\sstyle=|<style|https?://", page.text)
    for file, kind in (
        ("console.css", "text/css"),
        ("console.js", "text/javascript"),
        ("reference.js", "text/javascript"),
    ):
        part = httpx.get(f"{server.url}/console/{file}")
        assert part.status_code == 200 and part.headers["content-type"].startswith(kind)
        assert "https://" not in part.text and "innerHTML" not in part.text
    for path in ("index.html", "..%2Fapp.py", "nothing.js"):
        assert httpx.get(f"{server.url}/console/{path}").status_code == 404


@pytest.fixture
def browser() -> Iterator[Any]:
    """A headless Chromium of the system."""
    playwright = pytest.importorskip("playwright.sync_api", reason="no playwright: make test-service installs it")
    if CHROMIUM is None:
        pytest.skip("no chromium: make test-service installs it")
    with playwright.sync_playwright() as api:
        browser = api.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def served(
    make_engine: Callable[..., Any], serve: Callable[..., Any], adapter_folders: dict[str, Path], tmp_path: Path
) -> Iterator[Any]:
    """A server with adapters, a tenant and an admin key."""
    with serve(make_engine(), store=tmp_path / "store") as server:
        for name in ("red", "blue"):
            folder = adapter_folders[name]
            files = [("files", (path.name, path.read_bytes())) for path in sorted(folder.iterdir())]
            answer = httpx.post(f"{server.url}/v1/adapters", data={"name": name}, files=files, timeout=30)
            assert answer.status_code == 201, answer.text
        server.database.add_tenant("acme", Limits(requests_per_minute=60), ["red"])
        yield server


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_person_sees_adapters_and_tenants_and_compares_answers(served: Any, browser: Any, scheme: str) -> None:
    key = served.database.add_key(None).text
    page = browser.new_page(color_scheme=scheme, viewport={"width": 1200, "height": 1300})
    faults: list[str] = []
    asked: list[str] = []
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.on("console", lambda line: faults.append(line.text) if "Content Security" in line.text else None)
    page.on("request", lambda request: asked.append(request.url))
    page.goto(f"{served.url}/console")
    page.get_by_role("alert").wait_for()
    assert "admin key" in page.get_by_role("alert").inner_text()
    page.get_by_label("Admin key").fill(key)
    page.get_by_label("Admin key").press("Enter")
    page.locator("#adapters td", has_text="red").first.wait_for()
    assert page.locator("#tenants td").first.inner_text() == "acme"
    assert page.locator("#base").inner_text() == "tiny"
    for box in page.locator("#choices input").all():
        box.set_checked(box.get_attribute("value") in ("red", "blue"))
    page.get_by_label("Prompt").fill("Say something")
    page.locator("#max-tokens").fill("24")
    page.keyboard.press("Tab")
    page.get_by_role("button", name="Send to all").focus()
    page.keyboard.press("Enter")
    page.locator(".answers article").nth(1).locator("p", has_text=" s").wait_for()
    page.locator(".answers article").nth(0).locator("p", has_text=" s").wait_for()
    texts = page.locator(".answers pre").all_inner_texts()
    expected = [
        httpx.post(
            f"{served.url}/v1/completions",
            json={"model": name, "prompt": "Say something", "max_tokens": 24, "temperature": 0},
            headers={"authorization": f"Bearer {key}"},
        ).json()["choices"][0]["text"]
        for name in ("blue", "red")
    ]
    assert [text.split() for text in texts] == [text.split() for text in expected] and texts[0] != texts[1]
    page.locator("#throughput polyline").wait_for(state="attached")
    ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert ground == ("rgb(255, 255, 255)" if scheme == "light" else "rgb(20, 23, 26)")
    assert not faults and all(url.startswith(served.url) or url.startswith("data:") for url in asked)
    if folder := os.environ.get("PEFTKIT_SCREENSHOTS"):
        for number in range(8):  # something for the charts to show
            body = {"model": "red", "prompt": "a", "max_tokens": 20 * (number % 3 + 1), "ignore_eos": True}
            httpx.post(f"{served.url}/v1/completions", json=body, headers={"authorization": f"Bearer {key}"})
            page.wait_for_timeout(700)
        page.screenshot(path=f"{folder}/console-{scheme}.png", full_page=True)


def test_everything_is_reached_by_keyboard_and_named(served: Any, browser: Any) -> None:
    page = browser.new_page()
    page.goto(f"{served.url}/console")
    page.get_by_label("Admin key").fill(served.database.add_key(None).text)
    page.get_by_label("Admin key").press("Enter")
    page.locator("#choices input").first.wait_for()
    wanted = page.evaluate("document.querySelectorAll('a, button:not([disabled]), input, textarea').length")
    page.evaluate("document.activeElement.blur()")
    reached: set[str] = set()
    for _ in range(wanted + 5):
        page.keyboard.press("Tab")
        reached.add(
            page.evaluate(
                "(() => { const e = document.activeElement; return e.tagName + (e.id || e.value || e.innerText) })()"
            )
        )
    assert len(reached - {"BODY"}) >= wanted, reached
    unnamed = page.evaluate(
        "[...document.querySelectorAll('input, textarea')].filter(e => !e.labels.length).map(e => e.id)"
    )
    assert unnamed == []


def test_every_route_is_shown_with_its_fields_and_nothing_is_asked_of_others(served: Any, browser: Any) -> None:
    page = browser.new_page()
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.goto(f"{served.url}/docs")
    page.get_by_role("heading", name="POST /v1/chat/completions").wait_for()
    shown = page.inner_text("main")
    description = httpx.get(f"{served.url}/openapi.json").json()
    for route, methods in description["paths"].items():
        for method in methods:
            assert f"{method.upper()} {route}" in shown
    for text in ("max_completion_tokens", "integer or null", "multipart/form-data", "list of file", "ErrorBody"):
        assert text in shown
    assert page.locator("#problem").is_hidden() and "undefined" not in shown and "[object" not in shown
    assert all(url.startswith(served.url) for url in asked)
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
