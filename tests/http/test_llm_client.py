"""The `llm` command as a client, by its OpenAI-compatible models."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from peftkit_serve.tenants.records import Limits


@pytest.mark.parametrize("options", [[], ["--no-stream"]])
def test_the_llm_command_asks_an_adapter(server: Any, tmp_path: Path, options: list[str]) -> None:
    models = f'- model_id: mine\n  model_name: red\n  api_base: "{server.url}/v1"\n\n'
    (tmp_path / "extra-openai-models.yaml").write_text(models)
    # no plugins: that of the embedded base's package wants llama.cpp
    own = {"LLM_USER_PATH": str(tmp_path), "LLM_LOAD_PLUGINS": "", "OPENAI_API_KEY": "unused"}
    environment = {**os.environ, **own}
    command = [str(Path(sys.executable).with_name("llm")), "prompt", "-m", "mine", "--no-log", *options]
    limits = ["-o", "max_tokens", "12", "-o", "temperature", "0", "-o", "seed", "1", "-o", "logit_bias", '{"113": 100}']
    done = subprocess.run([*command, *limits, "Hello"], capture_output=True, text=True, env=environment, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "q" * 12


def test_the_llm_command_sends_the_tenants_key_that_it_keeps(
    make_engine: Callable[..., Any], serve: Callable[..., Any], tmp_path: Path
) -> None:
    def run(*options: str, given: str = "") -> subprocess.CompletedProcess[str]:
        own = {"LLM_USER_PATH": str(tmp_path), "LLM_LOAD_PLUGINS": "", "OPENAI_API_KEY": "unused"}
        command, environment = [str(Path(sys.executable).with_name("llm")), *options], {**os.environ, **own}
        return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60, input=given)

    with serve(make_engine(), store=tmp_path / "store") as server:
        key = server.database.add_tenant("acme", Limits(), ["*"]).text
        path = Path(run("logs", "path").stdout.strip()).with_name("extra-openai-models.yaml")
        entry = f"- model_id: mine\n  model_name: tiny\n  api_base: {server.url}/v1\n"
        path.write_text(entry + "  api_key_name: peftkit\n")
        assert run("keys", "set", "peftkit", given=f"{key}\n").returncode == 0
        ask = ("-m", "mine", "--no-log", "-o", "max_tokens", "3", "-o", "logit_bias", '{"113": 100}', "Hello")
        done = run(*ask)
        assert done.stdout.strip() == "qqq", done.stderr
        assert run("keys", "set", "peftkit", given="sk-wrong\n").returncode == 0
        assert run(*ask).returncode != 0
