"""`peftkit bench kernels`: each operation on the shapes of Llama-3.1-8B and Qwen2.5-1.5B, with floors and peers."""

from peftkit_bench.kernels.case import Case


def all_cases() -> list[Case]:
    """Every row, in the order in which they are shown."""
    from peftkit_bench.kernels import attention, dense, grouped, linear, nf4, training

    return [*grouped.cases(), *attention.cases(), *linear.cases(), *nf4.cases(), *dense.cases(), *training.cases()]
