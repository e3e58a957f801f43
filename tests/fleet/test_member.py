"""A fleet member: start, restarts with growing back-off, stop with its children."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.serve.server import gone, until
from tests.support.aio import in_loop
from treadle.errors import StartFailed
from treadle.fleet.member import BACKOFF_S, Member

FOREVER = "import signal; signal.pause()"
STUBBORN = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); signal.pause()"
COUNTING = (
    "import signal; both = {signal.SIGTERM, signal.SIGINT}; signal.pthread_sigmask(signal.SIG_BLOCK, both)\n"
    "print('up', flush=True)\n"
    "left_s = [0.3, 20, 20]\n"
    "while got := signal.sigtimedwait(both, left_s.pop()): print(got.si_signo, flush=True)"
)
PARENT = (
    "import subprocess, sys, signal; p = subprocess.Popen([sys.executable, '-c', 'import signal; signal.pause()']);"
    "print(p.pid, flush=True); signal.pause()"
)


def member(tmp_path: Path, code: str) -> Member:
    return Member("m", [sys.executable, "-c", code], tmp_path / "m.log")


@in_loop
async def test_it_runs_until_it_is_stopped(tmp_path: Path) -> None:
    it = member(tmp_path, FOREVER)
    assert (it.alive, it.pid, it.exit_description()) == (False, None, "")
    it.start()
    assert it.alive
    assert it.pid
    await it.stop(10)
    assert (it.alive, it.pid) == (False, None)
    assert it.exit_description() == "killed by SIGTERM"
    it.kill()


@in_loop
async def test_one_that_ignores_sigterm_is_killed_after_its_grace(tmp_path: Path) -> None:
    it = member(tmp_path, STUBBORN)
    it.start()
    until("it is up", it.log.read_text)
    await it.stop(0.1)
    assert it.exit_description() == "killed by SIGKILL"


@pytest.mark.parametrize("asked", [False, True])
@in_loop
async def test_a_member_in_a_hurry_has_had_two_signals_and_no_third(tmp_path: Path, asked: bool) -> None:
    """C3: a server takes a third for an order to say nothing more to anybody."""
    it = member(tmp_path, COUNTING)
    it.start()
    until("it is up", it.log.read_text)
    if asked:
        it.terminate()
        until("the first", lambda: "15" in it.log.read_text())
    it.end_now()
    await it.stop(10)
    assert sorted(it.log.read_text().split()[1:]) == ["15", "2"]


@in_loop
async def test_what_it_has_started_ends_with_it(tmp_path: Path) -> None:
    it = member(tmp_path, PARENT)
    it.start()
    child = int(until("it has a child", it.log.read_text))
    await it.stop(10)
    until("the child is gone", lambda: gone(child))


def test_it_is_started_again_after_longer_and_longer_pauses(tmp_path: Path) -> None:
    it = member(tmp_path, "raise SystemExit('no model')")
    it.start()
    now, pauses = 100.0, []
    for _ in range(4):
        until("its end", lambda: not it.alive)
        assert it.exit_description() == "exit code 1: no model" or it.starts > 1
        it.restart_if_due(now)
        began, starts = now, it.starts
        while it.starts == starts and not it.alive and it.starts < 2 + len(pauses):
            now += 0.5
            it.restart_if_due(now)
        pauses.append(now - began)
    assert pauses == sorted(pauses)
    assert pauses[0] == BACKOFF_S[0]
    assert it.restarts == 4
    it.mark_healthy()
    assert it.failures == 0
    it.kill()


def test_a_program_that_is_not_there_and_a_log_that_can_t_be_written_are_told(tmp_path: Path) -> None:
    with pytest.raises(StartFailed, match="m could not be started: no-such-program"):
        Member("m", ["no-such-program"], tmp_path / "log").start()
    with pytest.raises(StartFailed, match="can't be written"):
        Member("m", [sys.executable], tmp_path / "none" / "log").start()


FORKS = """
import os, pathlib, sys
os.register_at_fork(before=lambda: print("forked"))
from treadle.fleet.member import Member
it = Member("m", [sys.executable, "-c", "print('up')"], pathlib.Path(sys.argv[1]))
it.start()
it._process.wait()
"""
KILLED = """
import pathlib, signal, sys
from treadle.fleet import member
from treadle.fleet.member import Member
member.DEATH_SIGNAL = sys.argv[2] == "kernel"
other = Member("other", [sys.executable, "-c", "import signal; signal.pause()"], pathlib.Path(sys.argv[1] + ".other"))
other.start()
it = Member("m", [sys.executable, "-c", "import signal; signal.pause()"], pathlib.Path(sys.argv[1]))
it.start()
print(it.pid, other.pid, flush=True)
signal.pause()
"""


def test_its_start_runs_no_fork_handlers(tmp_path: Path) -> None:
    """Those of gRPC break the child, and print warnings, where gRPC's threads run."""
    command = [sys.executable, "-c", FORKS, str(tmp_path / "log")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert (done.stdout, (tmp_path / "log").read_text()) == ("", "up\n")


def processes_of(pids: list[int]) -> list[int]:
    """The members, once each is its program, and the processes beside them."""
    until("they are programs", lambda: all(len(psutil.Process(pid).cmdline()) == 3 for pid in pids))
    return [*pids, *(child.pid for pid in pids for child in psutil.Process(pid).children())]


KERNEL = pytest.param("kernel", marks=pytest.mark.skipif(sys.platform != "linux", reason="Linux alone can"))


@pytest.mark.parametrize("leash", [KERNEL, "pipe"])
def test_members_end_with_a_fleet_that_is_killed(tmp_path: Path, leash: str) -> None:
    command = [sys.executable, "-c", KILLED, str(tmp_path / "log"), leash]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as fleet:
        assert fleet.stdout is not None
        pids = processes_of([int(pid) for pid in fleet.stdout.readline().split()])
        assert len(pids) == (2 if leash == "kernel" else 4)
        fleet.kill()
    until("they are gone", lambda: all(gone(pid) for pid in pids))


@in_loop
async def test_the_process_beside_a_member_ends_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether the fleet ends the member, or it ends by itself."""
    monkeypatch.setattr("treadle.fleet.member.DEATH_SIGNAL", False)
    it = member(tmp_path, FOREVER)
    it.start()
    assert it.pid is not None
    pids = processes_of([it.pid])
    os.kill(it.pid, signal.SIGUSR1)
    until("both are gone", lambda: it.pid is None and gone(pids[1]))
    it.restart_if_due(0.0)
    it.restart_if_due(1.0)
    assert it.pid is not None
    pids = processes_of([it.pid])
    await it.stop(10)
    assert it.exit_description() == "killed by SIGTERM"
    until("both are gone again", lambda: all(gone(pid) for pid in pids))


def test_a_program_that_can_t_be_run_says_so_in_its_log(tmp_path: Path) -> None:
    program = tmp_path / "program"
    program.write_bytes(b"\x7fELF, but not really")
    program.chmod(0o755)
    it = Member("m", [str(program)], tmp_path / "log")
    it.start()
    until("its end", lambda: not it.alive)
    assert it.exit_description() == f"exit code 1: {program}: Exec format error"


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="cores are chosen on Linux alone")
def test_it_stays_on_its_cores(tmp_path: Path) -> None:
    core = min(os.sched_getaffinity(0))
    it = Member("m", [sys.executable, "-c", FOREVER], tmp_path / "log", cores={core})
    it.start()
    assert it.pid is not None
    assert os.sched_getaffinity(it.pid) == {core}
    it.signal(signal.SIGKILL)
    it.kill()
