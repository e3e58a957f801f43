"""Result as one self-contained page: targets and machine, figures with ratios, and plots."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ..units import size
from . import formatting, ratios
from .plots import against_concurrency, distribution, shade
from .ratios import FigureRow, Range, Verdict
from .samples import Result, Round, Sample, TargetInfo
from .sections import Grid, Section, Sweep, sections
from .style import STYLE
from .svg import text
from .timeline import OUTCOMES, last_end_s, mark, timeline

MOST_NAME, MOST_LINK = 60, 30
BARS_A_PAGE, BARS_A_PLOT = 6000, (24, 110)
SIGNS: dict[Verdict, str] = {"better": "▲", "worse": "▼", "even": "≈"}
GLANCE = ("TTFT p50", "tok/s")
GLANCE_OF = {
    "burst": ("TTFT p50", "TTFT max / median", "tok/s"),
    "stall": ("gap p99 / idle gap p99", "rate kept", "long TTFT"),
    "interactive": ("short TTFT / unloaded",),
    "cancel": ("follow-up TTFT / idle", "wasted tokens a cancel"),
    "overload": ("answered", "refused", "refusal p99", "still waiting at the end"),
    "mixed-length": ("short TTFT p50", "long TTFT"),
    "agents": ("later turn TTFT / first", "prompt tokens reused", "tok/s"),
    "images": ("image TTFT p50", "second question TTFT / first", "longest gap / idle median", "rate kept"),
    "json": ("valid answers", "ended answers", "free rate kept", "constrained TTFT p50", "tok/s"),
    "tools": ("valid calls", "ended answers", "later turn TTFT / first", "TTFT p50", "tok/s"),
}
SWEPT_PLOTS = {"tok/s": "Throughput against concurrency", "TTFT p50": "Median TTFT against concurrency"}
BEGINS = ' class="begins"'
PHASES = {"wait": "waits in the client", "first": "until the first token", "stream": "streams"}


def page(result: Result) -> str:
    """Return the whole document. The same result gives the same text; nothing in it is fetched, run or left
    unescaped."""
    found = sections(result)
    shades = {target.name: shade(i) for i, target in enumerate(result.targets)}
    timelines = sum(len(section.targets) for section in found if isinstance(section, Section))
    low, high = BARS_A_PLOT
    page_ = _Page(result, shades, max(low, min(high, BARS_A_PAGE // max(1, timelines))))
    body = [page_.head(), page_.glance(found), *(page_.section(f"w{i}", part) for i, part in enumerate(found))]
    title = f"treadle bench: {', '.join(formatting.printable(target.name, 40) for target in result.targets)}"
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{text(title, 160)}</title><style>{STYLE}</style></head>\n<body><main>\n"
        f"{chr(10).join(body)}\n</main></body></html>\n"
    )


class _Page:
    """Parts of one page that share the result, the targets' line styles, and the number of bars of a timeline."""

    def __init__(self, result: Result, shades: dict[str, str], bars: int) -> None:
        self._result = result
        self._shades = shades
        self._bars = bars

    # Targets and machine

    def head(self) -> str:
        machine = self._result.machine
        facts = {
            "started": self._result.started,
            "machine": f"{machine.processor}, {machine.cores} cores, {size(machine.memory_bytes)} memory",
            "accelerator": machine.accelerator,
            "system": f"{machine.system}, Python {machine.python}",
            "measured by": f"treadle {machine.treadle}, over the {self._result.endpoint} endpoint",
        }
        listed = "".join(f"<dt>{key}</dt><dd>{text(value)}</dd>" for key, value in facts.items() if value)
        rows = "".join(self._target(target) for target in self._result.targets)
        heads = "".join(
            f"<th>{name}</th>" for name in ("target", "version", "model", "compute path", "URL", "started with")
        )
        return (
            f"<header><h1>treadle bench</h1></header>{self._ending()}<section><h2>What ran where</h2><dl>{listed}</dl>"
            f'<div class="scroll"><table class="targets"><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table>'
            "</div></section>"
        )

    def _ending(self) -> str:
        """Return the banner of a run that ended early; nothing for a whole one."""
        ending = formatting.ending(self._result)
        return f'<p class="ending">{text(ending)}</p>' if ending else ""

    def _target(self, target: TargetInfo) -> str:
        command = f"<code>{text(target.command)}</code>" if target.command else "ran already"
        facts = (text(target.version) or "–", text(target.model), text(target.compute) or "–")
        cells = (*facts, f"<code>{text(target.url)}</code>", command)
        name = f'<td class="name">{self._swatch(target.name)}{text(target.name)}</td>'
        return f"<tr>{name}{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"

    def glance(self, found: Sequence[Section | Sweep]) -> str:
        """Return a workload's main figures, or the two general ones; and failures, if there are any. For a sweep, at
        its highest concurrency."""
        rows = []
        for i, part in enumerate(found):
            section = part.levels[-1][1] if isinstance(part, Sweep) else part
            link = f'<a href="#w{i}">{text(section.name, MOST_LINK)}</a>'
            for row in section.rows:
                if _is_at_a_glance(section.name, row):
                    rows.append((f"{link}<small>{formatting.name(row.figure)}</small>", row))
                    link = "<span></span>"
        if not rows:
            return "<section><h2>At a glance</h2><p>Nothing was measured.</p></section>"
        targets = [target.name for target in self._result.targets]
        return (
            f"<section><h2>At a glance</h2>{self._how_to_read()}{self._table('', targets, rows, 'glance')}"
            f"<details><summary>What the figures are</summary>{MEANINGS}</details></section>"
        )

    def _how_to_read(self) -> str:
        caption = "Medians over the rounds, with the least and most of them. ↓ lower is better, ↑ higher is better."
        if len(self._result.targets) > 1:
            first = text(self._result.targets[0].name, MOST_NAME)
            caption += (
                f" Ratios are to <b>{first}</b> in the same round: ▲ better than it, ▼ worse, ≈ where rounds disagree"
                " or it is within 2 %."
            )
        return f'<p class="soft">{caption}</p>'

    # One workload

    def section(self, key: str, part: Section | Sweep) -> str:
        if isinstance(part, Sweep):
            heading, about = "sweep", _swept_load(part)
            plots = self._swept(key, part)
        else:
            heading, about = part.name, _load(part)
            plots = self._plots(key, part)
        tables = "".join(self._grid(grid) for grid in part.grids) or "<p>There was no round.</p>"
        remarks = "".join(f"<li>{text(remark)}</li>" for remark in part.remarks)
        listed = f'<h3>Answers that were not whole</h3><ul class="remarks">{remarks}</ul>' if remarks else ""
        return (
            f'<section id="{key}"><h2>{text(heading, 120)}</h2><p class="soft">{text(about)}</p>'
            f"{''.join((plots, tables, listed) if isinstance(part, Sweep) else (tables, listed, plots))}</section>"
        )

    def _grid(self, grid: Grid) -> str:
        heading = f"<h3>{text(grid.title)}</h3>" if grid.corner else ""
        return heading + self._table(grid.corner, grid.targets, [(text(label), row) for label, row in grid.rows])

    def _table(
        self, corner: str, targets: Sequence[str], rows: Iterable[tuple[str, FigureRow]], kind: str = "figures"
    ) -> str:
        """Return a table. `rows` are labels as HTML, and figures."""
        heads = "".join(f'<th scope="col">{self._swatch(name)}{text(name, MOST_NAME)}</th>' for name in targets)
        lines = (
            f'<tr{BEGINS if "<a" in label else ""}><th scope="row">{label}</th>'
            f"{''.join(_cell(row, name) for name in targets)}</tr>"
            for label, row in rows
        )
        return (
            f'<div class="scroll"><table class="{kind}"><thead><tr><th scope="col">{corner}</th>{heads}</tr></thead>'
            f"<tbody>{''.join(lines)}</tbody></table></div>"
        )

    def _plots(self, key: str, section: Section) -> str:
        shades = [self._shades[name] for name in section.targets]
        answered = {name: [s for s in _samples(section, name) if s.piece_s] for name in section.targets}
        first = {name: [s.piece_s[0] for s in samples] for name, samples in answered.items()}
        gaps = {name: [gap for s in samples for gap in s.gaps_s] for name, samples in answered.items()}
        drawn = [
            _figure(
                "Time to first token",
                "part of the answers that began by then, all rounds",
                distribution(f"{key}-ttft", f"TTFT, {section.name}", "time to first token", first, shades),
            ),
            _figure(
                "Gaps between pieces of an answer",
                "part of the gaps that are not longer, all rounds",
                distribution(f"{key}-gap", f"gaps, {section.name}", "gap", gaps, shades),
            ),
        ]
        if not any(drawn):
            return self._timelines(key, section)
        return (
            f'{self._legend(section.targets)}<div class="plots">{"".join(drawn)}</div>{self._timelines(key, section)}'
        )

    def _timelines(self, key: str, section: Section) -> str:
        """Return the middle one of the rounds that the first target ran, of every target on the same scale."""
        numbers = sorted({round_.number for round_ in section.rounds})
        if not numbers:
            return ""
        chosen = numbers[(len(numbers) - 1) // 2]
        rounds = {r.target: r for r in section.rounds if r.number == chosen and r.target in self._shades}
        until_s = last_end_s(list(rounds.values()))
        drawn = []
        for i, name in enumerate(section.targets):
            if name in rounds:
                svg, caption = timeline(f"{key}-r{i}", rounds[name], until_s, self._bars)
                drawn.append(
                    f"<figure><figcaption>{text(name, MOST_NAME)}<small>{caption}</small></figcaption>{svg}</figure>"
                )
        heading = f"Requests over time, round {chosen} of {len(numbers)}"
        return f'<h3>{heading}</h3>{_phases(rounds.values())}<div class="plots">{"".join(drawn)}</div>'

    def _swept(self, key: str, sweep: Sweep) -> str:
        shades = [self._shades[name] for name in sweep.targets]
        drawn = [
            _figure(
                title,
                "median over the rounds; the bars reach from their least to their most",
                against_concurrency(f"{key}-{i}", title, sweep.swept(figure), sweep.targets, shades),
            )
            for i, (figure, title) in enumerate(SWEPT_PLOTS.items())
        ]
        return f'{self._legend(sweep.targets)}<div class="plots">{"".join(drawn)}</div>'

    def _legend(self, targets: Sequence[str]) -> str:
        entries = (f"<li>{self._swatch(name)}{text(name, MOST_NAME)}</li>" for name in targets)
        return f'<h3>Plots</h3><ul class="legend">{"".join(entries)}</ul>'

    def _swatch(self, name: str) -> str:
        return _swatch(f'<path class="line {self._shades[name]}" d="M0 6H30"/>')


# Parts without shared state ------------------------------------------------------------------------------------------


def _load(section: Section) -> str:
    info = section.info
    options = ", ".join(f"{key} {value:g}" for key, value in info.options.items())
    at_once = f"{info.concurrency} at a time" if info.concurrency else ""
    limits = f"good: TTFT up to {info.goodput[0]:g} s, then up to {info.goodput[1]:g} s a token"
    count = f"{info.requests:,} requests a round"
    caption = (count, at_once, options, f"seed {info.seed}", limits, f"digest {info.digest}")
    return "; ".join(filter(None, caption))


def _is_at_a_glance(workload: str, row: FigureRow) -> bool:
    if row.figure.name in ("failed", "incomplete", "crashes"):
        return any(values.most for values in row.values.values())
    return row.figure.name in GLANCE_OF.get(workload.split()[0], GLANCE)


def _swept_load(sweep: Sweep) -> str:
    (low, first), (high, last) = sweep.levels[0], sweep.levels[-1]
    info = first.info
    options = ", ".join(f"{key} {value:g}" for key, value in info.options.items() if key != "c")
    requests = f"{info.requests:,} to {last.info.requests:,} requests a round"
    return "; ".join(filter(None, (f"{low} to {high} requests at a time", requests, options, f"seed {info.seed}")))


def _samples(section: Section, target: str) -> Iterable[Sample]:
    return (sample for round_ in section.rounds if round_.target == target for sample in round_.samples)


def _cell(row: FigureRow, name: str) -> str:
    values, unit = row.values.get(name), row.figure.unit
    if values is None:
        return '<td class="cell">–</td>'
    between = formatting.between(values, unit).strip()
    range_ = f"<small>{between}</small> " if between else ""
    chip = _chip(row, row.ratios[name]) if name in row.ratios else ""
    return f'<td class="cell"><b>{formatting.value(values.median, unit)}</b> {range_}{chip}</td>'


def _chip(row: FigureRow, values: Range) -> str:
    """Return a ratio and its verdict, as a sign, a word and a colour."""
    verdict = ratios.judge(values, row.figure.better)
    word = "" if verdict == "even" else f", {verdict}"
    return f'<span class="chip {verdict}">{SIGNS[verdict]} {formatting.ratio(values.median)}{word}</span>'


def _figure(title: str, about: str, svg: str) -> str:
    """Return a captioned figure; nothing if there is nothing to draw."""
    return f"<figure><figcaption>{title}<small>{about}</small></figcaption>{svg}</figure>" if svg else ""


def _phases(rounds: Iterable[Round]) -> str:
    """Return the legend of the bars' colours, and of the signs that occur."""
    outcomes = {sample.outcome for round_ in rounds for sample in round_.samples}
    entries = [(f'<path class="{name}" d="M0 1h30v10h-30z"/>', caption) for name, caption in PHASES.items()]
    entries += [
        (
            f'<path class="first {name}" d="M0 1h15v10h-15z"/><path class="mark {name}" d="{mark(name, 22, 6, 4.5)}"/>',
            name,
        )
        for name in OUTCOMES
        if name in outcomes
    ]
    listed = "".join(f"<li>{_swatch(drawn)}{caption}</li>" for drawn, caption in entries)
    return f'<ul class="legend">{listed}</ul>'


def _swatch(drawn: str) -> str:
    return f'<svg class="swatch" viewBox="0 0 30 12" aria-hidden="true">{drawn}</svg>'


MEANINGS = """<dl>
<dt>TTFT</dt><dd>from sending a request to the first piece of its answer; what the client waited before sending is not
in it</dd>
<dt>gap</dt><dd>between one piece of an answer and the next; a piece is one token or more</dd>
<dt>total</dt><dd>from sending to the end, of whole answers</dd>
<dt>tok/s</dt><dd>tokens of all answers over the time from the first request sent to the last one ended</dd>
<dt>tok/s a stream</dt><dd>per answer, after its first piece: the median</dd>
<dt>goodput</dt><dd>answers within the workload's limits, a second; good answers are their part of all requests</dd>
<dt>refused</dt><dd>429 or 503 before any of the answer</dd>
<dt>failed</dt><dd>another error, also one inside a 200; incomplete: broke off or fell silent</dd>
<dt>left</dt><dd>the client dropped the connection, on purpose</dd>
<dt>client lag</dt><dd>how late the load generator's own event loop was</dd>
</dl>"""
