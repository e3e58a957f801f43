"""Elements of plots: scales, ticks and axes, as text of inline SVG. Colours and fonts come from the page's style."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

from . import formatting

WIDTH = 520
LEFT, RIGHT, TOP, BOTTOM = 64, 26, 14, 50
LABEL_WIDTH = 54
LOG_FROM = 20.0


@dataclass(frozen=True)
class Scale:
    """Mapping from values to positions along an axis; values outside of `low`..`high` are put at its ends."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def at(self, value: float) -> float:
        """Return the position of `value`."""
        low, high, value = (self._along(min(max(v, self.low), self.high)) for v in (self.low, self.high, value))
        part = (value - low) / (high - low) if high > low else 0.0
        return self.start + part * (self.end - self.start)

    def _along(self, value: float) -> float:
        return math.log(value) if self.log else value


@dataclass(frozen=True)
class Axis:
    """A scale with its ticks and title."""

    scale: Scale
    ticks: Sequence[tuple[float, str]]
    title: str


def number(value: float) -> str:
    """Format a coordinate, short; a non-finite one is 0."""
    if not math.isfinite(value):
        return "0"
    text = f"{value:.1f}"
    return text.removesuffix(".0") if text != "-0.0" else "0"


def text(value: str, limit: int = 0) -> str:
    """Escape foreign text for a page."""
    return escape(formatting.printable(value, limit))


def drawing(key: str, height: float, title: str, description: str, parts: Iterable[str]) -> str:
    """Return an SVG with a name for screen readers. `key` is unique in the page."""
    return (
        f'<svg viewBox="0 0 {WIDTH} {number(height)}" role="img" aria-labelledby="{key}-t {key}-d">'
        f'<title id="{key}-t">{text(title, 200)}</title><desc id="{key}-d">{text(description)}</desc>'
        f"{''.join(parts)}</svg>"
    )


def axes(x: Axis, y: Axis) -> str:
    """Return both axes with grid lines; `y` from the bottom up."""
    left, right, bottom, top = x.scale.start, x.scale.end, y.scale.start, y.scale.end
    parts = [f'<path class="grid" d="{_grid(x, y)}"/>', f'<path class="frame" d="M{left} {bottom}H{right}"/>']
    last = -math.inf
    for value, label in x.ticks:
        position = x.scale.at(value)
        if position - last >= LABEL_WIDTH:
            last = position
            parts.append(f'<text x="{number(position)}" y="{number(bottom + 18)}" text-anchor="middle">{label}</text>')
    for value, label in y.ticks:
        parts.append(
            f'<text x="{left - 7}" y="{number(y.scale.at(value) + 4.5)}" text-anchor="end">{escape(label)}</text>'
        )
    middle = number((bottom + top) / 2)
    parts.append(f'<text class="axis" x="{(left + right) / 2}" y="{number(bottom + 40)}" text-anchor="middle">')
    parts.append(f"{escape(x.title)}</text>")
    if y.title:
        parts.append(f'<text class="axis" transform="translate(15 {middle})rotate(-90)" text-anchor="middle">')
        parts.append(f"{escape(y.title)}</text>")
    return "".join(parts)


def _grid(x: Axis, y: Axis) -> str:
    upright = (f"M{number(x.scale.at(v))} {number(y.scale.start)}V{number(y.scale.end)}" for v, _ in x.ticks)
    level = (f"M{number(x.scale.start)} {number(y.scale.at(v))}H{number(x.scale.end)}" for v, _ in y.ticks)
    return "".join([*upright, *level])


def seconds_axis(low: float, high: float, start: float, end: float, title: str, *, upwards: bool = False) -> Axis:
    """Return an axis of seconds from `low` to `high`: logarithmic if they are far apart, else linear from 0. `upwards`
    lets the axis end at a tick."""
    if low > 0 and high / low >= LOG_FROM:
        scale = Scale(low, high, start, end, log=True)
        values = log_ticks(low, high)
    else:
        high = high or 1.0
        values = even_ticks(high)
        if upwards:
            high = max(high, values[-1])
        scale = Scale(0.0, high, start, end)
        values = [value for value in values if value <= high]
    return Axis(scale, [(value, tick_seconds(value)) for value in values], title)


def even_ticks(high: float, limit: int = 6) -> list[float]:
    """Return round numbers from 0, the last of them at or above nine tenths of `high`."""
    if not 0 < high < math.inf:
        return [0.0, 1.0]
    step = next(s for s in _round_numbers(high / limit) if high / s <= limit)
    return [i * step for i in range(math.ceil(high / step - 0.1) + 1)]


def _round_numbers(above: float) -> Iterable[float]:
    power = math.floor(math.log10(above))
    return (digit * 10.0**exponent for exponent in (power, power + 1) for digit in (1, 2, 5))


def log_ticks(low: float, high: float) -> list[float]:
    """Return 1, 2 and 5 times powers of ten between the two; only 1 if there are many powers."""
    decades = math.log10(high / low)
    digits = (1, 2, 5) if decades <= 3 else (1,)
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks = [digit * 10.0**power for power in powers for digit in digits]
    return [tick for tick in ticks if low * 0.999 <= tick <= high * 1.001]


def tick_seconds(value: float) -> str:
    """Format "200 µs", "50 ms" or "1.5 s"."""
    if not value:
        return "0"
    if value < 0.000999:
        return f"{value * 1e6:.3g} µs"
    return f"{value * 1e3:.3g} ms" if value < 0.999 else f"{value:,.4g} s"
