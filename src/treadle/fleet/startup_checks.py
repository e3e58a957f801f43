"""Checks of a fleet's starting workers: no answer, a refused API key, or no progress ends the start with an error."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

from ..errors import NotAuthenticated, StartFailed
from .plan import FleetPlan, Worker

SILENT_S = 60.0  # a worker normally listens within two seconds
START_SLACK_S = 120.0  # beyond the engine's own start timeout, at which the worker itself ends
START_TIMEOUT = "--start-timeout"
START_TIMEOUT_S = 1800.0


class StartupChecks:
    """Last status of each worker and the time of its last change, in seconds."""

    def __init__(self, plan: FleetPlan) -> None:
        self._bound_s = _start_timeout_s(plan) + START_SLACK_S
        self._statuses: dict[str, tuple[str, float]] = {}

    def check(self, worker: Worker, answer: Mapping[str, Any], now: float) -> None:
        """Check a worker's `/v1/status`, {} if it did not answer. Raises StartFailed."""
        name, log = worker.member.name, worker.member.log
        if (answer.get("error") or {}).get("code") == NotAuthenticated.code:
            raise StartFailed(
                f"{name} asks for an API key that the fleet does not have: set TREADLE_API_KEY for the fleet, and "
                "leave the key out of the workers' own options and settings file"
            )
        progress = f"{answer.get('state', '')} {answer.get('reason', '')}".strip()
        before, since = self._statuses.get(name, (None, now))
        if progress != before:
            self._statuses[name] = (progress, now)
        elif not progress and now - since > SILENT_S:
            raise StartFailed(f"{name} has not answered at {worker.http} for {SILENT_S:g} s: see {log}")
        elif now - since > self._bound_s and answer.get("state") != "ready":
            raise StartFailed(f"{name} has shown no progress for {self._bound_s:g} s ({progress}): see {log}")


def _start_timeout_s(plan: FleetPlan) -> float:
    """Return the engine's start timeout in seconds, from the workers' options or the default."""
    options = [*plan.worker_options, ""]
    for option, value in itertools.pairwise(options):
        flag, separator, own = option.partition("=")
        if flag == START_TIMEOUT:
            try:
                return float(own if separator else value)
            except ValueError:
                break  # the worker reports the invalid value
    return START_TIMEOUT_S
