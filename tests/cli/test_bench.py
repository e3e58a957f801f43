"""`treadle bench` as a user has it: output, files, exit codes, and bad input in one line."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from tests.support import fake_openai
from tests.support.fake_openai import fake_server
from treadle.bench.measures import figures
from treadle.bench.store import load
from treadle.cli.app import app

FAKE = f"{shlex.quote(sys.executable)} {shlex.quote(fake_openai.__file__)}"
TINY = "burst:c=1,every_s=0.001,tokens=3"


def bench(command: str, *arguments: str) -> Result:
    """A busy machine is no failure here."""
    more = ["--max-lag", "60"] if command == "run" else []
    return CliRunner().invoke(app, ["bench", command, *more, *arguments])


def fails(*arguments: str, code: int = 1) -> str:
    """The one line that it fails with."""
    result = bench(*arguments)
    assert result.exit_code == code, result.output
    (line,) = result.stderr.strip().splitlines()
    assert line.startswith("treadle bench: ")
    return line


def test_a_run_prints_a_table_and_writes_its_files(tmp_path: Path) -> None:
    """F11"""
    files = ["--json", str(tmp_path / "a" / "r.json"), "--html", str(tmp_path / "r.html")]
    with fake_server() as server:
        done = bench("run", "-w", TINY, "--url", server.url, "--name", "fake", "--rounds", "1", *files)
    assert done.exit_code == 0, done.output
    assert "TTFT" in done.stdout
    assert (tmp_path / "r.html").read_text().startswith("<!doctype html>")
    again = bench("report", str(tmp_path / "a" / "r.json"))
    assert again.exit_code == 0
    assert "TTFT" in again.stdout


def test_goodput_is_counted_within_the_limits_that_were_given(tmp_path: Path) -> None:
    """F11"""
    good = []
    with fake_server() as server:
        for limits in ("5,5", "0.000001,5"):
            path = tmp_path / f"{limits}.json"
            run = ["run", "-w", TINY, "--url", server.url, "--rounds", "1", "--goodput", limits, "--json", str(path)]
            assert bench(*run).exit_code == 0
            result = load(path)
            (name,) = result.workloads
            info = result.workloads[name]
            good.append(figures(result.rounds[name][0], info.goodput).good)
    assert good == [1.0, 0.0]


def test_a_started_server_and_one_that_runs_are_compared(tmp_path: Path) -> None:
    with fake_server() as server:
        done = bench("run", "-w", TINY, "--start", FAKE, "--url", server.url, "--name", "A", "--name", "B")
    assert done.exit_code == 0, done.output
    assert done.stdout.index("A") < done.stdout.index("B")


def test_compare_passes_a_run_with_itself_and_fails_a_worse_one(tmp_path: Path) -> None:
    a, b = tmp_path / "a.json", tmp_path / "b.json"
    with fake_server() as server:
        for path in (a, b):
            run = bench("run", "-w", TINY, "--url", server.url, "--name", "x", "--rounds", "1", "--json", str(path))
            assert run.exit_code == 0, run.output
            if path == a:
                before = path.read_text()
    assert bench("compare", str(a), str(a)).exit_code == 0
    b.write_text(before.replace('"outcome":"ok"', '"outcome":"failed"'))
    worse = bench("compare", str(a), str(b))
    assert worse.exit_code == 1
    assert "failed" in worse.stdout


def test_compare_refuses_runs_that_are_not_alike(tmp_path: Path) -> None:
    a, b = tmp_path / "a.json", tmp_path / "b.json"
    with fake_server() as server:
        for path, seed in ((a, "1"), (b, "2")):
            bench("run", "-w", TINY, "--url", server.url, "--rounds", "1", "--seed", seed, "--json", str(path))
    refusal = fails("compare", str(a), str(b), code=2)
    assert "can't be compared: seed of 'burst c=1 every_s=0.001 tokens=3' 1 and 2" in refusal


def test_every_workload_is_listed_with_its_options() -> None:
    listed = bench("workloads").stdout
    for name in ("burst", "chat", "agent", "stall", "interactive", "cancel", "overload", "mixed-length", "sweep"):
        assert f"{name}:" in listed
    assert "every_s=0.1" in listed


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["-w", "brust"], "no workload 'brust'"),
        (["-w", "burst:c"], "'c' is not OPTION=NUMBER"),
        (["-w", "burst:size=3"], "no option 'size'"),
        (["-w", "none.jsonl"], "can't be read"),
        (["-w", TINY], "give --url URL or --start COMMAND"),
        (["-w", TINY, "--url", "https://x"], "not a URL of the form"),
        (["-w", TINY, "--url", "127.0.0.1:1"], "nothing answers at http://127.0.0.1:1"),
        (["-w", TINY, "--url", "127.0.0.1:1", "--rounds", "0"], "--rounds 0: give at least 1"),
        (["-w", TINY, "--url", "127.0.0.1:1", "--goodput", "2"], "--goodput 2: give two times"),
        (["-w", TINY, "--url", "127.0.0.1:1", "--goodput", "0,nan"], "--goodput 0,nan: give two times"),
        (["-w", TINY, "--url", "127.0.0.1:1", "--endpoint", "v2"], "--endpoint v2: use chat or completions"),
        (["-w", TINY, "--start", "no-such-program"], "'no-such-program' can't be started"),
        (["-w", TINY, "--start", f"{FAKE} --die 'out of memory'"], "exit code 1: out of memory"),
        (["-w", TINY, "--start", f"{FAKE} --deaf", "--start-timeout", "0.3"], "not ready after 0.3 s"),
        (["-w", TINY, "--start", FAKE, "--model", "else"], "does not answer for model 'else' (it lists fake)"),
        (["-w", TINY, "--start", FAKE, "--name", "a", "--name", "b"], "2 names for 1 target"),
        (["-w", TINY, "--start", FAKE, "--model", "a", "--model", "b"], "2 models for 1 target"),
    ],
)
def test_bad_input_of_a_run_is_one_line(arguments: list[str], says: str) -> None:
    assert says in fails("run", *arguments)


def test_files_that_are_no_results_are_one_line(tmp_path: Path) -> None:
    torn, other = tmp_path / "torn.json", tmp_path / "other.json"
    torn.write_text('{"format": 1, "start')
    other.write_text("[]")
    assert "not whole JSON" in fails("report", str(torn))
    assert "not a result of treadle bench" in fails("compare", str(other), str(other), code=2)
    assert "there is no" in fails("report", str(tmp_path / "none.json"))


def test_a_result_that_can_t_be_written_is_told_before_the_run(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with fake_server() as server:
        line = fails("run", "-w", TINY, "--url", server.url, "--json", str(tmp_path / "file" / "r.json"))
        assert "can't be written" in line
        assert not server.asked


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_leaves_no_server_behind(tmp_path: Path, number: signal.Signals) -> None:
    pid_file = tmp_path / "pid"
    start = f"{FAKE} --deaf --pid-file {pid_file}"
    process = subprocess.Popen(
        [sys.executable, "-m", "treadle", "bench", "run", "-w", TINY, "--start", start], stderr=subprocess.PIPE
    )
    while not (pid_file.exists() and pid_file.read_text()):
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(number)
    _, said = process.communicate(timeout=60)
    assert (process.returncode, said.decode().strip()) == (130, "treadle bench: interrupted")
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid_file.read_text()), 0)


def test_an_interrupted_run_shows_and_keeps_the_rounds_that_are_over(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    with fake_server() as server:
        run = ["bench", "run", "-w", TINY, "--url", server.url, "--rounds", "10000", "--max-lag", "60"]
        process = subprocess.Popen(
            [sys.executable, "-m", "treadle", *run, "--json", str(path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        while not path.exists():
            assert process.poll() is None
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        shown, said = process.communicate(timeout=60)
    assert (process.returncode, said.decode().strip()) == (130, "treadle bench: interrupted")
    assert "TTFT" in shown.decode()
    result = load(path)
    (rounds,) = result.rounds.values()
    assert 0 < len(rounds) == result.rounds_done < result.rounds_planned == 10_000
    assert result.stopped == "it was interrupted"
    ending = f"The run ended early, after {len(rounds)} of 10000 rounds: it was interrupted"
    assert ending in " ".join(shown.decode().split())
