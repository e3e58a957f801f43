"""Accounts of API keys: their use of the server, and their limits.

Requests and tokens are token buckets that hold one minute's worth and refill steadily. A request is charged for its
prompt when it is admitted, and for its answer when it ends; for a whole answer before that is written, so that its
headers tell what is left. Tokens may thus go below zero: the key waits until they are above again, and a prompt longer
than a minute's worth is served once the bucket is full. A request that the server refused before it ran gets everything
back; one that its client cancelled is charged for the tokens that were computed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from ..core.refusals import param_at_fault
from ..errors import Busy, EngineUnavailable, InvalidRequest, Quarantined, RateLimited
from ..keys import KeyLimits
from ..telemetry.access_log import RequestRecord

MINUTE_S = 60.0
SOON_S = 1.0  # until one of a key's sequences is expected to end
REFUSALS = (Busy, EngineUnavailable, Quarantined)
UNLIMITED = KeyLimits()
Headers = list[tuple[bytes, bytes]]


class Bucket:
    """Token bucket of `per_minute` credits, refilled steadily. Times are seconds of one clock."""

    def __init__(self, per_minute: int, now: float) -> None:
        self.per_minute = per_minute
        self._level = float(per_minute)
        self._at = now

    def level(self, now: float) -> float:
        """Return the credits left now; below zero after an overdraft."""
        self._level = min(float(self.per_minute), self._level + (now - self._at) * self.per_minute / MINUTE_S)
        self._at = now
        return self._level

    def take(self, credits: float, now: float) -> None:
        """Take credits, overdrawing if need be; a negative number gives some back."""
        self.level(now)
        self._level = min(float(self.per_minute), self._level - credits)

    def resize(self, per_minute: int, now: float) -> None:
        """Change what it holds. What was taken stays taken: a rise adds its difference, a cut at most takes away what
        no longer fits."""
        self._level = min(float(per_minute), self.level(now) + max(0, per_minute - self.per_minute))
        self.per_minute = per_minute

    def seconds_until(self, level: float, now: float) -> float:
        """Return the seconds until it holds `level` credits; 0 if it does."""
        return max(0.0, level - self.level(now)) * MINUTE_S / self.per_minute


@dataclass(frozen=True)
class KeyUsage:
    """Use of the server by one key: ended requests since the start of the server, and sequences running now."""

    key: str
    running: int
    requests: int
    tokens: int
    refused: int


class Account:
    """The account of one key, or the shared one of clients without a key. Lives on the event loop."""

    def __init__(self, name: str = "", limits: KeyLimits = UNLIMITED, now: float = 0.0) -> None:
        self.name = name
        self._running = self._requests_seen = self._tokens_seen = self._refused = 0
        self._limits = limits
        self._requests = _bucket(limits.requests_per_minute, now)
        self._tokens = _bucket(limits.tokens_per_minute, now)

    @property
    def most_running(self) -> int | None:
        """Sequences that the key may run at once; None for no limit."""
        return self._limits.max_running

    def limit(self, limits: KeyLimits, now: float) -> None:
        """Change the limits; the use so far stays counted."""
        if limits != self._limits:
            self._limits = limits
            self._requests = _bucket(limits.requests_per_minute, now, self._requests)
            self._tokens = _bucket(limits.tokens_per_minute, now, self._tokens)

    def check(self, now: float, rows: int = 1, prompts: int = 1) -> None:
        """Raise RateLimited if a request for `rows` sequences, of `prompts` prompts, would be over a limit now,
        InvalidRequest if it always would be."""
        limits = self._limits
        if limits.max_running is not None and rows > limits.max_running:
            raise InvalidRequest(
                f"the request asks for {rows} sequences and this API key may run {limits.max_running}: ask for fewer",
                param=param_at_fault(prompts, limits.max_running),
            )
        if limits.max_running is not None and self._running + rows > limits.max_running:
            raise self._refuse(f"has {self._running} sequences, of {limits.max_running} that it may have", SOON_S)
        if self._requests is not None and (wait_s := self._requests.seconds_until(1.0, now)) > 0:
            raise self._refuse(f"has used its {limits.requests_per_minute} requests a minute", wait_s)
        if self._tokens is not None and (wait_s := self._tokens.seconds_until(1.0, now)) > 0:
            raise self._refuse(f"has used its {limits.tokens_per_minute} tokens a minute", wait_s)

    @contextlib.contextmanager
    def serve(
        self, record: RequestRecord, *, rows: int, tokens: int, clock: Any, prompts: int = 1
    ) -> Iterator[Callable[[], None]]:
        """Context manager that charges a request: one request and about `tokens` for its prompt at the beginning, the
        rest of its use at the end. It gives a function that charges what `record` tells so far. If the block raises one
        of REFUSALS, and no sequence of it ran (`record.ran`), nothing is charged. Raises like `check`."""
        now = clock()
        self.check(now, rows, prompts)
        self._running += rows
        self._charge(1, tokens, now)
        served, charged = 1, tokens

        def settle() -> None:
            nonlocal charged
            used = record.prompt_tokens + record.completion_tokens
            self._charge(0, used - charged, clock())
            charged = used

        try:
            yield settle
        except REFUSALS:
            served = int(record.ran)
            raise
        finally:
            used = served * (record.prompt_tokens + record.completion_tokens)
            self._running -= rows
            self._requests_seen += served
            self._tokens_seen += used
            self._charge(served - 1, used - charged, clock())

    def headers(self, now: float) -> Headers:
        """Return `x-ratelimit-*` headers as OpenAI sends them; none for a key without such limits."""
        lines: Headers = []
        for name, bucket in ((b"requests", self._requests), (b"tokens", self._tokens)):
            if bucket is not None:
                left = max(0, int(bucket.level(now)))
                full_s = bucket.seconds_until(bucket.per_minute, now)
                lines.append((b"x-ratelimit-limit-" + name, b"%d" % bucket.per_minute))
                lines.append((b"x-ratelimit-remaining-" + name, b"%d" % left))
                lines.append((b"x-ratelimit-reset-" + name, b"%dms" % round(1000 * full_s)))
        return lines

    def usage(self) -> KeyUsage:
        return KeyUsage(self.name, self._running, self._requests_seen, self._tokens_seen, self._refused)

    def _charge(self, requests: int, tokens: int, now: float) -> None:
        if self._requests is not None:
            self._requests.take(requests, now)
        if self._tokens is not None:
            self._tokens.take(tokens, now)

    def _refuse(self, cause: str, wait_s: float) -> RateLimited:
        self._refused += 1
        return RateLimited(f"the API key '{self.name}' {cause}: try again later", retry_after_s=wait_s)


def _bucket(per_minute: int | None, now: float, before: Bucket | None = None) -> Bucket | None:
    """Return the bucket of a limit: `before` with its level, if there was one; None without a limit."""
    if per_minute is None:
        return None
    if before is None:
        return Bucket(per_minute, now)
    before.resize(per_minute, now)
    return before
