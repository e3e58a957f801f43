"""Timeline of a round: its requests as bars, with their waits and their outcomes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from . import formatting
from .samples import Outcome, Round, Sample
from .svg import BOTTOM, LEFT, RIGHT, TOP, WIDTH, Axis, Scale, axes, drawing, number, seconds_axis, text

TALLEST, LOWEST, HEIGHT = 15.0, 2.4, 260.0
LABELLED = 18
MIN_TITLE_HEIGHT = 160.0
OUTCOMES: tuple[Outcome, ...] = ("refused", "failed", "incomplete", "left")


def timeline(key: str, round_: Round, until_s: float, max_bars: int) -> tuple[str, str]:
    """Draw `round_` up to `until_s`, with at most `max_bars` bars. Returns the SVG and its caption."""
    samples = sorted(round_.samples, key=lambda sample: (sample.due_s, sample.sent_s))
    if not samples:
        return "", "no request was sent"
    every = -(-len(samples) // max_bars)
    drawn = samples[::every]
    row = min(max(HEIGHT / len(drawn), LOWEST), TALLEST)
    floor = TOP + row * len(drawn)
    x = seconds_axis(0.0, until_s, LEFT, WIDTH - RIGHT, "seconds since the start of the round")
    title = f"{round_.target}: requests of round {round_.number} over time"
    title_beside = "" if _labelled(drawn) or floor < MIN_TITLE_HEIGHT else "requests, as due"
    parts = [axes(x, Axis(Scale(0, 1, floor, TOP), [], title_beside))]
    parts += (_bar(s, i, row, x.scale) for i, s in enumerate(drawn))
    parts += _labels(drawn, row)
    return drawing(key, floor + BOTTOM, title, outcomes(round_), parts), _caption(round_, every, len(drawn))


def outcomes(round_: Round) -> str:
    """Count the outcomes of its requests, in words."""
    counts = Counter[str](sample.outcome for sample in round_.samples)
    return ", ".join(f"{counts[name]:,} {name}" for name in ("ok", *OUTCOMES) if counts[name]) or "no request"


def last_end_s(rounds: Sequence[Round]) -> float:
    """Return the time at which the last request of any of them ended."""
    return max((s.sent_s + s.end_s for round_ in rounds for s in round_.samples), default=0.0)


def _caption(round_: Round, every: int, drawn: int) -> str:
    if every == 1:
        return outcomes(round_)
    return f"{outcomes(round_)}; {drawn:,} of {len(round_.samples):,} requests are drawn, one in {every:,}"


def _bar(sample: Sample, index: int, row: float, x: Scale) -> str:
    top, height = TOP + index * row, row * 0.8
    end = sample.sent_s + sample.end_s
    first = None if sample.ttft_s is None else sample.sent_s + sample.ttft_s
    parts = [_piece("wait", sample.due_s, sample.sent_s, top, height, x)]
    if first is None:
        parts.append(_piece(f"first {sample.outcome}", sample.sent_s, end, top, height, x))
    else:
        parts.append(_piece("first", sample.sent_s, first, top, height, x))
        parts.append(_piece("stream", first, end, top, height, x))
    if sample.outcome != "ok":
        parts.append(_mark(sample.outcome, x.at(end), top + height / 2, min(max(height / 2, 2.2), 4.5)))
    return f"<g><title>{text(_describe(sample), 160)}</title>{''.join(parts)}</g>"


def _piece(kind: str, start_s: float, end_s: float, top: float, height: float, x: Scale) -> str:
    left, wide = x.at(start_s), x.at(end_s) - x.at(start_s)
    if wide < 0.05:
        return ""
    across, down = number(max(wide, 0.8)), number(height)
    return f'<path class="{kind}" d="M{number(left)} {number(top)}h{across}v{down}h-{across}z"/>'


def _mark(outcome: str, x: float, y: float, r: float) -> str:
    return f'<path class="mark {outcome}" d="{mark(outcome, x, y, r)}"/>'


def mark(outcome: str, x: float, y: float, r: float) -> str:
    """Return the path of an outcome's sign: a ring, a cross, a triangle, a bar."""
    a, b, size, twice = number(x), number(y), number(r), number(2 * r)
    match outcome:
        case "refused":
            return f"M{number(x - r)} {b}a{size} {size} 0 1 0 {twice} 0a{size} {size} 0 1 0-{twice} 0z"
        case "failed":
            return f"M{number(x - r)} {number(y - r)}l{twice} {twice}m-{twice} 0l{twice}-{twice}"
        case "incomplete":
            return f"M{a} {number(y - r)}l{size} {twice}h-{twice}z"
        case _:
            return f"M{a} {number(y - r)}v{twice}"


def _describe(sample: Sample) -> str:
    """Describe a bar in words."""
    wait = sample.sent_s - sample.due_s
    waited = f", {formatting.seconds(wait)} in the client" if wait > 0.001 else ""
    first = "" if sample.ttft_s is None else f", TTFT {formatting.seconds(sample.ttft_s)}"
    reason = f" ({formatting.printable(sample.reason, 60)})" if sample.reason else ""
    role = "" if sample.role == "all" else f", {formatting.printable(sample.role, 24)}"
    total = formatting.seconds(sample.end_s)
    return f"{formatting.printable(sample.id, 24)}{role}: {sample.outcome}{reason}{waited}{first}, {total} in all"


def _labelled(drawn: Sequence[Sample]) -> bool:
    return len(drawn) <= LABELLED and len({sample.role for sample in drawn}) > 1


def _labels(drawn: Sequence[Sample], row: float) -> Iterator[str]:
    """Return the roles beside the bars, if there are several and bars are high enough."""
    for i, sample in enumerate(drawn if _labelled(drawn) else ()):
        y = number(TOP + i * row + row * 0.4 + 3.5)
        yield f'<text class="tiny" x="{LEFT - 5}" y="{y}" text-anchor="end">{text(sample.role, 11)}</text>'
