"""Small calls of serving kernels, to be run under compute-sanitizer: `python benchmarks/sanitize.py [NAME]`."""

import sys

import torch

from peftkit_bench.kernels import all_cases, dense, grouped
from peftkit_bench.kernels import case as cases

CASES = (
    "grouped_lora model=1.5B linear=qkv rows=64",
    "grouped_lora model=1.5B linear=qkv rows=1 ",
    "grouped_lora model=1.5B linear=qkv rows=2048",
    "grouped_bottleneck hidden=1536 width=64",
    "decode model=8B requests=8",
    "prefill model=1.5B",
    "prefill model=8B requests=4 new=512",
    "nf4_linear rows=1 out=4096 in=4096",
    "nf4_linear rows=16 out=4096 in=4096",
    "nf4_linear rows=64 out=4096 in=4096",
    "nf4_dequantize out=4096",
    "model=1.5B rows=64",
    "copy_pages",
    "sample rows=1 ",
)
"""Parts of names, of small cases: the tool runs some hundred times slower. `linear`, `nf4_wide`, GELU's gate,
`deterministic=True` and a LoRA beside its product aren't among them."""


def main() -> None:
    cases.ROTATED_BYTES = grouped.ROTATED_BYTES = 1 << 20
    dense._VOCABULARY = 32_000
    wanted = sys.argv[1] if len(sys.argv) > 1 else ""
    for case in all_cases():
        if wanted in case.name and any(part in case.name for part in CASES):
            case.prepare().ours[0]()
            torch.cuda.synchronize()
            print("ran", case.name, flush=True)


if __name__ == "__main__":
    main()
