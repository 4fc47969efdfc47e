"""The `llm` command as a client, by its OpenAI-compatible models."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest


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
