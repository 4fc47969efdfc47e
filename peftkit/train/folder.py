"""The folder of a run.

OUT/adapter_config.json, adapter_model.safetensors, peftkit.json; of two methods OUT/KIND/ for each, and peftkit.json
                      the adapter, once the run is done: the best by evaluation, or the last without data.valid
OUT/best/, OUT/last/  with data.valid: both, apart, as adapter folders of their own
OUT/report.html       the run in one page
OUT/run.json          resolved recipe, data, versions, and the figures of a finished run
OUT/metrics.jsonl     one line a log or evaluation
OUT/tensorboard/      the same as curves
OUT/state/step-N/     the last two checkpoints
"""

import fcntl
import hashlib
import json
import logging
import os
import platform
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir
from typing import Any

import torch
from accelerate import Accelerator

from peftkit.artifact.reader import CONFIG_FILE, RECORD_FILE, TENSOR_FILE
from peftkit.errors import InputError, RunError
from peftkit.methods import KINDS

logger = logging.getLogger(__name__)

RUN, METRICS, REPORT, TENSORBOARD = "run.json", "metrics.jsonl", "report.html", "tensorboard"
STATE, BEST, LAST = "state", "best", "last"
_PROBE = 2**20
"""Bytes that are written to see whether there is room at all."""
_OWN = (CONFIG_FILE, TENSOR_FILE, RECORD_FILE, RUN, METRICS, REPORT, TENSORBOARD, STATE, BEST, LAST)


def check(out: Path, *, resume: bool, overwrite: bool) -> None:
    """Raises InputError when `out` holds a run or an adapter already and neither flag says what to do with it."""
    if resume and overwrite:
        raise InputError("--resume goes on with a run and --overwrite removes it: give one of the two")
    if out.exists() and not out.is_dir():
        raise InputError(f"out: {out} is a file, not a folder", field="out")
    if _held(out) and not (resume or overwrite):
        raise InputError(
            f"out: {out} already holds a run or an adapter: --resume goes on with it, --overwrite replaces it, "
            "out=FOLDER puts this one elsewhere",
            field="out",
        )


def check_writable(out: Path, *, field: str = "out") -> None:
    """Tries to write where `out` is, or will be. Raises InputError for a file in its way, RunError for no permission or
    no room. `field` is what a user knows it by."""
    remedy = f"put it elsewhere with {field}=FOLDER" if field == "out" else "name another folder"
    try:
        if broken := next((path for path in (out, *out.absolute().parents) if _is_broken_link(path)), None):
            raise InputError(
                f"{field}: {broken} is a link to {broken.readlink()}, which isn't there: {remedy}", field=field
            )
        above = _nearest_above(out)
        if not above.is_dir():
            raise InputError(f"{field}: {out} can't be a folder, for {above} is a file: {remedy}", field=field)
        with TemporaryDirectory(prefix=".", suffix=".tmp", dir=above) as folder:
            (Path(folder) / "probe").write_bytes(bytes(_PROBE))
    except OSError as error:
        raise RunError(f"{field}: can't write {out}: {error.strerror or error}: {remedy}") from error


def check_room(out: Path, num_bytes: int, *, overwrite: bool) -> None:
    """Raises RunError where the disk has too little room for what a run will write into `out`."""
    free = shutil.disk_usage(_nearest_above(out)).free
    if overwrite:
        free += sum(file.stat().st_size for path in _held(out) for file in (path, *path.rglob("*")) if file.is_file())
    if num_bytes > free:
        raise RunError(
            f"out: the run's checkpoints and adapters take {num_bytes / 1e9:.2f} GB and {out} has room for "
            f"{free / 1e9:.2f} GB: make room, or put it elsewhere with out=FOLDER"
        )


def _is_broken_link(path: Path) -> bool:
    return path.is_symlink() and not path.exists()


def _nearest_above(path: Path) -> Path:
    """The path itself, or the nearest folder above it that is there."""
    return next(above for above in (path, *path.absolute().parents) if above.exists())


@contextmanager
def alone(out: Path) -> Iterator[None]:
    """Holds `out` against other runs of this user; the system lets go of it when the process ends, however it does.

    Raises InputError where another run holds it.
    """
    locks = Path(gettempdir()) / f"peftkit-locks-{os.getuid()}"  # `out` isn't made before a run is known to be right
    path = locks / hashlib.sha256(os.fsencode(out.resolve())).hexdigest()
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("a+", encoding="utf-8")
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise InputError(
                f"out: {out} is being trained into by process {file.read() or 'unknown'}: wait for it, or put this run "
                "elsewhere with out=FOLDER",
                field="out",
            ) from None
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield


def claim(out: Path, *, overwrite: bool) -> None:
    """Makes `out` and, with `overwrite`, removes the run that it holds, and nothing else. Raises RunError."""
    with disk_errors(out):
        for path in _held(out) if overwrite else []:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        out.mkdir(parents=True, exist_ok=True)
        for path in (*out.glob(".*.tmp"), *(out / STATE).glob(".*.tmp")):
            # what a run that was killed while writing left behind
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def _held(out: Path) -> list[Path]:
    parts = [kind for kind in KINDS if (out / kind / CONFIG_FILE).exists()]
    return [out / name for name in (*_OWN, *parts) if (out / name).exists()]


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turns a failure to write under `path` into a RunError."""
    try:
        yield
    except OSError as error:
        raise RunError(f"can't write {path}: {error.strerror or error}") from error


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Writes JSON so that `path` holds the old or the new content, whole, at any moment. Raises RunError."""
    with disk_errors(path):
        _replace(path, json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def _replace(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def without_own(record: Mapping[str, Any]) -> dict[str, Any]:
    """An adapter's record without the fields that its writer fills in."""
    return {key: value for key, value in record.items() if key not in ("uid", "format", "parts")}


def versions() -> dict[str, str]:
    """Versions of what a run's bits depend on."""
    packages = ("peftkit", "torch", "transformers", "accelerate", "bitsandbytes", "tokenizers", "safetensors")
    return {"python": platform.python_version(), **{name: version(name) for name in packages}}


def machine(accelerator: Accelerator) -> dict[str, str | int]:
    """What a run is computed on."""
    device = accelerator.device
    return {
        "platform": platform.platform(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else str(device),
        "threads": torch.get_num_threads(),
        "processes": accelerator.num_processes,
    }


class MetricsLog:
    """Writes metrics.jsonl and, where they are asked for, the curves of TensorBoard and of Weights & Biases."""

    def __init__(
        self, out: Path | None, *, tensorboard: bool, wandb: bool = False, step: int = 0, evaluated: int = 0
    ) -> None:
        """Goes on after a step and an evaluation: later lines, which a resumed run will write again, are dropped.
        Without `out` nothing is written: one of several processes does."""
        self._file, self._curves, self._wandb = None, None, None
        if out is None:
            return
        self._path = out / METRICS
        with disk_errors(self._path):
            _replace(self._path, "".join(self._lines_upto({"train": step, "eval": evaluated})))
            self._file = self._path.open("a", encoding="utf-8")
        self._curves = _summary_writer(out / TENSORBOARD, step) if tensorboard else None
        self._wandb = _wandb_run(out) if wandb else None

    def write(self, event: str, step: int, **figures: float | int | None) -> None:
        """One line: the event ("train" or "eval"), the step and its figures."""
        if self._file is None:
            return
        with disk_errors(self._path):
            self._file.write(json.dumps({"event": event, "step": step, **figures}) + "\n")
            self._file.flush()
        if self._curves is not None:
            for name, value in figures.items():
                if value is not None:
                    self._curves.add_scalar(f"{event}/{name}", value, step)
        if self._wandb is not None:
            shown = {f"{event}/{name}": value for name, value in figures.items() if value is not None}
            self._wandb.log(shown, step=step)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
        if self._curves is not None:
            self._curves.close()
        if self._wandb is not None:
            self._wandb.finish()

    def __enter__(self) -> "MetricsLog":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _lines_upto(self, last: Mapping[str, int]) -> list[str]:
        if not last["train"] or not self._path.exists():
            return []
        kept: list[str] = []
        for line in self._path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True):
            if not line.endswith("\n"):  # the run was killed while writing it
                break
            try:
                content = json.loads(line)
                is_kept = content["step"] <= last[content["event"]]
            except (ValueError, KeyError, TypeError):
                logger.warning("%s: a line is damaged and left out: %.60s", self._path, line.strip())
                continue
            if is_kept:
                kept.append(line)
        return kept


def check_wandb() -> None:
    """Raises InputError where Weights & Biases is asked for and its package isn't installed."""
    if find_spec("wandb") is None:
        raise InputError(
            "log.wandb: the wandb package is not installed: pip install wandb, or set it to false", field="log.wandb"
        )


def _wandb_run(out: Path) -> Any:
    """A run of Weights & Biases with the name of the run's folder; a resumed run goes on with the same."""
    import wandb  # type: ignore[import-not-found]

    recipe = json.loads((out / RUN).read_bytes()).get("recipe")
    identity = hashlib.sha256(str(out.resolve()).encode()).hexdigest()[:16]
    return wandb.init(project="peftkit", name=out.name, id=identity, resume="allow", config=recipe, dir=str(out))


def _summary_writer(folder: Path, step: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        logger.info("log.tensorboard: the tensorboard package is not installed: curves are in %s only", METRICS)
        return None
    return SummaryWriter(str(folder), purge_step=step + 1 if step else None)
