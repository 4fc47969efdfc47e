"""Launching a kernel again without Triton's own look-up, which takes longer than most of these kernels do.

Triton binds, classifies and hashes all arguments at each launch to find what it has compiled. Here that is found by the
few things that it depends on, and launched as `compiled[grid](*arguments)` does it, but for hooks around launches.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from triton.compiler import CompiledKernel
from triton.runtime import driver

_MOST_KEPT = 1024
_INT32 = 2**31


class Again:
    """A kernel whose arguments are tensors, numbers that it isn't compiled for, numbers that it is, and constants."""

    def __init__(self, kernel: Any, **options: Any) -> None:
        self._kernel, self._options = kernel, options
        self._kept: dict[object, Any] = {}

    def __call__(
        self,
        grid: int | tuple[int, ...],
        tensors: Sequence[Tensor],
        free: Sequence[float],
        strides: Sequence[int],
        constants: tuple[object, ...],
        num_warps: int,
        **options: int,
    ) -> None:
        """Launches so many programs, with arguments in the order of the kernel's.

        options: Triton's own, `launch_pdl` and `num_stages`.
        """
        grid = (grid, 1, 1) if isinstance(grid, int) else (*grid, 1, 1)[:3]
        # pointers that are multiples of 16 bytes and others are compiled apart
        pointers = tuple([(tensor.dtype, tensor.data_ptr() & 15 == 0) for tensor in tensors])
        key = (tensors[0].get_device(), num_warps, *options.values(), constants, tuple(strides), pointers)
        arguments = (*tensors, *free, *strides, *constants)
        compiled = self._kept.get(key)
        plain = max((*free, *strides), default=0) < _INT32  # what is kept takes numbers of 32 bits
        if compiled is not None and plain:
            card: Any = driver.active
            stream = card.get_current_stream(card.get_current_device())
            run = compiled.run  # loads the kernel where it isn't yet
            run(*grid, stream, compiled.function, compiled.packed_metadata, None, None, None, *arguments)
            return
        made = self._kernel[grid](*arguments, num_warps=num_warps, **options, **self._options)
        if plain and isinstance(made, CompiledKernel):  # neither one that is being compiled nor the interpreter's
            if len(self._kept) >= _MOST_KEPT:
                self._kept.clear()
            self._kept[key] = made
