"""Plots of distributions of times, and of figures against concurrency."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from . import formatting
from .measures import quantile
from .ratios import FigureRow, Range
from .svg import BOTTOM, LEFT, RIGHT, TOP, WIDTH, Axis, Scale, axes, drawing, even_ticks, number, seconds_axis

HEIGHT = 290.0
FLOOR = HEIGHT - BOTTOM
MOST_POINTS = 200
SHORTEST_S = 1e-4
SHADES = 8


def shade(index: int) -> str:
    """Return the class of a target's lines: a colour and a dash, repeated if there are more targets than classes."""
    return f"s{index % SHADES}"


def distribution(key: str, title: str, axis: str, times: Mapping[str, Sequence[float]], shades: Sequence[str]) -> str:
    """Plot the part of the values at or below each time, by target; "" if there are none. `shades` are the classes of
    the lines, in the order of `times`."""
    ordered = {name: sorted(values) for name, values in times.items()}
    present = {name: values for name, values in ordered.items() if values}
    if not present:
        return ""
    low = max(min(quantile(values, 0.01) for values in present.values()), SHORTEST_S)
    high = max(max(values[-1] for values in present.values()), low)
    x = seconds_axis(low * 0.9, high, LEFT, WIDTH - RIGHT, axis)
    parts = [axes(x, Axis(Scale(0, 1, FLOOR, TOP), [(p / 100, f"{p} %") for p in (0, 25, 50, 75, 90, 100)], ""))]
    for name, shade_ in zip(ordered, shades, strict=True):
        if name in present:
            parts.append(f'<path class="line {shade_}" d="{_steps(present[name], x.scale)}"/>')
    return drawing(key, HEIGHT, title, _description(present), parts)


def _steps(ordered: Sequence[float], x: Scale) -> str:
    """Return a rising step line of at most MOST_POINTS points; it always includes the greatest value."""
    count = len(ordered)
    points = min(count, MOST_POINTS)
    ranks = [count * (i + 1) // points for i in range(points)]
    y = Scale(0, 1, FLOOR, TOP)
    path = f"M{number(x.start)} {number(y.at(0))}"
    return path + "".join(f"H{number(x.at(ordered[r - 1]))}V{number(y.at(r / count))}" for r in ranks)


def _description(present: Mapping[str, Sequence[float]]) -> str:
    """Describe the plot in words."""
    return "; ".join(
        f"{formatting.printable(name, 60)}: {len(v):,} values, p50 {formatting.seconds(quantile(v, 0.5))}, "
        f"p99 {formatting.seconds(quantile(v, 0.99))}, max {formatting.seconds(v[-1])}"
        for name, v in present.items()
    )


# Against concurrency ----------------------------------------------------------------------------------------------


def against_concurrency(
    key: str, title: str, swept: Sequence[tuple[int, FigureRow]], targets: Sequence[str], shades: Sequence[str]
) -> str:
    """Plot a figure's median at each concurrency with its range over the rounds, by target; "" if there is none."""
    ranges = [(over.least, over.most) for _, row in swept for over in row.values.values()]
    if not ranges:
        return ""
    x = _levels([c for c, _ in swept])
    y = _upwards(min(low for low, _ in ranges), max(high for _, high in ranges), swept[0][1].figure.unit)
    parts, descriptions = [axes(x, y)], list[str]()
    for name, shade_ in zip(targets, shades, strict=True):
        points = [(c, row.values[name]) for c, row in swept if name in row.values]
        if points:
            parts.append(_curve(points, shade_, x.scale, y.scale))
            at = (f"{formatting.value(over.median, swept[0][1].figure.unit)} at {c}" for c, over in points)
            descriptions.append(f"{formatting.printable(name, 60)}: {', '.join(at)}")
    return drawing(key, HEIGHT, title, "; ".join(descriptions), parts)


def _levels(levels: Sequence[int]) -> Axis:
    low, high = max(1, min(levels)), max(1, *levels)
    scale = Scale(low, high, LEFT + 16, WIDTH - RIGHT - 16, log=True) if high > low else Scale(0, 2 * low, LEFT, WIDTH)
    return Axis(scale, [(c, f"{c}") for c in levels], "concurrency (requests at a time)")


def _upwards(low: float, high: float, unit: str) -> Axis:
    if unit == "s":
        return seconds_axis(low * 0.9, high * 1.05, FLOOR, TOP, "", upwards=True)
    ticks = even_ticks(high)
    return Axis(Scale(0, max(high, ticks[-1]), FLOOR, TOP), [(v, formatting.tick(v)) for v in ticks], unit)


def _curve(points: Sequence[tuple[int, Range]], shade_: str, x: Scale, y: Scale) -> str:
    positions = [(x.at(c), over) for c, over in points]
    line = "L".join(f"{number(position)} {number(y.at(over.median))}" for position, over in positions)
    whiskers = "".join(
        f"M{number(position)} {number(y.at(over.least))}V{number(y.at(over.most))}" for position, over in positions
    )
    dots = "".join(f'<circle cx="{number(p)}" cy="{number(y.at(over.median))}" r="3.5"/>' for p, over in positions)
    return (
        f'<path class="line {shade_}" d="M{line}"/><path class="whisker {shade_}" d="{whiskers}"/>'
        f'<g class="dots {shade_}">{dots}</g>'
    )
