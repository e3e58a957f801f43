"""Outcome of one request, as its client saw it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum


class End(StrEnum):
    COMPLETE = "complete"  # the whole answer, with its terminal event
    REFUSED = "refused"  # 503, RESOURCE_EXHAUSTED or UNAVAILABLE before anything of an answer
    REJECTED = "rejected"  # 4xx or its gRPC status
    ERROR = "error"  # another status, or an error event
    ABORTED = "aborted"  # a Complete with the reason "abort"
    LEFT = "left"  # the client left on purpose
    NOTHING = "nothing"  # the connection ended without an end of the request
    UNREACHABLE = "unreachable"  # no connection, or it was gone before the first byte


@dataclass
class Outcome:
    """`tokens` and `finishes` are by choice. Times are seconds of the monotonic clock."""

    end: End = End.NOTHING
    status: str = ""
    code: str = ""
    message: str = ""
    retry_after_s: float | None = None
    tokens: dict[int, list[int]] = field(default_factory=dict)
    finishes: dict[int, list[str]] = field(default_factory=dict)
    logprobs: dict[int, list[float]] = field(default_factory=dict)
    abort_refused: str = ""
    dones: int = 0
    errors: int = 0
    surplus: int = 0  # bytes or events after the end
    began: float = 0.0
    ended: float = 0.0
    first_s: float | None = None

    def add(self, choice: int, tokens: list[int], finish: str | None, logprobs: Iterable[float] = ()) -> None:
        """Add a part of an answer. `logprobs` are the tokens' own, if they were requested."""
        self.logprobs.setdefault(choice, []).extend(logprobs)
        self.surplus += bool(self.dones or self.errors)
        self.tokens.setdefault(choice, []).extend(tokens)
        if finish:
            self.finishes.setdefault(choice, []).append(finish)

    @property
    def generated(self) -> int:
        return sum(map(len, self.tokens.values()))
