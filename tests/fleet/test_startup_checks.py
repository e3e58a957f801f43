"""A worker that never becomes ready ends the fleet's start."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from tests.fleet.test_plan import plan
from treadle.errors import ConfigError, StartFailed
from treadle.fleet import plan as plans
from treadle.fleet.member import Member
from treadle.fleet.plan import FleetPlan, Worker, gateway_of
from treadle.fleet.startup_checks import SILENT_S, START_SLACK_S, START_TIMEOUT_S, StartupChecks


def worker() -> Worker:
    return Worker(Member("worker 1", ["none"], Path("logs/w.log")), "http://127.0.0.1:1", "grpc://127.0.0.1:2", "all")


def loading(stage: str) -> dict[str, Any]:
    return {"state": "starting", "reason": stage}


def test_one_that_refuses_the_fleets_key_is_told_at_once() -> None:
    """D14: it said "starting" for ever."""
    with pytest.raises(StartFailed, match="worker 1 asks for an API key that the fleet does not have: set TREADLE_API"):
        StartupChecks(plan()).check(worker(), {"error": {"code": "invalid_api_key"}}, 0.0)


def test_one_that_does_not_answer_has_a_minute() -> None:
    it = StartupChecks(plan())
    for now in (0.0, 1.0, SILENT_S):
        it.check(worker(), {}, now)
    with pytest.raises(StartFailed, match=r"has not answered at http://127.0.0.1:1 for 60 s: see logs/w.log"):
        it.check(worker(), {}, SILENT_S + 0.5)


def test_one_that_makes_progress_has_all_the_time_it_needs() -> None:
    it = StartupChecks(plan())
    for i in range(100):
        it.check(worker(), loading(f"downloading, {i} %"), i * START_TIMEOUT_S)


@pytest.mark.parametrize(
    ("options", "bound_s"),
    [
        ((), START_TIMEOUT_S),
        (("--start-timeout", "60"), 60),
        (("--max-running", "2", "--start-timeout=7200"), 7200),
        (("--start-timeout", "soon"), START_TIMEOUT_S),
        (("--start-timeout",), START_TIMEOUT_S),
    ],
)
def test_one_that_makes_none_ends_after_the_engines_own_bound(options: tuple[str, ...], bound_s: float) -> None:
    it = StartupChecks(plan(worker_options=options))
    it.check(worker(), loading("reading the weights"), 0.0)
    it.check(worker(), loading("reading the weights"), bound_s + START_SLACK_S)
    with pytest.raises(StartFailed, match=r"shown no progress for .* s \(starting reading the weights\)"):
        it.check(worker(), loading("reading the weights"), bound_s + START_SLACK_S + 1)


def test_one_that_is_ready_waits_for_the_others_without_a_bound() -> None:
    it = StartupChecks(plan())
    for now in (0.0, 1e6):
        it.check(worker(), {"state": "ready", "reason": ""}, now)


# Keys


def test_workers_with_keys_of_their_own_are_looked_at_with_one_that_nobody_else_knows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("TREADLE_API_KEYS", raising=False)
    assert plan().worker_key is None
    assert plan(api_key="k").worker_key == "k"
    own = plan(worker_options=("--api-keys", "keys.toml"))
    assert own.worker_key
    assert own.worker_key == own.worker_key != plan(worker_options=("--api-keys=keys.toml",)).worker_key
    assert not own.requires_key, "clients of the gateway need none"
    monkeypatch.setenv("TREADLE_API_KEYS", "keys.toml")
    assert plan().worker_key


@pytest.mark.parametrize(
    ("first", "command"),
    [
        ("#!/usr/bin/env python3\n", ["/usr/bin/env", "python3"]),
        ('#!/bin/sh\n\'\'\'exec\' "/opt/my env/bin/python3.11" "$0" "$@"\n', ["/opt/my env/bin/python3.11"]),
    ],
)
def test_the_gateway_runs_with_its_own_interpreter(
    first: str, command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = _gateway(tmp_path, monkeypatch, first)
    assert made._command[: len(command) + 3] == [*command, str(plans.STDIN_ARGUMENTS), str(tmp_path / "smg"), "launch"]


@pytest.mark.parametrize("first", ["\x7fELF", "#!/bin/sh\nexec smg\n", ""])
def test_a_gateway_that_is_no_script_is_given_no_key(
    first: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=r"is no Python script, .* --gateway=--api-key=KEY"):
        _gateway(tmp_path, monkeypatch, first)


def _gateway(folder: Path, monkeypatch: pytest.MonkeyPatch, first: str) -> Member:
    program = folder / "smg"
    program.write_text(first)
    monkeypatch.setattr(plans, "_gateway_program", lambda: str(program))
    given: FleetPlan = plan(api_key="secret")
    return gateway_of(given, [])


def test_a_program_gets_what_its_command_line_does_not_show(tmp_path: Path) -> None:
    """In each start of it, and with no modules of the fleet's before its own."""
    program, log = tmp_path / "program", tmp_path / "log"
    program.write_text("import sys\nassert __name__ == '__main__'\nprint(sys.argv, sys.path[0])\n")
    command = [sys.executable, str(plans.STDIN_ARGUMENTS), str(program), "launch", "--x"]
    it = Member("m", command, log, stdin_text="--api-key\nsecret\n")
    for _ in range(2):
        it.start()
        assert it._process is not None
        assert it._process.wait(60) == 0
    told = f"{[str(program), 'launch', '--x', '--api-key', 'secret']!r} {tmp_path}"
    assert log.read_text().splitlines() == [told] * 2
