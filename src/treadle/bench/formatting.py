"""Formatting of figures, the same in tables and on the page."""

from __future__ import annotations

from collections.abc import Callable

from .ratios import Figure, Range
from .samples import Result

ARROWS = {"lower": "↓", "higher": "↑", "neither": ""}


def value(number: float | None, unit: str) -> str:
    """Format a figure with its unit in three digits: "12.3 ms", "1.20 s", "66.0 tok/s", "87 %", "1.09", "3"."""
    if number is None:
        return "–"
    writer: Callable[[float], str] | None = _WRITERS.get(unit)
    return f"{digits(number)} {unit}" if writer is None else writer(number)


def seconds(number: float) -> str:
    if abs(number) >= 100:
        return f"{number:,.0f} s"
    if abs(number) >= 0.9995:
        return f"{digits(number)} s"
    return f"{digits(number * 1000)} ms"


def digits(number: float) -> str:
    """Format in three digits, without an exponent and without needless decimals; small numbers keep three decimals."""
    size = abs(number)
    if not number:
        return "0"
    if size >= 99.95:
        return f"{number:,.0f}"
    if size >= 9.995:
        return f"{number:.1f}"
    return f"{number:.2f}" if size >= 0.0995 else f"{number:.3f}"


def tick(number: float) -> str:
    """Format a tick: "0", "2.5", "1,000"."""
    return f"{number:,.0f}" if number == round(number) else f"{number:,.4g}"


def ratio(number: float) -> str:
    return f"{digits(number)}×"


def over_rounds(values: Range | None, unit: str) -> str:
    """Format the median and, if there are several rounds, the range."""
    if values is None:
        return "–"
    return value(values.median, unit) + between(values, unit)


def between(values: Range, unit: str) -> str:
    """Format " (least..most)", or "" for one value or equal ones. The unit stands once if all have the same."""
    low, middle, high = (value(number, unit) for number in (values.least, values.median, values.most))
    if low == high:
        return ""
    units = {text.partition(" ")[2] for text in (low, middle, high)}
    if len(units) == 1:
        low, high = low.partition(" ")[0], high.partition(" ")[0]
    return f" ({low}..{high})"


def ratio_over_rounds(values: Range | None) -> str:
    if values is None:
        return "–"
    low, high = digits(values.least), digits(values.most)
    return ratio(values.median) + ("" if low == high else f" ({low}..{high})")


def ending(result: Result) -> str:
    """Return why the run ended early and how much of it there is; empty for a whole run."""
    if not result.stopped:
        return ""
    done = f"{result.rounds_done} of {result.rounds_planned} rounds"
    return f"The run ended early, after {done}: {result.stopped}"


def name(figure: Figure) -> str:
    """Return the figure's name with an arrow down if lower is better, up if higher is."""
    return f"{figure.name} {ARROWS[figure.better]}".rstrip()


def printable(text: str, max_chars: int = 0) -> str:
    """Return foreign text as one line without control characters, and with `max_chars` given not longer than that."""
    line = "".join(c if c.isprintable() else " " for c in text).strip()
    if not max_chars or len(line) <= max_chars:
        return line
    return f"{line[: max_chars - max_chars // 3 - 1]}…{line[len(line) - max_chars // 3 :]}"


def _percent(number: float) -> str:
    """Format per cent; a part close to all or none is not rounded to all or none."""
    percent = 100 * number
    if percent == round(percent) or 0.5 <= percent < 99.5:
        return f"{percent:.0f} %"
    return f"{min(max(percent, 0.1), 99.9):.1f} %" if percent < 100 else f"{percent:.0f} %"


def _count(number: float) -> str:
    return f"{number:,.0f}" if number == int(number) else f"{number:,.1f}"


_WRITERS: dict[str, Callable[[float], str]] = {
    "s": seconds,
    "x": digits,
    "part": _percent,
    "": _count,
}
