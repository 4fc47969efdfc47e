"""Compiles what cases need by many processes at once, through Triton's cache on disk, before one process times them."""

import importlib
import inspect
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager, suppress
from importlib.util import find_spec
from multiprocessing import get_context
from typing import Any

import torch

from peftkit_bench.kernels import all_cases
from peftkit_bench.kernels.case import Case, NotInstalled

WORKERS = max(1, min(12, (os.cpu_count() or 2) - 2))

FAULTS: tuple[type[Exception], ...] = (
    RuntimeError, ValueError, TypeError, AttributeError, AssertionError, KeyError, ImportError,
)  # fmt: skip
"""What a kernel that doesn't run raises."""
if find_spec("triton") is not None:  # its errors, too much shared memory among them, are no RuntimeErrors
    FAULTS += (importlib.import_module("triton.errors").TritonError,)


def pool() -> ProcessPoolExecutor:
    """Processes that each have their own context on the card."""
    return ProcessPoolExecutor(WORKERS, mp_context=get_context("spawn"))


def compile_cases(workers: ProcessPoolExecutor, cases: Sequence[Case], *, with_peers: bool) -> None:
    """Runs each case once, its peers too. Faults are left for the run that counts."""
    list(workers.map(_run_once, [case.name for case in cases], [with_peers] * len(cases)))


def compile_candidates(workers: ProcessPoolExecutor, case: Case, picks: Sequence[int]) -> None:
    """Runs a case once with each of its candidates that are picked by number."""
    shares = [picks[i::WORKERS] for i in range(WORKERS)]
    list(workers.map(_run_candidates, [case.name] * WORKERS, shares))


def candidates(case: Case) -> tuple[list[Any], Callable[[Any], AbstractContextManager[None]]]:
    """A tuned case's configurations, and the context manager that takes one."""
    assert case.tuned is not None
    name, kind = case.tuned
    module = importlib.import_module(f"peftkit_kernels.triton.{name}")
    takes_kind = bool(inspect.signature(module.candidates).parameters)
    return list(module.candidates(kind) if takes_kind else module.candidates()), module.override


def _run_once(name: str, with_peers: bool) -> None:
    with suppress(*FAULTS):
        _call_all(_named(name), with_peers)
    torch.cuda.empty_cache()


def _call_all(case: Case, with_peers: bool) -> None:
    work = case.prepare()
    work.ours[0]()
    for make in work.peers.values() if with_peers else ():
        with suppress(NotInstalled, *FAULTS):
            make()[0]()
    torch.cuda.synchronize()


def _run_candidates(name: str, picks: Sequence[int]) -> None:
    with suppress(*FAULTS):
        _call_candidates(_named(name), picks)
    torch.cuda.empty_cache()


def _call_candidates(case: Case, picks: Sequence[int]) -> None:
    configs, override = candidates(case)
    work = case.prepare()
    for pick in picks:
        with suppress(*FAULTS), override(configs[pick]):
            work.ours[0]()
    torch.cuda.synchronize()


def _named(name: str) -> Case:
    return next(case for case in all_cases() if case.name == name)
