"""The scripts of docs/reliability.md: the page they write, and the figures that they make of what they measured."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from benchmarks.scored.figures import Figure, as_seen, auc, counted, quantile
from benchmarks.scored.page import TARGETS, anchor, written
from benchmarks.scored.results import row, save
from benchmarks.scored.supply import locked, packages

ROOT = Path(__file__).parents[2]
OURS = [Figure("slots left", "0", True), Figure("late | early", "9 of 10", False), Figure("memory", "7 MB")]
THEIRS = [Figure("slots left", "12", False)]


def result(tmp_path: Path, *rows: dict[str, object], program: str = "reliability.py run tiny") -> dict[str, Any]:
    file = tmp_path / "result.json"
    save(file, f"python benchmarks/{program}", rows)
    found: dict[str, Any] = json.loads(file.read_text())
    return found


def lines(page: str, name: str) -> list[str]:
    """The lines of one target's section."""
    return page.partition(f"## {name} ")[2].partition("\n## ")[0].splitlines()


def test_a_row_has_each_servers_figures_and_judges_treadles_alone(tmp_path: Path) -> None:
    page = written([result(tmp_path, row("R1", "mlx-lm", THEIRS), row("R1", "treadle", OURS))])
    found = lines(page, "R1")
    assert "|  | treadle | mlx-lm |" in found
    assert "| slots left | 0 | 12 |" in found
    assert r"| late \| early | **9 of 10** | - |" in found
    assert "| memory | 7 MB | - |" in found


def test_the_summary_counts_what_is_met_and_shows_what_is_not(tmp_path: Path) -> None:
    page = written([result(tmp_path, row("R1", "treadle", OURS), row("S2", "treadle", OURS[:1]))])
    summary = page.partition("\n## ")[0]
    assert re.search(r"R1 Clients that leave\].*\| \*\*1 of 2\*\* \|", summary)
    assert re.search(r"S2 Web pages\].*\| 1 of 1 \|", summary)
    assert re.search(r"R4 Poison\].*\| not measured \|", summary)


def test_every_row_says_how_and_when_and_on_what_it_was_measured(tmp_path: Path) -> None:
    found = lines(written([result(tmp_path, row("R1", "treadle", OURS))]), "R1")
    assert re.fullmatch(
        r"`python .* run tiny`, \d{4}-\d\d-\d\d, commit \w+, .* cores, load [\d.]+\.", found[-1] or found[-2]
    )


def test_the_last_result_of_a_row_counts(tmp_path: Path) -> None:
    earlier = result(tmp_path, row("R1", "treadle", OURS))
    later = result(tmp_path, row("R1", "treadle", [Figure("slots left", "3", False)]))
    assert "| slots left | **3** |" in lines(written([earlier, later]), "R1")


def test_programs_that_measure_one_row_stand_together(tmp_path: Path) -> None:
    chaos = result(tmp_path, row("R8", "treadle", [Figure("chaos: problems", "0", True)]), program="chaos.py --seed 1")
    soak = result(tmp_path, row("R8", "treadle", [Figure("soak: problems", "0", True)]), program="soak.py OUT")
    found = lines(written([chaos, soak]), "R8")
    assert {"| chaos: problems | 0 |", "| soak: problems | 0 |"} <= set(found)
    assert [line.partition("`")[2].partition("`")[0] for line in found if line.startswith("`")] == [
        "python benchmarks/chaos.py --seed 1",
        "python benchmarks/soak.py OUT",
    ]


def test_targets_that_were_not_measured_have_their_command() -> None:
    page = written([])
    assert [
        name for name in TARGETS if "Not measured yet: `python benchmarks/" not in "\n".join(lines(page, name))
    ] == []


def test_the_page_that_is_kept_has_every_target_as_the_script_writes_it() -> None:
    page = (ROOT / "docs" / "reliability.md").read_text(encoding="utf-8")
    headings = re.findall(r"^## (.*)$", page, re.MULTILINE)
    assert headings == [f"{name} {title}" for name, (title, _) in TARGETS.items()]
    assert [heading for heading in headings if f"(#{anchor(heading)})" not in page] == []


def test_a_probers_long_wait_stands_for_those_that_it_did_not_send() -> None:
    assert as_seen([0.001, 0.05], 0.02) == pytest.approx([0.001, 0.05, 0.03, 0.01])


def test_the_chance_to_tell_two_apart() -> None:
    assert auc([2, 3], [0, 1]) == 1
    assert auc([1, 1], [1, 1]) == 0.5


def test_small_statistics() -> None:
    assert quantile([3, 1, 2], 0.5) == 2
    assert counted(Counter({"503": 1200, "200": 3})) == "3 200, 1,200 503"
    assert counted(Counter()) == "none"


def test_packages_are_counted_by_their_hashes(tmp_path: Path) -> None:
    text = "one==1 ; python_version < '4' \\\n    --hash=sha256:aa \\\n    --hash=sha256:bb\ntwo==2\n"
    assert packages(text) == {"one": 2, "two": 0}
    (tmp_path / "requirements-cpu.txt").write_text(text)
    assert locked(tmp_path) == [
        Figure("packages in `deploy/requirements-cpu.txt`", "2, without a hash: two", met=False)
    ]
