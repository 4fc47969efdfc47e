"""Who may come in now: rates, concurrency and bounded queues of each tenant, in pure Python.

A refusal says when to come again, from what was measured: how fast a bucket fills, or how often a place has become
free lately. Counts are of this process and start anew with it.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Self

from peftkit.errors import InputError
from peftkit_serve.tenants.records import Limits

MAX_RETRY_S = 60


class Refusal(Exception):
    """A request that must come later."""

    def __init__(self, message: str, code: str, wait_s: float) -> None:
        super().__init__(message)
        self.code = code
        self.retry_after_s = min(max(1, math.ceil(wait_s)), MAX_RETRY_S)
        """Seconds, whole."""


@dataclass(slots=True)
class _Bucket:
    """Fills with a rate a minute up to a minute's worth; may go into debt, which is paid before anything else."""

    level: float | None = None
    """None before a limit is first asked for: full."""
    time: float = 0.0

    def wait_for(self, amount: float, per_minute: int, now: float) -> float:
        """Seconds until `amount` can be taken; 0 for now. More than a minute's worth waits for a full bucket."""
        full = float(per_minute)
        level = full if self.level is None else min(full, self.level + (now - self.time) * per_minute / 60)
        self.level, self.time = level, now
        missing = min(amount, per_minute) - level
        return missing * 60 / per_minute if missing > 1e-9 else 0.0

    def take(self, amount: float) -> None:
        """Takes what was asked for, or more; less than nothing is given back."""
        if self.level is not None:
            self.level -= amount


@dataclass(slots=True)
class _Pace:
    """How often something has happened lately: a mean of the gaps in which later ones count more."""

    gap_s: float = 1.0
    last: float | None = None

    def tick(self, now: float) -> None:
        if self.last is not None:
            self.gap_s += 0.2 * (now - self.last - self.gap_s)
        self.last = now


@dataclass(slots=True)
class _Account:
    """What one tenant has taken."""

    requests: _Bucket = field(default_factory=_Bucket)
    tokens: _Bucket = field(default_factory=_Bucket)
    num_live: int = 0
    num_waiting: int = 0
    starts: _Pace = field(default_factory=_Pace)
    ends: _Pace = field(default_factory=_Pace)


class Visit:
    """A request that is in: it tells of its tokens, and leaves once whatever ends it.

    One that an error ends before its first token has asked for nothing: what it took of the rates is given back."""

    def __init__(self, admission: "Admission", account: _Account, answers: int, prompt_tokens: int) -> None:
        self._admission, self._account = admission, account
        self._num_answers = self._num_waiting = answers
        self._prompt_tokens = prompt_tokens

    def started(self) -> None:
        """One of its answers has its first token."""
        self._num_waiting -= 1
        self._admission.leave_queue(self._account, 1)
        self._account.starts.tick(self._admission.clock())

    def generated(self, num_tokens: int) -> None:
        """Tokens that its answers have grown by."""
        self._account.tokens.take(num_tokens)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # not an Exception: the client has gone away
        if kind is not None and issubclass(kind, Exception) and self._num_waiting == self._num_answers:
            self._account.requests.take(-1)
            self._account.tokens.take(-self._prompt_tokens)
        self._admission.leave_queue(self._account, self._num_waiting)
        self._account.num_live -= self._num_answers
        self._account.ends.tick(self._admission.clock())


class Admission:
    """All tenants' accounts. Used on one thread."""

    def __init__(self, *, max_waiting: int = 1024, clock: Callable[[], float] = time.monotonic) -> None:
        """
        max_waiting: answers of all tenants together that may wait for their first token. A tenant of which none waits
            may send one request more: others that fill the queue don't shut it out.
        """
        self.clock = clock
        self._max_waiting = max_waiting
        self._num_waiting = 0
        self._accounts: dict[str, _Account] = {}

    def enter(self, tenant: str, limits: Limits, *, answers: int, prompt_tokens: int) -> Visit:
        """Takes a request in, or raises and takes nothing: Refusal, or InputError for more answers than can ever be.

        answers: how many it asks for; each is queued and counted by itself. prompt_tokens: of all its prompts.
        """
        now = self.clock()
        account = self._accounts.setdefault(tenant, _Account())
        self._check(account, limits, answers, prompt_tokens, now)
        account.requests.take(1)
        account.tokens.take(prompt_tokens)
        account.num_live += answers
        account.num_waiting += answers
        self._num_waiting += answers
        return Visit(self, account, answers, prompt_tokens)

    def num_live(self, tenant: str) -> int:
        """A tenant's answers that have not ended."""
        account = self._accounts.get(tenant)
        return 0 if account is None else account.num_live

    def num_waiting(self, tenant: str) -> int:
        """Those of them that have no token yet."""
        account = self._accounts.get(tenant)
        return 0 if account is None else account.num_waiting

    def leave_queue(self, account: _Account, answers: int) -> None:
        """Answers of an account wait no more."""
        account.num_waiting -= answers
        self._num_waiting -= answers

    def _check(self, account: _Account, limits: Limits, answers: int, prompt_tokens: int, now: float) -> None:
        for most, limit in (
            (limits.max_concurrency, f"your limit is {limits.max_concurrency} at a time"),
            (limits.max_queue, f"your limit is {limits.max_queue} that wait"),
            (self._max_waiting, f"this server's limit is {self._max_waiting} that wait"),
        ):
            if most is not None and answers > max(most, 1):  # one answer is refused as what may come later
                message = f"n: the request is for {answers} answers (prompts times n), and {limit}: ask for fewer"
                raise InputError(message, field="n")
        if limits.max_concurrency is not None and account.num_live + answers > limits.max_concurrency:
            message = f"your limit is {limits.max_concurrency} answers at a time, {account.num_live} are under way"
            raise Refusal(message, "concurrency_limit_exceeded", account.ends.gap_s)
        for full, message in (
            (limits.max_queue is not None and account.num_waiting + answers > limits.max_queue, "your queue is full"),
            (
                account.num_waiting and self._num_waiting + answers > self._max_waiting,
                "the server's queue is full",
            ),
        ):
            if full:
                raise Refusal(message, "queue_full", account.starts.gap_s * answers)
        for bucket, rate, amount, code in (
            (account.requests, limits.requests_per_minute, 1, "requests"),
            (account.tokens, limits.tokens_per_minute, prompt_tokens, "tokens"),
        ):
            wait_s = 0.0 if rate is None else bucket.wait_for(amount, rate, now)
            if wait_s:
                raise Refusal(f"your limit is {rate} {code} a minute", f"{code}_limit_exceeded", wait_s)
