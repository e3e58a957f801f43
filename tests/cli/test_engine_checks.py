"""`doctor --check` end to end: on a tiny model it passes, and each fault of an engine is found and named."""

from __future__ import annotations

import asyncio
import io
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest
from rich.console import Console

from tests.support.tiny import make_tiny
from treadle.cli.check_report import CheckReport, Outcome
from treadle.cli.engine_checks import Bounds, check_model, first_difference, reach
from treadle.cli.engine_trial import CompletedRun, make_prompt
from treadle.cli.findings import Finding, Findings, Mark
from treadle.config import Settings
from treadle.engine.generation import Generation
from treadle.text import TextModel

ROOT = Path(__file__).parents[2]
ALL = ["start", "fidelity", "cancel", "crash", "burst", "stop"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("check") / "model")


def check(model: Path, bounds: Bounds | None = None, **settings: float) -> Mapping[str, Outcome]:
    """The outcomes by name. No child is left behind."""
    wanted = Settings.from_mapping({"model": str(model), **settings})
    report = asyncio.run(check_model(wanted, Console(file=io.StringIO()), bounds))
    assert not [child for child in psutil.Process().children() if "treadle.engine.child" in child.cmdline()]
    return {outcome.name: outcome for outcome in report.outcomes}


def with_owner(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr("treadle.compose.engine.OWNER_ENTRY", f"tests.cli.owners:{name}")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


def test_a_tiny_model_passes_and_the_report_can_be_pasted(folder: Path) -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "treadle", "doctor", str(folder), "--check"],
        capture_output=True,
        text=True,
        timeout=110,
        env={**os.environ, "OMP_NUM_THREADS": "2"},
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    lines = ran.stdout.splitlines()
    assert lines[0] == "### Treadle check: PASS"
    assert [line.split(" | ")[0].strip("| ") for line in lines[-len(ALL) :]] == ALL
    assert "batched = alone, token for token" in ran.stdout
    assert "the stream went on with" in ran.stdout
    assert str(folder.parent) not in ran.stdout


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What `--json` says of a model with a short context."""
    folder = make_tiny(tmp_path_factory.mktemp("short") / "model", context=64)
    ran = subprocess.run(
        [sys.executable, "-m", "treadle", "doctor", str(folder), "--check", "--json"],
        capture_output=True,
        text=True,
        timeout=110,
    )
    said: dict[str, Any] = json.loads(ran.stdout)
    return said


def test_as_json_it_holds_the_report_and_the_outcomes(short: dict[str, Any]) -> None:
    assert list(short["check"]["outcomes"]) == ALL
    assert short["check"]["ok"] is True
    assert short["check"]["engine"]["architecture"] == "llama"
    assert short["sections"]["MLX"]["device"]["mark"] == "ok"


def test_a_short_context_shortens_the_prompts(short: dict[str, Any]) -> None:
    outcomes = short["check"]["outcomes"]
    assert {outcome["mark"] for outcome in outcomes.values()} <= {"ok", "warn"}
    assert "8 prompts of 3 to 40 tokens" in outcomes["fidelity"]["said"]


def test_a_batch_that_changes_answers_fails_with_the_first_difference(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_owner(monkeypatch, "unfaithful")
    outcomes = check(folder)
    assert outcomes["fidelity"].mark is Mark.FAIL
    assert "7 differ: prompt of 8 at token 1: " in outcomes["fidelity"].text
    assert "2.0000 nats apart" in outcomes["fidelity"].text
    assert outcomes["stop"].mark is Mark.OK


def test_a_difference_between_equally_likely_tokens_is_a_remark(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_owner(monkeypatch, "tied")
    found = check(folder)["fidelity"]
    assert found.mark is Mark.WARN
    assert "a tie in bfloat16" in found.text


def test_a_step_that_never_ends_is_bounded_and_the_child_is_ended(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_owner(monkeypatch, "stuck")
    monkeypatch.setattr("treadle.cli.engine_checks.STOP_GRACE_S", 0.5)
    outcomes = check(folder, Bounds(0.3, 0.3, 0.3, 0.3), start_timeout=6)
    assert outcomes["start"].mark is Mark.OK
    assert outcomes["fidelity"].text == "not done within 0.3 s"
    assert all(outcomes[name].mark is Mark.FAIL for name in ("fidelity", "cancel", "crash", "burst", "stop"))


def test_an_engine_that_does_not_come_back_fails_the_crash_check(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with_owner(monkeypatch, "once")
    outcomes = check(make_tiny(tmp_path / "model"))
    assert outcomes["fidelity"].mark is not Mark.FAIL  # a remark where steps were too short for rows to meet
    assert outcomes["crash"].mark is Mark.FAIL
    assert "start_failed" in outcomes["crash"].text
    assert "engine_unavailable" in outcomes["burst"].text


@pytest.mark.parametrize(
    ("context", "late", "mark", "said"),
    [
        (2048, 2, None, "slot free in"),
        (2048, 3, Mark.FAIL, "3 streams of 512 tokens went on to their end"),
        (64, 3, Mark.WARN, "3 streams of 24 tokens went on to their end"),
    ],
)
def test_a_stream_that_is_over_before_its_cancel_is_no_failure_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, context: int, late: int, mark: Mark | None, said: str
) -> None:
    """As on a busy machine: so often the cancel comes only when the stream has ended."""
    streams = 0

    async def busy(generation: Generation, tokens: int) -> None:
        nonlocal streams
        streams += 1
        await reach(generation, 10_000 if streams <= late else tokens)

    monkeypatch.setattr("treadle.cli.engine_checks.reach", busy)
    monkeypatch.setattr("treadle.cli.engine_checks.EngineChecks.steps", lambda self: [("cancel", 60.0, self.cancel)])
    found = check(make_tiny(tmp_path / "model", context=context, eos=False))["cancel"]
    assert said in found.text
    assert found.mark is mark or (mark is None and found.mark is not Mark.FAIL)


def test_a_model_that_can_not_start_ends_the_checks(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path / "model")
    config = (folder / "config.json").read_text().replace('"intermediate_size": 128', '"intermediate_size": 64')
    (folder / "config.json").write_text(config)
    outcomes = check(folder)
    assert list(outcomes) == ["start", "stop"]
    assert outcomes["start"].mark is Mark.FAIL
    assert "shape" in outcomes["start"].text


def test_a_model_that_is_not_there_is_the_one_outcome(tmp_path: Path) -> None:
    outcomes = check(tmp_path / "nowhere")
    assert list(outcomes) == ["model"]
    assert outcomes["model"].mark is Mark.FAIL


def ran(*tokens: int) -> CompletedRun:
    return CompletedRun(tokens, (), 0.0, 0.0)


@pytest.mark.parametrize(
    ("one", "other", "at"),
    [(ran(1, 2), ran(1, 2), None), (ran(1, 2), ran(1, 3), 1), (ran(1, 2), ran(1), 1), (ran(), ran(4), 0)],
)
def test_the_first_difference(one: CompletedRun, other: CompletedRun, at: int | None) -> None:
    assert first_difference(one, other) == at


def test_prompts_have_the_length_asked_for_and_begin_otherwise(folder: Path) -> None:
    text = TextModel.load(folder)
    prompts = [make_prompt(text, 700, turn) for turn in range(8)]
    assert {len(prompt) for prompt in prompts} == {700}
    assert len({prompt[:8] for prompt in prompts}) == 8


def test_a_cell_can_not_break_the_table() -> None:
    report = CheckReport("m", (Outcome("start", Mark.FAIL, "one | two\nthree"),))
    findings = Findings((Finding("System", "platform", "a | b"),))
    markdown = report.to_markdown(findings)
    assert "### Treadle check: FAIL" in markdown
    assert "| start | **FAIL** | one \\| two three |" in markdown
    assert "| platform | a \\| b |" in markdown
