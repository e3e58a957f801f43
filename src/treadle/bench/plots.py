"""How times are distributed, and how figures go with concurrency."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from . import formatting
from .measures import quantile
from .ratios import Range, Row
from .svg import BOTTOM, LEFT, RIGHT, TOP, WIDTH, Axis, Scale, axes, drawing, even_ticks, number, seconds_axis

HEIGHT = 290.0
FLOOR = HEIGHT - BOTTOM
MOST_POINTS = 200
SHORTEST_S = 1e-4
SHADES = 8


def shade(index: int) -> str:
    """The class of a target's lines: a colour and a dash of its own, until there are more targets than those."""
    return f"s{index % SHADES}"


def distribution(key: str, title: str, axis: str, times: Mapping[str, Sequence[float]], shades: Sequence[str]) -> str:
    """Which part of the values is not above each time, by target; "" where there are none. `shades` are the classes
    of the lines, in the order of `times`."""
    ordered = {name: sorted(values) for name, values in times.items()}
    heard = {name: values for name, values in ordered.items() if values}
    if not heard:
        return ""
    low = max(min(quantile(values, 0.01) for values in heard.values()), SHORTEST_S)
    high = max(max(values[-1] for values in heard.values()), low)
    x = seconds_axis(low * 0.9, high, LEFT, WIDTH - RIGHT, axis)
    parts = [axes(x, Axis(Scale(0, 1, FLOOR, TOP), [(p / 100, f"{p} %") for p in (0, 25, 50, 75, 90, 100)], ""))]
    for name, shade_ in zip(ordered, shades, strict=True):
        if name in heard:
            parts.append(f'<path class="line {shade_}" d="{_steps(heard[name], x.scale)}"/>')
    return drawing(key, HEIGHT, title, _said(heard), parts)


def _steps(ordered: Sequence[float], x: Scale) -> str:
    """A line up by steps, of at most MOST_POINTS of them; the greatest value is always there."""
    count = len(ordered)
    points = min(count, MOST_POINTS)
    ranks = [count * (i + 1) // points for i in range(points)]
    y = Scale(0, 1, FLOOR, TOP)
    path = f"M{number(x.start)} {number(y.at(0))}"
    return path + "".join(f"H{number(x.at(ordered[r - 1]))}V{number(y.at(r / count))}" for r in ranks)


def _said(heard: Mapping[str, Sequence[float]]) -> str:
    """The plot in words."""
    return "; ".join(
        f"{formatting.plain(name, 60)}: {len(v):,} values, p50 {formatting.seconds(quantile(v, 0.5))}, "
        f"p99 {formatting.seconds(quantile(v, 0.99))}, max {formatting.seconds(v[-1])}"
        for name, v in heard.items()
    )


# Against concurrency ----------------------------------------------------------------------------------------------


def against_concurrency(
    key: str, title: str, swept: Sequence[tuple[int, Row]], targets: Sequence[str], shades: Sequence[str]
) -> str:
    """A figure's median at each concurrency with its least and most over the rounds, by target; "" where there is
    none."""
    seen = [(over.least, over.most) for _, row in swept for over in row.values.values()]
    if not seen:
        return ""
    x = _levels([c for c, _ in swept])
    y = _upwards(min(low for low, _ in seen), max(high for _, high in seen), swept[0][1].figure.unit)
    parts, said = [axes(x, y)], list[str]()
    for name, shade_ in zip(targets, shades, strict=True):
        points = [(c, row.values[name]) for c, row in swept if name in row.values]
        if points:
            parts.append(_curve(points, shade_, x.scale, y.scale))
            at = (f"{formatting.value(over.median, swept[0][1].figure.unit)} at {c}" for c, over in points)
            said.append(f"{formatting.plain(name, 60)}: {', '.join(at)}")
    return drawing(key, HEIGHT, title, "; ".join(said), parts)


def _levels(levels: Sequence[int]) -> Axis:
    low, high = max(1, min(levels)), max(1, *levels)
    scale = Scale(low, high, LEFT + 16, WIDTH - RIGHT - 16, log=True) if high > low else Scale(0, 2 * low, LEFT, WIDTH)
    return Axis(scale, [(c, f"{c}") for c in levels], "concurrency (requests at a time)")


def _upwards(low: float, high: float, unit: str) -> Axis:
    if unit == "s":
        return seconds_axis(low * 0.9, high * 1.05, FLOOR, TOP, "", upwards=True)
    ticks = even_ticks(high)
    return Axis(Scale(0, max(high, ticks[-1]), FLOOR, TOP), [(v, formatting.short(v)) for v in ticks], unit)


def _curve(points: Sequence[tuple[int, Range]], shade_: str, x: Scale, y: Scale) -> str:
    places = [(x.at(c), over) for c, over in points]
    line = "L".join(f"{number(place)} {number(y.at(over.median))}" for place, over in places)
    whiskers = "".join(
        f"M{number(place)} {number(y.at(over.least))}V{number(y.at(over.most))}" for place, over in places
    )
    dots = "".join(f'<circle cx="{number(p)}" cy="{number(y.at(over.median))}" r="3.5"/>' for p, over in places)
    return (
        f'<path class="line {shade_}" d="M{line}"/><path class="whisker {shade_}" d="{whiskers}"/>'
        f'<g class="dots {shade_}">{dots}</g>'
    )
