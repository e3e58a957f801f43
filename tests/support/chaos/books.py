"""Invariants of an idle server's own figures: nothing is held, and its counters add up."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

UNCOUNTED = "unused"  # slots that were released before a sequence was made: no metric counts them


def at_rest(status: Mapping[str, Any]) -> bool:
    """Whether no slot is taken."""
    admission = status["admission"]
    return not admission["rows"] and not status["requests"]


def wrong_books(status: Mapping[str, Any], metrics: Mapping[str, float]) -> list[str]:
    """Return the contradictions in `/v1/status` and `/metrics` of a server at rest."""
    return [*_held(status), *_counters(status, metrics)]


def _held(status: Mapping[str, Any]) -> Iterator[str]:
    admission = status["admission"]
    for name in ("rows", "tokens_reserved", "running", "waiting"):
        if admission[name]:
            yield f"at rest, and admission.{name} is {admission[name]}"
    if status["requests"]:
        yield f"at rest, and {len(status['requests'])} requests live: {status['requests'][:2]}"


def _counters(status: Mapping[str, Any], metrics: Mapping[str, float]) -> Iterator[str]:
    admission = status["admission"]
    ended = admission["ended"]
    if admission["accepted"] != sum(ended.values()):
        yield f"{admission['accepted']} accepted and {sum(ended.values())} ended: {ended}"
    reported = {reason: count for reason, count in ended.items() if reason != UNCOUNTED}
    if (counted := _by_label(metrics, "treadle_finished_total", "reason")) != reported:
        yield f"metrics say finished {counted}, status {reported}"
    counted = _by_label(metrics, "treadle_refused_total", "reason")
    refused = {reason: count for reason, count in counted.items() if count}
    if refused != admission["refused"]:
        yield f"metrics say refused {refused}, status {admission['refused']}"
    restarts = metrics.get("treadle_engine_restarts_total")
    if restarts != status["engine"]["restarts"]:
        yield f"metrics say {restarts} restarts, status {status['engine']['restarts']}"


def _by_label(metrics: Mapping[str, float], name: str, label: str) -> dict[str, int]:
    """Sum a counter's samples by one label."""
    found: dict[str, int] = {}
    for sample, value in metrics.items():
        if sample.startswith(name + "{"):
            key = sample.partition(f'{label}="')[2].partition('"')[0]
            found[key] = found.get(key, 0) + int(value)
    return found
