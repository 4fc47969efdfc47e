"""schemathesis over the OpenAPI page: no 500, and no answer that the page doesn't declare."""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"

# the coverage phase takes a minute: it runs in `make test-service`
PHASES = "examples,coverage,fuzzing" if "PEFTKIT_FUZZ_EXAMPLES" in os.environ else "examples,fuzzing"
EXAMPLES = os.environ.get("PEFTKIT_FUZZ_EXAMPLES", "3")


def test_no_generated_request_is_answered_otherwise_than_declared(
    make_engine: Callable[..., Any], serve: Callable[..., Any], adapter_folders: dict[str, Path], tmp_path: Path
) -> None:
    engine = make_engine(num_pages=8)  # a context of 128 tokens: every answer ends soon
    engine.adapters.add("red", adapter_folders["red"])
    with serve(engine, store=tmp_path / "store") as served:
        key = served.database.add_key(None).text
        command = [
            *(Path(sys.executable).with_name("schemathesis"), "run", f"{served.url}/openapi.json", "--checks", CHECKS),
            *("-H", f"Authorization: Bearer {key}", "--max-examples", EXAMPLES, "--phases", PHASES),
            *("--suppress-health-check", "all", "--no-color", "--workers", "1"),
        ]
        done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=300, cwd=tmp_path)
        print(done.stdout)
        assert done.returncode == 0, done.stdout[-6000:]
        assert re.search(r"Tested: +2\d", done.stdout), "some operations were not tested"
        served.wait_idle()
