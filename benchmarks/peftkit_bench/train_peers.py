"""The peers' program of the training benchmark, run beside ours: HF PEFT, the same with Liger, Unsloth."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from peftkit_bench.train import Case

PEERS = "unsloth,liger,hf"
_LEAST_S = 60.0


def peer_lines(program: Path, cases: Sequence[Case], *, limit_s: float) -> Iterator[dict[str, Any]]:
    """The program's lines as they come, for the shapes and batches of `cases` over NF4 with LoRA, in `limit_s`.

    It writes weights of its own into its folder under /tmp and runs each peer in a process of its own.
    """
    end = time.monotonic() + limit_s
    wanted: dict[str, dict[str, None]] = {}
    for case in cases:
        if case.quant == "nf4" and case.method == "lora":
            wanted.setdefault(case.shape, {})[f"{case.rows}x{case.length}"] = None
    for shape, batches in wanted.items():
        left = end - time.monotonic()
        if left < _LEAST_S:
            yield {"shape": shape, "case": "skipped", "reason": f"{left:.0f} s left"}
            continue
        argv = [sys.executable, str(program), "--shapes", shape, "--peers", PEERS, "--batches", ",".join(batches)]
        argv += ["--budget", f"{left:.0f}", "--each", f"{left / 2:.0f}"]
        yield from _run(argv, left)


def _run(argv: Sequence[str], limit_s: float) -> Iterator[dict[str, Any]]:
    child = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert child.stdout is not None
    try:
        with child.stdout:
            yield from (json.loads(text) for text in child.stdout if text.startswith("{"))
        child.wait(timeout=limit_s)
    finally:
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)  # the peer it runs too, which holds the device
            child.wait()
