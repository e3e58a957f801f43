"""Bounds on the start of a fleet's workers: one that does not answer, refuses the fleet's key, or shows no progress
ends the start with a message."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

from ..errors import NotAuthenticated, StartFailed
from .plan import FleetPlan, Worker

SILENT_S = 60.0  # a worker listens within a second or two
MORE_S = 120.0  # beyond the engine's own bound, which ends a worker that can't load
START_TIMEOUT = "--start-timeout"
START_TIMEOUT_S = 1800.0


class Starts:
    """What each worker showed last, and since when. Times are seconds of one clock."""

    def __init__(self, plan: FleetPlan) -> None:
        self._bound_s = _start_timeout_s(plan) + MORE_S
        self._seen: dict[str, tuple[str, float]] = {}

    def check(self, worker: Worker, answer: Mapping[str, Any], now: float) -> None:
        """Take in a worker's `/v1/status`, empty where it did not answer. Raises StartFailed."""
        name, log = worker.member.name, worker.member.log
        if (answer.get("error") or {}).get("code") == NotAuthenticated.code:
            raise StartFailed(
                f"{name} asks for an API key that the fleet does not have: set TREADLE_API_KEY for the fleet, and "
                "leave the key out of the workers' own options and settings file"
            )
        shown = f"{answer.get('state', '')} {answer.get('reason', '')}".strip()
        before, since = self._seen.get(name, (None, now))
        if shown != before:
            self._seen[name] = (shown, now)
        elif not shown and now - since > SILENT_S:
            raise StartFailed(f"{name} has not answered at {worker.http} for {SILENT_S:g} s: see {log}")
        elif now - since > self._bound_s and answer.get("state") != "ready":
            raise StartFailed(f"{name} has shown no progress for {self._bound_s:g} s ({shown}): see {log}")


def _start_timeout_s(plan: FleetPlan) -> float:
    """The engine's bound as the workers' options give it."""
    options = [*plan.worker_options, ""]
    for option, value in itertools.pairwise(options):
        flag, separator, own = option.partition("=")
        if flag == START_TIMEOUT:
            try:
                return float(own if separator else value)
            except ValueError:
                break  # the worker says what is wrong with it
    return START_TIMEOUT_S
