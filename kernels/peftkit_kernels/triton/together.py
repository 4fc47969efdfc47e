"""Compiling many kernels at once.

Triton compiles a kernel where it is launched for the first time, and the caller waits for it. Here the first launch
only begins that, on a thread, and does nothing else, so that the caller comes to the next kernel at once:

    caller      launch a  launch b  launch c  … end: waits for all
    threads        a ─────────────────▶
                             b ──────────────────▶
                                       c ───────────▶

What a kernel is compiled for is what the launch itself says, so a later one like it finds the kernel.
"""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from triton import AsyncCompileMode


@contextmanager
def compiled_together(max_threads: int | None = None) -> Iterator[None]:
    """Inside, launches of kernels that aren't compiled yet do nothing; at the end these kernels are compiled.

    What they should have written stays as it was. max_threads: None for one a core; the larger part of a compilation
    runs without Python's lock. Raises what Triton raises of the first kernel that can't be compiled; a later launch of
    one that can't raises the same.
    """
    with ThreadPoolExecutor(max_threads or len(os.sched_getaffinity(0)), "peftkit-compile") as threads, _Mode(threads):
        yield


class _Mode(AsyncCompileMode):
    """Triton's own way to compile elsewhere, but that nobody waits for a kernel at its launch."""

    def __init__(self, threads: Executor) -> None:
        super().__init__(threads)
        self._begun: dict[object, Future[Any]] = {}
        self._places: list[tuple[Future[Any], Callable[[Any], object]]] = []

    def submit(
        self, key: Any, compile_fn: Callable[[], Any], finalize_fn: Callable[[Any], Any], cleanup_fn: object = None
    ) -> "LeftOut":
        """Called by a launch that finds no kernel; `finalize_fn` says what the launches like it find from now on."""
        if key not in self._begun:
            self._begun[key] = self.executor.submit(compile_fn)
        self._places.append((self._begun[key], finalize_fn))
        left_out = LeftOut()
        finalize_fn(left_out)
        return left_out

    def __exit__(self, exc_type: Any, exc_value: Any, traceback: Any) -> None:
        super().__exit__(exc_type, exc_value, traceback)
        for future, place in self._places:
            error = future.exception()
            place(future.result() if error is None else _Failed(error))
        failed = next((error for future, _ in self._places if (error := future.exception())), None)
        if failed is not None and exc_type is None:
            raise failed


class LeftOut:
    """In the place of a kernel that is being compiled."""

    function = packed_metadata = None

    def launch_metadata(self, *_: object) -> None: ...

    def run(self, *_: object) -> None: ...


class _Failed:
    """In the place of a kernel that could not be compiled."""

    def __init__(self, error: BaseException) -> None:
        self._error = error

    def launch_metadata(self, *_: object) -> None:
        raise self._error
