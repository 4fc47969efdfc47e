"""What one row of the kernels' benchmark is: sizes, the work on them, its floor and its goal."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from peftkit_bench.timing import Call

ROTATED_BYTES = 256 << 20
"""Inputs that are rotated, together: several times the L2 of any card."""

BANDWIDTH, BF16_RATE = 4.64e12, 700e12
"""Bytes/s and floating-point operations/s that floors are counted with: an H200's."""


class NotInstalled(Exception):
    """A peer that isn't there; its message is the package that is missing."""


@dataclass(frozen=True)
class Floor:
    """The least a case must move and compute: each input read once, each output written once."""

    num_bytes: float
    flops: float = 0.0

    @property
    def us(self) -> float:
        return max(self.num_bytes / BANDWIDTH, self.flops / BF16_RATE) * 1e6


@dataclass(frozen=True)
class Goal:
    """What the time must reach."""

    text: str
    limit_us: float | None = None
    beats: tuple[str, ...] = ()
    """Peers that must be slower."""
    share_of: tuple[str, float] | None = None
    """A peer and the share of its rate that must be reached."""

    def met(self, us: float, peers: Mapping[str, float]) -> bool | None:
        """Whether it is reached; None where a peer it speaks of wasn't measured."""
        named = {*self.beats, *((self.share_of[0],) if self.share_of else ())}
        limits = [peers[name] for name in self.beats if name in peers]
        if self.share_of and self.share_of[0] in peers:
            limits.append(peers[self.share_of[0]] / self.share_of[1])
        if self.limit_us is not None:
            limits.append(self.limit_us)
        if any(us > limit for limit in limits):
            return False
        return True if named <= peers.keys() else None


def share_of_floor(floor: Floor, share: float, *beats: str) -> Goal:
    """At least this share of the floor's rate, and ahead of some peers."""
    ahead = f", ahead of {' and '.join(beats)}" if beats else ""
    return Goal(f"{share:.0%} of the floor{ahead}", floor.us / share, beats)


@dataclass(frozen=True)
class Work:
    """A case in a card's memory: the same calls on different memory, ours and each peer's, made when asked for."""

    ours: Sequence[Call]
    peers: Mapping[str, Callable[[], Sequence[Call]]] = field(default_factory=dict)


@dataclass(frozen=True)
class Case:
    """One row."""

    kernel: str
    sizes: Mapping[str, Any]
    floor: Floor
    goal: Goal | None
    prepare: Callable[[], Work]
    tuned: tuple[str, str | None] | None = None
    """Module of `peftkit_kernels.triton` whose candidates fit, and their kind."""
    quick: bool = False
    """Whether `--quick` runs it."""

    @property
    def name(self) -> str:
        return " ".join([self.kernel, *(f"{key}={value}" for key, value in self.sizes.items())])


def num_sets(num_bytes: float, most: int = 512) -> int:
    """How many input sets make up ROTATED_BYTES; at least two."""
    return max(2, min(most, -(-ROTATED_BYTES // max(1, int(num_bytes)))))
