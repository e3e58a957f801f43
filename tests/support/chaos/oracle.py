"""Oracle of requests' ends and answers. Returns faults in words; an empty list if there are none."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from .bad import HTTP as BAD_HTTP
from .bad import RPC as BAD_RPC
from .outcome import End, Outcome
from .plan import DEATHS, FRESH_STARTS, Fault, Manner, Request
from .recipes import Answer, Recipe

REPLAYED = "replayed"
"""Field of `engine` in `/v1/status` of a server that replays running requests when its engine dies: there a death is no
excuse for an error."""

ABORTS_ALWAYS_TAKEN = True
"""Whether gRPC accepts an Abort while the server drains or its engine restarts: then no fault excuses a refusal."""

LONGEST_S = 90.0
ROUNDING = 0.01
"""Bound on differences of one prompt's log-probabilities, with any other sequences in the steps."""
REFUSED_FOR_EVER = "request_quarantined"
AWAY = frozenset((Fault.DRAIN, Fault.FULL_DISK, Fault.HOARD, Fault.HOARD_KILL))
"""Faults during which a new connection may fail."""


@dataclass(frozen=True)
class Parting:
    """An answer that differs from the calm run's. Sums in float32 depend on the other sequences of a step: if a draw,
    or two equal logits, lie within that rounding, a calm server gives either answer."""

    request: Request
    recipe: Recipe
    choice: int
    tokens: tuple[int, ...]
    at: int

    def __str__(self) -> str:
        position = f"token {self.at} of {len(self.tokens)} (recipe {self.recipe.index})"
        return (
            f"{self.request.wire} {self.request.manner}: choice {self.choice} differs from the calm run at {position}"
        )


@dataclass
class Window:
    """A fault from its beginning to the server's recovery; times of the monotonic clock."""

    fault: Fault
    began: float
    ended: float = math.inf

    def overlaps(self, outcome: Outcome) -> bool:
        return self.began <= outcome.ended and outcome.began <= self.ended


class Oracle:
    """Judge of outcomes by the answers of a calm run. Answers that differ are collected in `partings`.

    `answers` are by recipe; `rpc_answers` are those of recipes with stop strings over gRPC, which sends tokens up to
    another position.
    """

    def __init__(
        self,
        answers: Mapping[int, Answer],
        rpc_answers: Mapping[int, Answer] | None = None,
        *,
        survives_death: bool,
    ) -> None:
        self._answers = answers
        self._rpc_answers = rpc_answers or {}
        self._survives_death = survives_death
        self.judged = 0
        self.partings: list[Parting] = []

    def calm(self, request: Request, recipe: Recipe) -> Answer:
        """Return the answer of the calm run."""
        answer = self._answers[recipe.index]
        return answer if request.wire == "http" else self._rpc_answers.get(recipe.index, answer)

    def judge(self, request: Request, outcomes: Sequence[Outcome], windows: Sequence[Window]) -> list[str]:
        """Return the faults of the outcomes of `request`."""
        found: list[str] = []
        for recipe, outcome in zip(request.recipes, outcomes, strict=True):
            overlapping = [window for window in windows if window.overlaps(outcome)]
            found += self._one(request, recipe, outcome, overlapping)
        return found

    def _one(self, request: Request, recipe: Recipe, outcome: Outcome, overlapping: Sequence[Window]) -> Iterator[str]:
        if outcome.surplus:
            yield f"something came after the end ({outcome.surplus})"
        if any(len(ends) > 1 for ends in outcome.finishes.values()) or outcome.dones + outcome.errors > 1:
            yield f"more than one end: {outcome.finishes}, {outcome.dones} done, {outcome.errors} errors"
        if outcome.abort_refused and (ABORTS_ALWAYS_TAKEN or not overlapping):
            yield f"an Abort was refused: {outcome.abort_refused}"
        if not overlapping and outcome.ended - outcome.began > LONGEST_S:
            yield f"took {outcome.ended - outcome.began:.0f} s"
        if wrong := self._wrong_end(request, outcome, overlapping):
            yield wrong
        elif request.manner in _ANSWERED:
            yield from self._wrong_tokens(request, recipe, outcome)

    # Ends --------------------------------------------------------------------------------------------------------

    def _wrong_end(self, request: Request, outcome: Outcome, overlapping: Sequence[Window]) -> str:
        """Return the fault of its end; empty if that end is allowed."""
        match outcome.end:
            case End.REFUSED:
                return self._wrong_refusal(request, outcome)
            case End.ERROR:
                return self._wrong_error(request, outcome, overlapping)
            case End.UNREACHABLE | End.NOTHING:
                return self._wrong_silence(request, outcome, overlapping)
            case End.REJECTED:
                return _wrong_rejection(request, outcome)
            case End.LEFT:
                return "" if request.leaves else "the client left, and was not to"
            case End.ABORTED:
                asked = request.manner in (Manner.ABORT, Manner.EARLY_ABORT)
                return "" if asked else "aborted, and nobody asked for it"
            case _:
                return _wrong_completion(request)

    def _wrong_refusal(self, request: Request, outcome: Outcome) -> str:
        if request.manner is Manner.ASK:
            return ""
        if outcome.retry_after_s is None or not 0 < outcome.retry_after_s <= 60:
            return f"refused ({outcome.code}) with Retry-After {outcome.retry_after_s}"
        return "refused after a part of the answer" if outcome.generated else ""

    def _wrong_error(self, request: Request, outcome: Outcome, overlapping: Sequence[Window]) -> str:
        if request.manner is Manner.RAISES:
            return "" if outcome.code == "engine_step_failed" else f"a row that raises got {outcome.code}"
        died = outcome.code == "engine_died" and any(window.fault in DEATHS for window in overlapping)
        if died and not self._survives_death:
            return ""
        if outcome.code == "server_stopping" and any(window.fault in FRESH_STARTS for window in overlapping):
            return ""
        return f"error {outcome.status} {outcome.code}: {outcome.message}"

    def _wrong_silence(self, request: Request, outcome: Outcome, overlapping: Sequence[Window]) -> str:
        if request.leaves or any(window.fault in AWAY for window in overlapping):
            return ""
        return f"no end ({outcome.end}, status {outcome.status or 'none'}): {outcome.message}"

    # Answers -------------------------------------------------------------------------------------------------------

    def _wrong_tokens(self, request: Request, recipe: Recipe, outcome: Outcome) -> Iterator[str]:
        """Compare with the calm run: all of a complete answer, the beginning of any other."""
        calm_answer = self.calm(request, recipe)
        whole = outcome.end is End.COMPLETE
        for choice, calm in calm_answer.items():
            self.judged += 1
            tokens, finish = calm.tokens, calm.finish
            got, ends = outcome.tokens.get(choice, []), outcome.finishes.get(choice, [])
            expected = list(tokens) if whole else list(tokens)[: len(got)]
            if got != expected:
                self.partings.append(Parting(request, recipe, choice, tuple(got), _parting(got, tokens)))
            elif (off := max_difference(outcome.logprobs.get(choice, ()), calm.logprobs)) > ROUNDING:
                yield f"choice {choice}: log-probabilities are off by {off:.3f}"
            elif whole and ends != [finish]:
                yield f"choice {choice} ended {ends}, the calm run {finish}"
        if outcome.tokens.keys() - calm_answer.keys():
            yield f"choices {sorted(outcome.tokens)} of {len(calm_answer)}"


_ANSWERED = frozenset(Manner) - {
    Manner.BAD,
    Manner.WRONG_KEY,
    Manner.TOO_LONG,
    Manner.RAISES,
    Manner.ASK,
    Manner.TORN,
}


def max_difference(logprobs: Sequence[float], calm_answer: Sequence[float]) -> float:
    """Return the largest difference between the two, over their common length."""
    return max((abs(a - b) for a, b in zip(logprobs, calm_answer, strict=False)), default=0.0)


def _wrong_rejection(request: Request, outcome: Outcome) -> str:
    expected = _rejection(request)
    if outcome.code == REFUSED_FOR_EVER and request.manner is Manner.RAISES:
        return ""
    if outcome.status != expected:
        return f"rejected with {outcome.status} {outcome.code} ({outcome.message}), wanted {expected or 'an answer'}"
    return ""


def _rejection(request: Request) -> str:
    """Return the status that the request must be rejected with; empty if it must not."""
    rpc = request.wire != "http"
    match request.manner:
        case Manner.BAD:
            wrong = BAD_RPC if rpc else BAD_HTTP
            return str(wrong[request.variant % len(wrong)][2])
        case Manner.WRONG_KEY:
            return "UNAUTHENTICATED" if rpc else "401"
        case Manner.TOO_LONG:
            return "INVALID_ARGUMENT" if rpc else "400"
        case _:
            return ""


def _wrong_completion(request: Request) -> str:
    expected = _rejection(request)
    if expected:
        return f"answered, wanted {expected}"
    return "a row that raises was answered" if request.manner is Manner.RAISES else ""


def _parting(got: Sequence[int], calm_answer: Sequence[int]) -> int:
    """Return the position at which the two begin to differ."""
    return next(
        (i for i, (a, b) in enumerate(zip(got, calm_answer, strict=False)) if a != b), min(len(got), len(calm_answer))
    )
