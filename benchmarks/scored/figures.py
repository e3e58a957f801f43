"""Figures of a row, and the statistics that they use."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Figure:
    """One measured value as text; `met`: it meets its target, None if there is no target."""

    what: str
    value: str
    met: bool | None = None


def quantile(values: Sequence[float], q: float) -> float:
    """Return the quantile; NaN without values."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, round(q * (len(ordered) - 1)))] if ordered else float("nan")


def ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms" if seconds < 0.02 else f"{seconds * 1e3:.0f} ms"


def mb(size: float) -> str:
    return f"{size / 1e6:.0f} MB"


def counted(counts: Counter[str]) -> str:
    """Format `12 503, 3 left`; "none" without counts."""
    return ", ".join(f"{count:,} {what}" for what, count in sorted(counts.items())) or "none"


def auc(some: Sequence[float], others: Sequence[float]) -> float:
    """Return the probability that one of `some` is larger than one of `others`: 0.5 if they can't be told apart."""
    wins = sum((a > b) + 0.5 * (a == b) for a in some for b in others)
    return wins / (len(some) * len(others))


def as_seen(took: Sequence[float], every_s: float) -> list[float]:
    """Return the waits of a client that asks every `every_s` seconds, from those of a prober that asks again only after
    an answer: each wait longer than `every_s` also stands for the requests that were not sent meanwhile."""
    found = []
    for seconds in took:
        found.append(seconds)
        while (seconds := seconds - every_s) > 0:
            found.append(seconds)
    return found
