"""Ctrl-C while training: finish the step, leave a checkpoint, stop."""

import os
import signal
import sys
import threading
from types import FrameType
from typing import Any

from peftkit.errors import RunError


class Interrupted(RunError):
    """A run that was stopped by the user and left a checkpoint that `--resume` accepts."""

    exit_code = 130


class StopOnInterrupt:
    """While entered, the first SIGINT sets `requested` and the second interrupts at once, as without it."""

    def __init__(self) -> None:
        self.requested = False
        self._previous: Any = None

    def __enter__(self) -> "StopOnInterrupt":
        if threading.current_thread() is threading.main_thread():  # Python hands signals to no other
            self._previous = signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        if self._previous is not None:
            signal.signal(signal.SIGINT, self._previous)

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
        # a handler may run in the middle of a write to sys.stderr, which must not be entered twice
        os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, b"\nstopping after this step; again: at once\n")
