"""The page: whole in itself, safe whatever servers call themselves, small, and drawn from what was seen."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import pytest

from treadle.bench.html import page
from treadle.bench.samples import Result, TargetInfo

from .results import burst, refused, result, round_of, sample

HOSTILE = '"><script>alert(1)</script><img src=x onerror=alert(2)>\x00\x1b[31m' + "x" * 200
VOID = {"meta"}


class Reader(HTMLParser):
    """Raises where tags are not balanced; collects tags, ids and what is said."""

    def __init__(self, document: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.said: list[str] = []
        self.feed(document)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.said.append(data)

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attrs for name, attrs in self.tags if name == tag]

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.said).split())


def lines(document: str) -> list[str]:
    """The paths of the plots' lines, legends aside."""
    return re.findall(r'<path class="line s\d" d="(M[^"]*V[^"]*|M[^"]*L[^"]*)"', document)


def hostile() -> Result:
    bad = sample(outcome="failed", reason=HOSTILE, id=HOSTILE, role=HOSTILE)
    found = result("a", HOSTILE, rounds={f"trace {HOSTILE}": [round_of("a", 1, sample()), round_of(HOSTILE, 1, bad)]})
    found.targets[1] = TargetInfo(HOSTILE, HOSTILE, HOSTILE, HOSTILE, HOSTILE)
    found.machine.processor = found.machine.accelerator = found.machine.system = HOSTILE
    found.started = found.endpoint = found.rounds[f"trace {HOSTILE}"][0].crash = HOSTILE
    return found


EDGES = {
    "nothing": result("a"),
    "no rounds": result("a", rounds={"burst": []}),
    "an empty round": result("a", rounds={"burst": [round_of("a", 1)]}),
    "one sample": result("a", rounds={"burst": [round_of("a", 1, sample(pieces=1))]}),
    "all refused": result("a", "b", rounds={"burst": [round_of("a", 1, refused()), round_of("b", 1, refused())]}),
    "one target mute": result("a", "b", rounds={"burst": [round_of("a", 1, refused()), round_of("b", 1, sample())]}),
    "no time at all": result("a", rounds={"chat": [round_of("a", 1, sample(0.0, gap_s=0.0))]}),
    "pieces all at once": result("a", rounds={"burst": [round_of("a", 1, sample(1.0, gap_s=0.0), sample(gap_s=0.5))]}),
    "absurd times": result("a", rounds={"burst": [round_of("a", 1, sample(1e300, sent_s=1e308, end_s=1e308))]}),
    "rounds that differ": result("a", "b", rounds={"burst": [round_of("a", 1, sample()), round_of("b", 7, sample())]}),
    "a level alone": result("a", rounds={"sweep c=1": [round_of("a", 1, sample())]}),
    "a level without rounds": result("a", rounds={"sweep c=1": [], "sweep c=4": [round_of("a", 1, sample())]}),
    "level nought": result("a", rounds={"sweep c=0": [round_of("a", 1, sample())]}),
    "eight targets": burst(**{f"server-{i}-{'x' * 200}": 0.1 * (i + 1) for i in range(8)}),
    "hostile": hostile(),
}


@pytest.mark.parametrize("found", EDGES.values(), ids=EDGES)
def test_whatever_was_seen_the_page_is_whole_and_its_plots_are_numbers(found: Result) -> None:
    document = page(found)
    read = Reader(document)
    ids = [attrs["id"] for _, attrs in read.tags if "id" in attrs]
    assert len(ids) == len(set(ids))
    for tag in ("path", "circle", "text"):
        for attrs in read.all(tag):
            drawn = " ".join(attrs.get(name) or "" for name in ("d", "x", "y", "cx", "cy"))
            assert not re.search("nan|inf", drawn), drawn
    for attrs in read.all("svg"):
        assert "role" not in attrs or set((attrs["aria-labelledby"] or "").split()) <= set(ids)


def test_nothing_from_outside_becomes_part_of_the_page() -> None:
    read = Reader(page(hostile()))
    assert not {tag for tag, _ in read.tags} & {"script", "img", "link", "iframe", "object", "a:x", "foreignobject"}
    assert not [name for _, attrs in read.tags for name in attrs if name.startswith("on")]
    assert "<script>alert(1)</script>" in read.text, "it is shown as it is"
    assert not {"\x00", "\x1b"} & set(read.text)


def test_nothing_is_fetched() -> None:
    document = page(burst(a=[0.1, 0.2], b=[0.2, 0.3]))
    read = Reader(document)
    assert not [name for _, attrs in read.tags for name in attrs if name in ("src", "srcset", "action", "data")]
    assert all((attrs["href"] or "").startswith("#") for attrs in read.all("a"))
    style = document[document.index("<style>") : document.index("</style>")]
    assert "url(" not in style
    assert "@import" not in style
    assert {"http-equiv": "Content-Security-Policy", "content": "default-src 'none'; style-src 'unsafe-inline'"} in (
        read.all("meta")
    )


def test_the_same_result_gives_the_same_page() -> None:
    assert page(burst(a=[0.1, 0.2], b=0.3)) == page(burst(a=[0.1, 0.2], b=0.3))


def test_it_says_what_ran_where() -> None:
    said = Reader(page(burst(ours=0.1))).text
    for part in (
        "AMD EPYC, 2 cores, 25.0 GiB memory",
        "2026-01-02T03:04:05+00:00",
        "serve --port 8000",
        "treadle 0.1.0",
    ):
        assert part in said


def test_a_ratio_s_verdict_is_a_word_and_a_sign_and_not_a_colour_alone() -> None:
    document = page(burst(ours=[0.2, 0.2], slow=[0.4, 0.4], quick=[0.1, 0.1], same=[0.2, 0.2]))
    assert '<span class="chip worse">▼ 2.00×, worse</span>' in document
    assert '<span class="chip better">▲ 0.50×, better</span>' in document
    assert '<span class="chip even">≈ 1.00×</span>' in document


def test_one_target_is_compared_with_nobody() -> None:
    document = page(burst(ours=0.2))
    assert 'class="chip' not in document
    assert "Ratios are to" not in document


def test_ten_thousand_requests_are_a_small_page() -> None:
    """Under 3 MB; lines have at most 200 steps, bars are thinned, and the page says so."""
    many = [sample(0.1 + i / 1e4, 0.01 + i / 1e6, 32, id=f"{i}", sent_s=i / 100) for i in range(1250)]
    found = result("a", "b", rounds={f"w{i}": [round_of(t, 1, *many) for t in "ab"] for i in range(4)})
    document = page(found)
    assert len(document.encode()) < 3_000_000
    drawn = lines(document)
    assert len(drawn) == 4 * 2 * 2
    assert max(path.count("H") for path in drawn) <= 200
    assert "1,250 ok; 105 of 1,250 requests are drawn, one in 12" in document


def test_many_short_workloads_are_a_small_page_too() -> None:
    some = [sample(0.1, 0.01, 8, outcome="failed", reason="r" * 500, id="i" * 200) for _ in range(100)]
    found = result("a", rounds={f"w{i}": [round_of("a", 1, *some)] for i in range(100)})
    assert len(page(found).encode()) < 3_000_000


def test_the_greatest_time_is_where_a_line_ends() -> None:
    """Thinned or not: the tail is what plots are looked at for."""
    times = [0.01] * 999 + [0.5]
    document = page(result("a", rounds={"chat": [round_of("a", 1, *(sample(t, pieces=1) for t in times))]}))
    (path,) = lines(document)
    x, y = re.findall(r"H([\d.]+)V([\d.]+)$", path)[0]
    assert float(x) == pytest.approx(520 - 26)
    assert float(y) == 14


def test_every_request_of_a_small_round_is_a_bar_with_its_phases() -> None:
    waited = sample(0.5, 0.1, 4, due_s=0.0, sent_s=1.0, id="late")
    document = page(result("a", rounds={"burst": [round_of("a", 1, waited, refused(id="turned away"))]}))
    (bar,) = re.findall(r"<g><title>(late[^<]*)</title>(.*?)</g>", document)
    assert bar[0] == "late: ok, 1.00 s in the client, TTFT 500 ms, 800 ms in all"
    assert re.findall('class="([a-z]+)"', bar[1]) == ["wait", "first", "stream"]
    (other,) = re.findall(r"<g><title>turned away: refused \(503 busy\)[^<]*</title>(.*?)</g>", document)
    assert re.findall('class="([a-z ]+)"', other) == ["first refused", "mark refused"]


def test_targets_share_the_time_axis_of_a_timeline() -> None:
    """A server that is twice as quick has bars that are half as long."""
    document = page(burst(ours=1.0, theirs=2.0))
    widths = [float(w) for w in re.findall(r'<path class="first" d="M[\d. ]+h([\d.]+)v', document)]
    legend, ours, _, theirs, _ = widths
    assert legend == 30
    assert theirs == pytest.approx(2 * ours, rel=0.01)


def test_a_sweep_is_drawn_against_concurrency() -> None:
    rounds = {
        f"sweep c={c}": [round_of(t, k, sample(0.01 * c * k), sample(0.01 * c)) for k in (1, 2) for t in ("a", "b")]
        for c in (1, 2, 4, 8)
    }
    document = page(result("a", "b", rounds=rounds))
    assert "Throughput against concurrency" in document
    assert "Median TTFT against concurrency" in document
    assert document.count("<circle") == 2 * 2 * 4
    assert len(lines(document)) == 4
    assert "1 to 8 requests at a time" in document


def test_why_answers_were_not_whole_is_told() -> None:
    bad = round_of("a", 1, sample(), refused(), crash="killed by signal 9")
    said = Reader(page(result("a", rounds={"burst": [bad]}))).text
    assert "a: 1 × refused: 503 busy" in said
    assert "a: ended in round 1: killed by signal 9" in said


def test_a_run_that_ended_early_has_a_banner() -> None:
    rounds = {"burst": [round_of("a", 1, sample())]}
    ended = result("a", rounds=rounds, stopped=HOSTILE, rounds_done=1, rounds_planned=3)
    document = page(ended)
    assert "after 1 of 3 rounds" in " ".join(Reader(document).said)
    assert "<script>" not in document
    assert 'class="ending"' not in page(burst(a=0.1))
