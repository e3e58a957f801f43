"""docs/compatibility.md, as `benchmarks/compatibility.py` writes it, and the programs behind it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from benchmarks import compatibility
from benchmarks.clients import __main__ as command
from benchmarks.clients import agent, programs, recorded, suites
from benchmarks.clients.programs import PROGRAMS, Place
from benchmarks.clients.results import Results, Row

from treadle.cli.connect.clients import CLIENTS


def test_the_page_is_up_to_date() -> None:
    assert compatibility.PAGE.read_text("utf-8") == compatibility.page(compatibility.found())


def test_a_failed_case_is_red_with_its_reason_and_other_servers_have_columns() -> None:
    ours = [Row("suite", "s", "1", "chat", "a", True), Row("client", "c", "2", "chat", "edit", False, "no | edit")]
    theirs = [Row("suite", "s", "1", "chat", "a", False, "status 500"), Row("sdk", "x", "1", "chat", "b", True)]
    results = [Results("treadle", "0", "abc", "day", ours, ["Y"]), Results("mlx-lm", "1", "abc", "day", theirs, [])]
    page = compatibility.page(results)
    assert "| c | 2 | chat | 🟥 edit | no \\| edit |" in page
    assert "| s | 1 | chat | 🟩 1 of 1 | 🟥 0 of 1 |" in page
    assert "| x | 1 | chat | not run | 🟩 1 of 1 |" in page
    assert "mlx_lm.server, failed:\n\n- s, a: status 500\n" in page
    assert "Not installed in this run: Y." in page


def test_an_api_that_a_server_does_not_have_is_neither_green_nor_red() -> None:
    rows = [Row("suite", "s", "1", "Anthropic", case, False, "HTTP 404 (expected [200])") for case in "ab"]
    ours = Results("treadle", "0", "abc", "day", [*rows, Row("suite", "s", "1", "Anthropic", "c", True)], [])
    assert "| s | 1 | Anthropic | ⬜ no such route |" in compatibility.page([ours])
    ours.rows[0].detail = "HTTP 500"
    assert "| s | 1 | Anthropic | 🟥 1 of 3 |" in compatibility.page([ours])


def test_results_are_read_as_they_were_written(tmp_path: Path) -> None:
    results = Results("treadle", "0", "abc", "day", [Row("sdk", "x", "1", "chat", "b", True, "ü", 0.5)], [])
    results.save(tmp_path / "new" / "file.json")
    assert Results.load(tmp_path / "new" / "file.json") == results


def test_every_program_is_a_client_that_connect_knows() -> None:
    assert {program.client for program in PROGRAMS} <= CLIENTS.keys()
    markers = [program.marker for program in PROGRAMS] + [one["marker"] for one in recorded.recordings()]
    assert not any(one in other for one in markers for other in markers if one is not other)


def test_an_agents_turns_follow_the_results_that_it_has() -> None:
    script = agent.Script([("read", {"path": "x"}), ("run", {})], "done")
    assert script.answer(0) == 'Step 1.<tool_call>{"name": "read", "arguments": {"path": "x"}}</tool_call>'
    assert [script.answer(2), script.answer(9)] == ["done", "done"]


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path, "http://127.0.0.1:1", tmp_path / "log", tmp_path / "scripts.json", "")


def played(place: Place, *, edits: bool = True, output: str = programs.LAST, steps: int = 4) -> list[str]:
    """The faults of a run of the first program, which left these traces."""
    program = PROGRAMS[0]
    project = place.project(program)
    project.mkdir(parents=True)
    for name in ("colour.txt", "checked"):
        (project / name).write_text(programs.AFTER if edits else programs.BEFORE)
    notes = [{"step": step, "checked": step == 3, "characters": 9} for step in range(steps)]
    return programs._faults(program, place, output, notes, {"POST /v1/messages 200": steps})


def test_a_run_with_all_its_traces_passes(place: Place) -> None:
    assert played(place) == []


def test_a_run_without_an_edit_fails(place: Place) -> None:
    assert played(place, edits=False) == ["the file has no edit", "the command did not see the edit"]


def test_a_run_that_ends_early_fails(place: Place) -> None:
    assert played(place, output="Step 1.", steps=2) == [
        "the last words were not shown",
        "the command's output did not come back",
        "not all of 4 turns took place",
    ]


def test_a_refused_request_fails_a_run(place: Place) -> None:
    place.log.write_text(
        "not json\n"
        + "".join(json.dumps({"method": "POST", "path": "/v1/messages", "status": s}) + "\n" for s in (200, 404, 404))
    )
    statuses = programs._statuses(place.log, 0)
    assert statuses == {"POST /v1/messages 200": 1, "POST /v1/messages 404": 2}


def test_a_program_that_does_not_end_is_ended(place: Place, tmp_path: Path) -> None:
    output, error = programs.limited(
        ["sh", "-c", "echo begun; sleep 60 & wait"], tmp_path, {"PATH": "/usr/bin:/bin"}, 0.3
    )
    assert output == "begun\n"
    assert error.startswith("no end within 0 s")


COMPLY = """#!{python}
import json, sys
again = "--filter" in sys.argv
tests = [("good", "passed", []), ("odd", "passed" if again else "failed", ["empty"]), ("image", "skipped", [])]
tests += [("bad", "failed", ["content.0: {{'text': 'x'}} is not valid under any", "status"])]
chosen = sys.argv[sys.argv.index("--filter") + 1] if again else ""
found = [dict(id=i, name=i, status=s, errors=e) for i, s, e in tests if chosen in i]
print(json.dumps(dict(results=found)))
"""


def test_a_test_of_llm_comply_that_fails_is_run_once_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "llm-comply"
    program.write_text(COMPLY.format(python=sys.executable))
    program.chmod(0o755)
    monkeypatch.setattr(suites, "_version", lambda python, package: "1")
    rows = list(suites.comply(tmp_path / "python", "http://127.0.0.1:1", "m", "anthropic"))
    assert [(row.case, row.passed, row.api) for row in rows] == [
        ("good", True, "Anthropic"),
        ("odd", True, "Anthropic"),
        ("bad", False, "Anthropic"),
    ]
    assert rows[2].detail == "content.0: the value is not valid under any; status"


def test_a_run_of_one_part_keeps_the_rows_of_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "FOLDER", tmp_path)
    client, old, new = (Row(kind, "x", "1", "chat", kind, True) for kind in ("client", "sdk", "sdk"))
    old.detail = "old"
    Results("treadle", "0", "a", "day", [client, old], ["Y"]).save(tmp_path / "treadle.json")
    command._save(Results("treadle", "1", "b", "day", [new], []), ["sdks"])
    saved = Results.load(tmp_path / "treadle.json")
    assert (saved.rows, saved.missing, saved.commit) == ([client, new], ["Y"], "b")
