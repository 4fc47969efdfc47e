"""The house keeps its shape: arrows run downward, and rooms that hold a package are none themselves."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_imports_run_downward() -> None:
    lint = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run([lint, "--no-cache"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_rooms_are_no_packages() -> None:
    # transformers takes a top-level package called kernels for the one on PyPI
    for room in ("kernels", "serve", "recipes", "adapters", "benchmarks"):
        assert not (ROOT / room / "__init__.py").exists()
    assert not (ROOT / "tests" / "kernels").exists()
    assert not list((ROOT / "tests").rglob("__init__.py"))


def test_importing_the_packages_loads_neither_torch_nor_triton() -> None:
    code = (
        "import sys, peftkit, peftkit_serve, peftkit.cli.main; "
        "assert not {'torch', 'triton', 'transformers'} & set(sys.modules), sorted(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_importing_the_kernels_does_not_import_triton() -> None:
    code = "import sys, peftkit_kernels; assert 'triton' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
