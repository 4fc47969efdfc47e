"""What a request is: the sampling parameters a client sends, the request, and what comes back of it."""

import reprlib
import uuid
from dataclasses import dataclass, field
from typing import Literal

from peftkit.errors import InputError

FinishReason = Literal["stop", "length", "abort", "error"]

MAX_LOGPROBS = 20
"""Most alternatives whose log-probabilities a request may ask for, a token."""


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
    presence_penalty: float = 0.0
    """Taken off the logit of each token that was generated before."""
    frequency_penalty: float = 0.0
    """Taken off a token's logit for each time that it was generated before."""
    repetition_penalty: float = 1.0
    """Divides the positive, multiplies the negative logit of each token of the prompt and of those generated."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token id, what is added to its logit), before the penalties."""
    logprobs: int | None = None
    """Report each generated token's log-probability, and those of this many likeliest ones, before all of the above."""
    prompt_logprobs: int | None = None
    """The same for the prompt's tokens, the first of which has none."""
    json_schema: str | None = None
    """Generate nothing but JSON that is valid by this schema, which is JSON itself."""

    def __post_init__(self) -> None:
        checks = [
            ("max_tokens", self.max_tokens >= 1, "at least 1"),
            ("temperature", 0.0 <= self.temperature <= 2.0, "from 0 to 2"),
            ("top_p", 0.0 < self.top_p <= 1.0, "above 0 and at most 1"),
            ("top_k", 0 <= self.top_k < 2**31, "from 0 to 2147483647"),
            ("min_p", 0.0 <= self.min_p <= 1.0, "from 0 to 1"),
            ("stop", len(self.stop) <= 16 and all(self.stop), "at most 16 strings, none empty"),
            ("presence_penalty", -2.0 <= self.presence_penalty <= 2.0, "from -2 to 2"),
            ("frequency_penalty", -2.0 <= self.frequency_penalty <= 2.0, "from -2 to 2"),
            ("repetition_penalty", 0.0 < self.repetition_penalty <= 10.0, "above 0 and at most 10"),
            ("logit_bias", all(abs(bias) <= 100.0 for _, bias in self.logit_bias), "from -100 to 100 for each token"),
            ("logprobs", 0 <= (self.logprobs or 0) <= MAX_LOGPROBS, f"from 0 to {MAX_LOGPROBS}"),
            ("prompt_logprobs", 0 <= (self.prompt_logprobs or 0) <= MAX_LOGPROBS, f"from 0 to {MAX_LOGPROBS}"),
        ]
        for name, good, wanted in checks:
            if not good:
                shown = reprlib.repr(getattr(self, name))
                raise InputError(f"{name} is {shown}: it must be {wanted}", field=name)

    @property
    def has_penalties(self) -> bool:
        """Whether a draw depends on the tokens before it otherwise than through the model."""
        return bool(self.presence_penalty or self.frequency_penalty) or self.repetition_penalty != 1.0


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt for one adapter (None: the bare base)."""

    prompt: str | list[int]
    """Text, or token ids used as they are."""
    adapter: str | None = None
    """A registered adapter's name."""
    sampling: SamplingParams = SamplingParams()
    request_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    tenant: str = ""
    """Whose request it is: the scheduler shares the engine fairly between tenants."""
    weight: float = 1.0
    """The tenant's share relative to others'."""
    priority: int = 0
    """Among waiting requests the highest comes first; where tenants share the engine, among one tenant's."""


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """A token's log-probability by the model alone, natural, and those of the likeliest tokens there."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    """(token id, log-probability), the likeliest first."""


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
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One for each of `token_ids`, where they were asked for."""
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """One for each token of the prompt after the first, where they were asked for."""
    started: float | None = None
    """When the first step with this request began, by `time.monotonic`; the first output of an `AsyncEngine` has it."""
