"""What a terminal shows: results, comparisons, and a run while it goes."""

from __future__ import annotations

import io
from typing import Any

import msgspec
from rich.console import Console, RenderableType

from treadle.bench.compare import compare
from treadle.bench.samples import TargetInfo
from treadle.bench.tables import LiveTable, comparison_table, result_table

from .results import burst, refused, result, round_of, sample


def text(shown: RenderableType, width: int = 160, **given: Any) -> str:
    file = io.StringIO()
    Console(file=file, width=width, **given).print(shown)
    return file.getvalue()


def line(shown: str, start: str) -> str:
    """The one line that starts with `start`."""
    (found,) = [line for line in shown.splitlines() if line.strip().startswith(start)]
    return " ".join(found.replace("│", " ").split())


# Results ----------------------------------------------------------------------------------------------------------


def test_targets_stand_side_by_side_with_their_ratio_to_the_first() -> None:
    shown = text(result_table(burst(ours=[0.1, 0.2, 0.3], theirs=[0.3, 0.4, 0.6])))
    assert line(shown, "TTFT p50") == "TTFT p50 ↓ 200 ms (100..300) 400 ms (300..600) 2.00× (2.00..3.00) −"
    assert "Ratios are to ours in the same round" in shown


def test_one_target_has_neither_ratio_nor_a_word_on_it() -> None:
    shown = text(result_table(burst(ours=0.1)))
    assert line(shown, "TTFT p50") == "TTFT p50 ↓ 100 ms"
    assert "atio" not in shown


def test_rows_that_say_nothing_are_not_there() -> None:
    shown = text(result_table(burst(ours=0.1)))
    assert "failed" not in shown
    assert "TTFT p99" not in shown


def test_why_answers_were_not_whole_is_listed_below() -> None:
    bad = [refused(), refused(), sample(outcome="failed", reason="500 out of memory"), sample()]
    rounds = [round_of("a", 1, *bad), round_of("a", 2, *bad, crash="killed by signal 9")]
    shown = text(result_table(result("a", rounds={"burst": rounds})))
    assert "a: 4 × refused: 503 busy\n" in shown
    assert "a: 2 × failed: 500 out of memory\n" in shown
    assert "a: ended in round 2: killed by signal 9\n" in shown


def test_a_run_that_ended_early_says_so_below() -> None:
    rounds = {"burst": [round_of("a", 1, sample())]}
    ended = result("a", rounds=rounds, stopped="no more", rounds_done=1, rounds_planned=3)
    assert "The run ended early, after 1 of 3 rounds: no more" in text(result_table(ended))
    whole = msgspec.structs.replace(ended, stopped="")
    assert "note: the second run ended early: no more" in text(comparison_table(compare(whole, ended)))
    assert "ended early" not in text(result_table(burst(ours=0.1)))


def test_many_different_reasons_are_cut_short_and_said_to_be() -> None:
    bad = [sample(outcome="failed", reason=f"request {i} is lost") for i in range(50)]
    shown = text(result_table(result("a", rounds={"burst": [round_of("a", 1, *bad)]})))
    assert shown.count("is lost") == 6
    assert "a: 44 more reasons" in shown


def test_a_sweep_is_one_table_a_figure_with_concurrency_as_rows() -> None:
    """From the least to the most, in whatever order they were kept."""
    rounds = {f"sweep c={c}": [round_of("a", 1, sample(c / 100), sample(c / 100))] for c in (16, 1, 2)}
    shown = text(result_table(result("a", rounds=rounds)))
    table = shown[shown.index("sweep: TTFT p50") :].splitlines()[3:6]
    assert [" ".join(row.replace("│", " ").split()) for row in table] == ["1 10.0 ms", "2 20.0 ms", "16 160 ms"]
    assert "sweep over 3 concurrencies" in shown


def test_a_trace_with_a_sweep_s_name_is_no_level_of_it() -> None:
    rounds = {f"sweep c={name}": [round_of("a", 1, sample())] for name in ("1", "many", "-2")}
    shown = text(result_table(result("a", rounds=rounds)))
    assert "sweep over 1 concurrencies" in shown
    assert "sweep c=many" in shown
    assert "sweep c=-2" in shown


def test_names_and_reasons_are_neither_markup_nor_control_characters() -> None:
    name = "[bold red]x[/]\x1b[31m\x07"
    bad = sample(outcome="failed", reason="line one\nline [link=http://x]two[/link]\x1b]0;title\x07")
    shown = text(result_table(result(name, rounds={f"trace {name}": [round_of(name, 1, bad)]})), force_terminal=False)
    assert "[bold red]x[/]" in shown
    assert "[link=http://x]two[/link]" in shown
    assert "\x1b" not in shown
    assert "\x07" not in shown


def test_many_targets_with_long_names_fit_a_narrow_terminal() -> None:
    """In several tables, each with the first target; every value is readable."""
    shown = text(result_table(burst(**{f"server_{i}_{'x' * 200}": 0.1 * (i + 1) for i in range(8)})), width=80)
    assert max(map(len, shown.splitlines())) <= 80
    assert shown.count("TTFT p50") == 7
    for value in ("100 ms", "200 ms", "800 ms"):
        assert value in shown


def test_nothing_measured_is_said() -> None:
    assert text(result_table(result("a"))).strip() == "no workload was run"
    assert "rounds: 0" in text(result_table(result("a", rounds={"burst": []})))
    assert line(text(result_table(result("a", rounds={"burst": [round_of("a", 1)]}))), "answered") == "answered 0"


# Comparisons ------------------------------------------------------------------------------------------------------


def test_a_comparison_says_pass_or_fail_by_figure_and_in_all() -> None:
    same = text(comparison_table(compare(burst(a=0.4), burst(a=0.4))))
    assert "FAIL" not in same
    assert "burst, a" in same
    assert "failed" not in same, "it was 0 and stayed 0"
    assert same.splitlines()[-1].startswith("PASS: ")
    worse = text(comparison_table(compare(burst(a=0.4), burst(a=0.8))))
    assert line(worse, "TTFT p50") == "TTFT p50 ↓ 400 ms 800 ms 2.00× 1.10× FAIL"
    assert "FAIL: " in worse
    assert "burst, a: TTFT p50" in worse.splitlines()[-1]


def test_notes_stand_between_the_figures_and_the_verdict() -> None:
    lines = text(comparison_table(compare(burst(a=0.4), burst(b=0.4)))).splitlines()
    assert lines[-2] == "note: a is called b in the second run"


def test_a_figure_that_is_gone_is_a_failure_that_can_be_read() -> None:
    gone = result("a", rounds={"burst": [round_of("a", 1, refused())]})
    shown = text(comparison_table(compare(burst(a=0.4), gone)))
    assert line(shown, "TTFT p50") == "TTFT p50 ↓ 400 ms – – 1.10× FAIL"


# While it runs ----------------------------------------------------------------------------------------------------


def drive(live: LiveTable, target: str = "a", number: int = 1) -> None:
    samples = [sample(0.1), sample(0.3), sample(0.5), refused()]
    live.begin("burst", target, number, len(samples))
    for one in samples:
        live.sample(one)
    live.end(round_of(target, number, *samples))


def test_without_a_terminal_each_round_is_one_plain_line() -> None:
    file = io.StringIO()
    with LiveTable(Console(file=file, width=40)) as live:
        drive(live, number=1)
        drive(live, "b" * 100, number=2)
    first, second = file.getvalue().splitlines()
    assert first == "burst, a, round 1: 4/4 (3 ok, 1 refused), TTFT p50 300 ms, 15.0 tok/s, 1 s"
    assert ", round 2: 4/4 " in second
    assert "\x1b" not in file.getvalue()


def test_a_crash_is_in_its_line_and_markup_is_not() -> None:
    file = io.StringIO()
    with LiveTable(Console(file=file)) as live:
        live.begin("burst", "[red]a", 1, 3)
        live.end(round_of("[red]a", 1, crash="killed\nby signal 9"))
    assert (
        file.getvalue() == "burst, [red]a, round 1: 0/3 (–), TTFT p50 –, – tok/s, 1 s; it ended: killed by signal 9\n"
    )


def test_a_sample_costs_no_drawing() -> None:
    """The load generator shares the process: between refreshes nothing is written."""
    file = io.StringIO()
    live = LiveTable(Console(file=file, force_terminal=True))
    live.begin("burst", "a", 1, 1000)
    for _ in range(1000):
        live.sample(sample())
    assert file.getvalue() == ""


def test_on_a_terminal_the_table_shows_the_last_round_of_each_target_and_goes_away() -> None:
    file = io.StringIO()
    with LiveTable(Console(file=file, force_terminal=True, width=120)) as live:
        drive(live, "ours", 1)
        drive(live, "theirs", 1)
        drive(live, "ours", 2)
    frames = file.getvalue()
    last = frames[frames.rindex("TTFT p50") :]
    assert "ours" in last
    assert "theirs" in last
    assert "3 ok, 1 refused" in last
    assert frames.rstrip().endswith(("\x1b[2K", "\x1b[?25h")), "the table was wiped"


def test_before_the_first_round_it_says_what_it_waits_for() -> None:
    file = io.StringIO()
    with LiveTable(Console(file=file, force_terminal=True), clock=lambda: 7.0):
        pass
    assert "getting the targets ready: 0 s" in file.getvalue()


def test_samples_after_no_round_do_not_break_it() -> None:
    with LiveTable(Console(file=io.StringIO())) as live:
        live.sample(sample())
        live.end(round_of("a", 1))


def test_a_target_that_ran_nothing_has_no_column() -> None:
    one = burst(a=0.1)
    one.targets.append(TargetInfo("idle", "http://x", "m"))
    assert "idle" not in text(result_table(one))
