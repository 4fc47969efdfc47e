"""Launching a kernel again without Triton's own look-up, which takes longer than most of training's kernels do.

Triton binds, classifies and hashes all arguments at each launch to find what it has compiled. Here that is found by the
few things that it depends on, and launched as Triton's documentation launches a kernel that was compiled before:
`compiled[grid](*arguments)`.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from triton.compiler import CompiledKernel

_MOST_KEPT = 1024
_INT32 = 2**31


class Again:
    """A kernel whose arguments are tensors, numbers that it isn't compiled for, numbers that it is, and constants."""

    def __init__(self, kernel: Any, **options: Any) -> None:
        self._kernel, self._options = kernel, options
        self._kept: dict[object, CompiledKernel] = {}

    def __call__(
        self,
        programs: int,
        tensors: Sequence[Tensor],
        free: Sequence[float],
        strides: Sequence[int],
        constants: tuple[object, ...],
        num_warps: int,
    ) -> None:
        """Launches so many programs, with arguments in the order of the kernel's."""
        dtypes = tuple([tensor.dtype for tensor in tensors])
        key = (tensors[0].get_device(), num_warps, constants, tuple(strides), dtypes)
        arguments = (*tensors, *free, *strides, *constants)
        compiled = self._kept.get(key)
        # what is compiled takes pointers for multiples of 16 bytes, and numbers for those of 32 bits
        plain = not any([tensor.data_ptr() & 15 for tensor in tensors]) and max((*free, *strides), default=0) < _INT32
        if compiled is not None and plain:
            compiled[programs, 1, 1](*arguments)
            return
        made = self._kernel[(programs,)](*arguments, num_warps=num_warps, **self._options)
        if plain and isinstance(made, CompiledKernel):  # neither one that is being compiled nor the interpreter's
            if len(self._kept) >= _MOST_KEPT:
                self._kept.clear()
            self._kept[key] = made
