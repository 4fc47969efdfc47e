"""What scheduler and runner say to each other: plain frozen data, so that a plan can be asserted in a test.

The scheduler answers `schedule() -> StepPlan`; the runner turns it into tensors and answers `StepResult`. What there is
of every request in every step is a named tuple, which is made in a third of a frozen dataclass's time.
Prefill and decode are one thing: a chunk of tokens whose keys and values are still to be computed.

A step may be planned before the tokens that the step before it draws are known: see `UNKNOWN`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from peftkit_serve.request import SamplingParams, TokenLogprobs

UNKNOWN = -1
"""Stands in a chunk for the token that its request draws in the step before, which is on the device only."""


class Constraint(Protocol):
    """What a request's answer is held to: which tokens may come next. It has state, and belongs to one request."""

    def allowed(self) -> bytes:
        """One bit a token of the vocabulary, the lowest first; 1 for a token that may come next."""
        ...

    def accept(self, token_id: int) -> None:
        """Goes on past an allowed token. Raises RunError when the answer can't be held to it any more."""
        ...

    @property
    def complete(self) -> bool:
        """Whether nothing may come any more."""
        ...


class Sample(NamedTuple):
    """Draw one token after a chunk's last position."""

    params: SamplingParams
    seed: int
    """The request's seed, resolved; with `step` it fixes the random draw."""
    step: int
    """How many tokens the request has generated before this one."""
    history: Sequence[int] = ()
    """Prompt and generated tokens, where penalties need them; the last `step` of them were generated. The last one is
    missing where the chunk's is `UNKNOWN`."""
    constraint: Constraint | None = None


class Chunk(NamedTuple):
    """One request's share of a step."""

    request_id: str
    token_ids: tuple[int, ...]
    """New tokens: their keys and values are computed and written in this step. `UNKNOWN` may be the last one."""
    start: int
    """Position of the first one: virtual tokens + text tokens before it. Everything before is already in the pages."""
    block_table: tuple[int, ...]
    """Pages of the request in order of position; they cover `start + len(token_ids)` positions."""
    slot: int
    """Adapter slot whose weights apply to these rows; -1 is the bare base (virtual tokens alone have no slot)."""
    num_virtual: int
    """Virtual tokens at the head of the block table; they stay visible under a sliding window."""
    sample: Sample | None
    """None while a prompt is not yet wholly computed."""
    targets: tuple[int, ...] = ()
    """The prompt's own next tokens after the chunk's first positions, whose log-probabilities are asked for."""
    num_top_targets: int = 0
    """Likeliest tokens to report beside each of them."""
    arrival: int = -1
    """The request's number in order of arrival: tells it from a later one of the same id."""


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One engine step."""

    chunks: tuple[Chunk, ...]
    copies: tuple[tuple[int, int], ...] = ()
    """(source page, destination page): copied whole before the step runs (copy-on-write of a shared partial page)."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step drew, by request id: a token for each chunk that had `sample`."""

    tokens: dict[str, int]
    """-1 where nothing can be drawn because the logits are not finite."""
    logprobs: dict[str, TokenLogprobs] = field(default_factory=dict[str, TokenLogprobs])
    """Of drawn tokens, where a chunk's parameters ask for them."""
    prompt_logprobs: dict[str, tuple[TokenLogprobs, ...]] = field(default_factory=dict[str, tuple[TokenLogprobs, ...]])
    """One for each of a chunk's `targets`."""
