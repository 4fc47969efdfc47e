"""Whole numbers on the host: Triton's own functions for them take microseconds, as they look for constants."""


def cdiv(count: int, size: int) -> int:
    """How many of a size hold so many."""
    return -(-count // size)


def next_power_of_2(number: int) -> int:
    """The smallest power of two that isn't smaller; of 1 and below 1."""
    return 1 << max(number - 1, 0).bit_length()
