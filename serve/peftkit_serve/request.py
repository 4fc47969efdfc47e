"""What a request is: the sampling parameters a client sends, the request, and what comes back of it."""

import uuid
from dataclasses import dataclass, field
from typing import Literal

from peftkit.errors import InputError

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are drawn. The names and defaults are the OpenAI completions API's, `top_k` and `min_p` are vLLM's."""

    max_tokens: int = 16
    """Most tokens to generate; at least 1."""
    temperature: float = 1.0
    """0 takes the most likely token."""
    top_p: float = 1.0
    """Keep the smallest set of most likely tokens whose probabilities sum to this."""
    top_k: int = 0
    """Keep this many most likely tokens; 0 keeps all."""
    min_p: float = 0.0
    """Drop tokens less likely than this share of the most likely one's probability."""
    seed: int | None = None
    """Fixes the draws of this request whatever else is in the batch; None draws a fresh seed."""
    stop: tuple[str, ...] = ()
    """Generation ends before the first of these strings; they are not part of the text."""
    ignore_eos: bool = False
    """Go on past the end-of-sequence token."""

    def __post_init__(self) -> None:
        checks = [
            ("max_tokens", self.max_tokens >= 1, "at least 1"),
            ("temperature", 0.0 <= self.temperature <= 2.0, "from 0 to 2"),
            ("top_p", 0.0 < self.top_p <= 1.0, "above 0 and at most 1"),
            ("top_k", 0 <= self.top_k < 2**31, "from 0 to 2147483647"),
            ("min_p", 0.0 <= self.min_p <= 1.0, "from 0 to 1"),
            ("stop", len(self.stop) <= 16 and all(self.stop), "at most 16 strings, none empty"),
        ]
        for name, good, wanted in checks:
            if not good:
                raise InputError(f"{name} is {getattr(self, name)!r}: it must be {wanted}", field=name)


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt for one adapter (None: the bare base)."""

    prompt: str | list[int]
    """Text, or token ids used as they are."""
    adapter: str | None = None
    """A registered adapter's name."""
    sampling: SamplingParams = SamplingParams()
    request_id: str = field(default_factory=lambda: uuid.uuid4().hex)


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """What a request has produced so far. `finish_reason` is None until the last output of a request."""

    request_id: str
    text: str
    """All text so far, without a stop string."""
    delta: str
    """Text that is new since the output before; never ends inside a character or a possible stop string."""
    token_ids: tuple[int, ...]
    num_prompt_tokens: int
    finish_reason: FinishReason | None = None
    error: str | None = None
    """Why, when `finish_reason` is "error"."""
