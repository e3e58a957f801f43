"""What each request must have come to. Returns what is wrong, in words; an empty list where nothing is."""

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
"""Field of `engine` in `/v1/status` of a server that replays the requests that run when its engine dies: there a death
is no excuse for an error."""

ABORTS_ALWAYS_TAKEN = True
"""Whether gRPC takes an Abort also while the server drains or its engine restarts: then no fault excuses a refusal."""

LONGEST_S = 90.0
ROUNDING = 0.01
"""Of log-probabilities: those of one prompt differ by less, whoever else is in the steps."""
REFUSED_FOR_EVER = "request_quarantined"
AWAY = frozenset((Fault.DRAIN, Fault.FULL_DISK, Fault.HOARD, Fault.HOARD_KILL))
"""Faults during which a new connection may fail."""


@dataclass(frozen=True)
class Parting:
    """An answer that is not the calm run's. Sums in float32 depend on who else is in a step: where a draw, or two equal
    logits, lie within that rounding, a calm server gives either answer."""

    request: Request
    recipe: Recipe
    choice: int
    tokens: tuple[int, ...]
    at: int

    def __str__(self) -> str:
        where = f"token {self.at} of {len(self.tokens)} (recipe {self.recipe.index})"
        return f"{self.request.wire} {self.request.manner}: choice {self.choice} differs from the calm run at {where}"


@dataclass
class Window:
    """A fault from its beginning to the server's recovery; times of the monotonic clock."""

    fault: Fault
    began: float
    ended: float = math.inf

    def overlaps(self, outcome: Outcome) -> bool:
        return self.began <= outcome.ended and outcome.began <= self.ended


class Oracle:
    """Judges outcomes by the answers of a calm run. Answers that differ are collected in `partings`.

    `answers` are by recipe; `rpc_answers` are those of recipes with stop strings over gRPC, which sends tokens up to
    another place.
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
        """The answer of the calm run."""
        answer = self._answers[recipe.index]
        return answer if request.wire == "http" else self._rpc_answers.get(recipe.index, answer)

    def judge(self, request: Request, outcomes: Sequence[Outcome], windows: Sequence[Window]) -> list[str]:
        """What is wrong with what came of `request`."""
        found: list[str] = []
        for recipe, outcome in zip(request.recipes, outcomes, strict=True):
            over = [window for window in windows if window.overlaps(outcome)]
            found += self._one(request, recipe, outcome, over)
        return found

    def _one(self, request: Request, recipe: Recipe, outcome: Outcome, over: Sequence[Window]) -> Iterator[str]:
        if outcome.surplus:
            yield f"something came after the end ({outcome.surplus})"
        if any(len(ends) > 1 for ends in outcome.finishes.values()) or outcome.dones + outcome.errors > 1:
            yield f"more than one end: {outcome.finishes}, {outcome.dones} done, {outcome.errors} errors"
        if outcome.abort_refused and (ABORTS_ALWAYS_TAKEN or not over):
            yield f"an Abort was refused: {outcome.abort_refused}"
        if not over and outcome.ended - outcome.began > LONGEST_S:
            yield f"took {outcome.ended - outcome.began:.0f} s"
        if wrong := self._wrong_end(request, outcome, over):
            yield wrong
        elif request.manner in _ANSWERED:
            yield from self._wrong_tokens(request, recipe, outcome)

    # Ends --------------------------------------------------------------------------------------------------------

    def _wrong_end(self, request: Request, outcome: Outcome, over: Sequence[Window]) -> str:
        """What is wrong with how it ended; empty where it may end so."""
        match outcome.end:
            case End.REFUSED:
                return self._wrong_refusal(request, outcome)
            case End.ERROR:
                return self._wrong_error(request, outcome, over)
            case End.UNREACHABLE | End.NOTHING:
                return self._wrong_silence(request, outcome, over)
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

    def _wrong_error(self, request: Request, outcome: Outcome, over: Sequence[Window]) -> str:
        if request.manner is Manner.RAISES:
            return "" if outcome.code == "engine_step_failed" else f"a row that raises got {outcome.code}"
        died = outcome.code == "engine_died" and any(window.fault in DEATHS for window in over)
        if died and not self._survives_death:
            return ""
        if outcome.code == "server_stopping" and any(window.fault in FRESH_STARTS for window in over):
            return ""
        return f"error {outcome.status} {outcome.code}: {outcome.message}"

    def _wrong_silence(self, request: Request, outcome: Outcome, over: Sequence[Window]) -> str:
        if request.leaves or any(window.fault in AWAY for window in over):
            return ""
        return f"no end ({outcome.end}, status {outcome.status or 'none'}): {outcome.message}"

    # Answers -------------------------------------------------------------------------------------------------------

    def _wrong_tokens(self, request: Request, recipe: Recipe, outcome: Outcome) -> Iterator[str]:
        """Compare with the calm run: all of a complete answer, the beginning of any other."""
        known = self.calm(request, recipe)
        whole = outcome.end is End.COMPLETE
        for choice, calm in known.items():
            self.judged += 1
            tokens, finish = calm.tokens, calm.finish
            got, ends = outcome.tokens.get(choice, []), outcome.finishes.get(choice, [])
            expected = list(tokens) if whole else list(tokens)[: len(got)]
            if got != expected:
                self.partings.append(Parting(request, recipe, choice, tuple(got), _parting(got, tokens)))
            elif (off := far(outcome.logprobs.get(choice, ()), calm.logprobs)) > ROUNDING:
                yield f"choice {choice}: log-probabilities are off by {off:.3f}"
            elif whole and ends != [finish]:
                yield f"choice {choice} ended {ends}, the calm run {finish}"
        if outcome.tokens.keys() - known.keys():
            yield f"choices {sorted(outcome.tokens)} of {len(known)}"


_ANSWERED = frozenset(Manner) - {
    Manner.BAD,
    Manner.WRONG_KEY,
    Manner.TOO_LONG,
    Manner.RAISES,
    Manner.ASK,
    Manner.TORN,
}


def far(logprobs: Sequence[float], known: Sequence[float]) -> float:
    """How far the two are apart at most, over what both have."""
    return max((abs(a - b) for a, b in zip(logprobs, known, strict=False)), default=0.0)


def _wrong_rejection(request: Request, outcome: Outcome) -> str:
    wanted = _rejection(request)
    if outcome.code == REFUSED_FOR_EVER and request.manner is Manner.RAISES:
        return ""
    if outcome.status != wanted:
        return f"rejected with {outcome.status} {outcome.code} ({outcome.message}), wanted {wanted or 'an answer'}"
    return ""


def _rejection(request: Request) -> str:
    """The status that the request must be rejected with; empty where it must not."""
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
    wanted = _rejection(request)
    if wanted:
        return f"answered, wanted {wanted}"
    return "a row that raises was answered" if request.manner is Manner.RAISES else ""


def _parting(got: Sequence[int], known: Sequence[int]) -> int:
    """Where the two begin to differ."""
    return next((i for i, (a, b) in enumerate(zip(got, known, strict=False)) if a != b), min(len(got), len(known)))
