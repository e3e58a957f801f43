"""`treadle pull`, `models` and `rm` as a user runs them, against a hub on the loopback."""

from __future__ import annotations

import io
import json
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import pytest

from tests.support.eagle_models import make_eagle
from tests.support.hub import COMMIT, HubServer, files_of, wait_for_partial
from tests.support.tiny import make_tiny
from treadle.cli.models import _confirmed, pull, show
from treadle.installation import Problem
from treadle.models import ModelFolder, Source
from treadle.models.cache_paths import repository

MODEL = "owner/tiny"
COMMAND = [sys.executable, "-m", "treadle"]
NAME = "./treadle"


@pytest.fixture(scope="module")
def content(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    return files_of(make_tiny(tmp_path_factory.mktemp("source")))


@pytest.fixture
def server(content: dict[str, bytes]) -> Iterator[HubServer]:
    with HubServer(MODEL, content) as server:
        yield server


@pytest.fixture
def env(server: HubServer, tmp_path: Path) -> dict[str, str]:
    home = {"HF_HOME": str(tmp_path / "hf"), "XDG_CACHE_HOME": str(tmp_path / "cache"), "HOME": str(tmp_path)}
    return {**os.environ, "HF_ENDPOINT": server.url, "TREADLE_COMMAND": NAME, **home}


def treadle(env: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *arguments], env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=100
    )


def home(tmp_path: Path) -> Path:
    return repository(tmp_path / "hf" / "hub", MODEL)


def test_a_head_for_drafts_is_pulled_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    head = ModelFolder(make_eagle(tmp_path), MODEL, Source.HUB, {})
    monkeypatch.setattr("treadle.cli.models.locate", lambda *_: head)
    assert pull(MODEL, None) == 0
    assert capsys.readouterr().out == f"{tmp_path}\n"


def test_the_life_of_a_model(env: dict[str, str], server: HubServer, tmp_path: Path) -> None:
    """Pulled, pulled again, listed, removed."""
    for _ in range(2):
        pulled = treadle(env, "pull", MODEL)
        assert pulled.returncode == 0, pulled.stderr
        assert pulled.stdout == f"{home(tmp_path) / 'snapshots' / COMMIT}\n"
        assert "owner/tiny is here and whole" in pulled.stderr
    assert server.ranges("model.safetensors") == [None]

    listed = json.loads(treadle(env, "models", "--json").stdout)
    assert listed["hub_cache"] == str(tmp_path / "hf" / "hub")
    (row,) = listed["models"]
    assert (row["model"], row["state"], row["architecture"], row["weights"]) == (MODEL, "ready", "llama", "float32")
    lines = treadle(env, "models").stdout.splitlines()
    assert lines[0].split() == ["MODEL", "SIZE", "ARCHITECTURE", "WEIGHTS", "USED", "STATE"]
    assert lines[1].split()[0] == MODEL
    assert lines[1].split()[-1] == "ready"

    asked = treadle(env, "rm", MODEL)
    assert (asked.returncode, asked.stderr.count("\n")) == (2, 1)
    assert "give --yes" in asked.stderr
    removed = treadle(env, "rm", MODEL, "--yes")
    assert removed.returncode == 0
    assert "are free again" in removed.stdout
    assert not home(tmp_path).exists()
    assert treadle(env, "models").stdout.startswith(f"No model in {tmp_path / 'hf' / 'hub'}")


def test_a_question_has_one_mark(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("n\n"))
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    assert _confirmed("Remove it?") is False
    assert capsys.readouterr().err.rstrip() == "Remove it? [y/N]"


DEMO_TO_COME = "demo is installed: it is converted at the first start, once"


@pytest.mark.parametrize(("lacks", "shown"), [(None, True), (Problem("no demo", "pip"), False)])
def test_a_demo_that_is_yet_to_be_converted_is_mentioned(
    lacks: Problem | None,
    shown: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("treadle.models.cache.default_root", lambda: tmp_path)
    monkeypatch.setattr("treadle.models.hub.cache_folder", lambda: tmp_path / "hub")
    monkeypatch.setattr("treadle.models.demo.missing_packages", lambda: lacks)
    assert show(everything=False, as_json=False) == 0
    assert (DEMO_TO_COME in capsys.readouterr().out) is shown
    monkeypatch.setattr("treadle.models.demo.is_converted", lambda: True)
    show(everything=False, as_json=False)
    assert DEMO_TO_COME not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["pull", "owner/other"], "no such model on the hub"),
        (["pull", MODEL, "--revision", "v9"], "owner/tiny has no revision v9"),
        (["pull", "gpt2"], "not a hub id"),
        (["pull", "."], "is a folder here: there is nothing to pull"),
        (["rm", "owner/other", "--yes"], "'owner/other' is not in"),
        (["rm", "demo", "--yes"], "the demo is not on this disk"),
        (["rm", ".", "--yes"], "is a folder of yours, which Treadle never removes"),
    ],
)
def test_what_can_not_be_done_is_one_line(env: dict[str, str], arguments: list[str], said: str) -> None:
    ran = treadle(env, *arguments)
    assert ran.returncode == 1
    assert ran.stdout == ""
    assert ran.stderr.splitlines()[-1].startswith("treadle: error: ")
    assert said in ran.stderr


@pytest.mark.parametrize("arguments", [["pull", ""], ["rm", "", "--yes"]])
def test_an_empty_name_is_not_this_folder(env: dict[str, str], arguments: list[str]) -> None:
    ran = treadle(env, *arguments)
    assert (ran.returncode, ran.stdout) == (2, "")
    assert "MODEL is empty: give a hub id" in ran.stderr


def test_a_revision_is_removed_by_its_name_or_the_beginning_of_its_commit(
    env: dict[str, str], server: HubServer, tmp_path: Path
) -> None:
    server.revisions |= {"v1": "d" * 40, "v2": "e" * 40}
    for revision in ("main", "v1", "v2"):
        assert treadle(env, "pull", MODEL, "--revision", revision).returncode == 0
    assert "no revision v9 on this disk" in treadle(env, "rm", MODEL, "--revision", "v9", "--yes").stderr
    assert treadle(env, "rm", MODEL, "--revision", "v1", "--yes").returncode == 0
    assert treadle(env, "rm", MODEL, "--revision", "eeeeeee", "--yes").returncode == 0
    assert [path.name for path in (home(tmp_path) / "snapshots").iterdir()] == [COMMIT]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_pull_says_that_it_goes_on_later(
    env: dict[str, str], server: HubServer, content: dict[str, bytes], number: int, code: int, tmp_path: Path
) -> None:
    server.stall.set()
    with subprocess.Popen([*COMMAND, "pull", MODEL], env=env, stderr=subprocess.PIPE, text=True) as process:
        assert server.stalled.wait(60)
        wait_for_partial(home(tmp_path))
        process.send_signal(number)
        _, said = process.communicate(timeout=60)
    assert process.returncode == code
    assert said.splitlines()[-1] == f"Interrupted: '{NAME} pull owner/tiny' goes on from what was fetched"
    listed = json.loads(treadle(env, "models", "--json").stdout)["models"]
    assert [row["state"] for row in listed] == ["partial"]
    assert 0 < listed[0]["partial_bytes"] < listed[0]["whole_bytes"]
    server.stall.clear()
    server.released.set()
    assert treadle(env, "pull", MODEL).returncode == 0
    assert server.ranges("model.safetensors")[-1] == f"bytes={listed[0]['partial_bytes']}-"


def test_a_terminal_gets_a_bar_and_its_cursor_back(env: dict[str, str], server: HubServer) -> None:
    server.rate = 300_000
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        [*COMMAND, "pull", MODEL], env={**env, "TERM": "xterm", "COLUMNS": "100"}, stderr=theirs, stdout=subprocess.PIPE
    ) as process:
        os.close(theirs)
        shown = b""
        try:
            while block := os.read(ours, 4096):
                shown += block
        except OSError:  # the other end is closed
            pass
        process.communicate(timeout=60)
    os.close(ours)
    assert process.returncode == 0
    assert "━".encode() in shown
    assert b" %, " in shown
    assert b" KiB/s, " in shown
    assert shown.rindex(b"\x1b[?25h") > shown.rindex(b"\x1b[?25l")


def test_a_log_gets_few_lines(env: dict[str, str], server: HubServer) -> None:
    server.rate = 300_000
    said = treadle(env, "pull", MODEL).stderr.splitlines()
    lines = [line for line in said if "downloading owner/tiny" in line]
    assert 2 <= len(lines) <= 3
    assert lines[-1].strip().startswith("downloading owner/tiny: 100 %, ")


def used(env: dict[str, str]) -> str:
    (row,) = json.loads(treadle(env, "models", "--json").stdout)["models"]
    return str(row["used"])


def test_a_model_that_is_served_is_not_removed(env: dict[str, str], tmp_path: Path) -> None:
    assert treadle(env, "pull", MODEL).returncode == 0
    for path in (home(tmp_path), *home(tmp_path).rglob("*")):
        os.utime(path, (1000, 1000))
    pulled = datetime.fromisoformat(used(env))
    command = [*COMMAND, "serve", MODEL, "--port", "0", "--threads", "1"]
    with subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            assert any(line.startswith("Ready") for line in process.stderr)
            refused = treadle(env, "rm", MODEL, "--yes")
        finally:
            process.terminate()
            process.stderr.read()
    assert refused.returncode == 1
    assert datetime.fromisoformat(used(env)) > pulled
    assert "a running treadle serves it" in refused.stderr
    assert home(tmp_path).exists()
    assert treadle(env, "rm", MODEL, "--yes").returncode == 0


def test_readiness_tells_how_far_a_download_is(env: dict[str, str], server: HubServer) -> None:
    import httpx

    server.stall.set()
    command = [*COMMAND, "serve", MODEL, "--port", "0"]
    with subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            url = next(process.stderr).split(" on ")[1].split()[0]
            assert server.stalled.wait(60)
            assert any(line.strip().startswith("downloading owner/tiny: ") for line in process.stderr)
            ready, status = httpx.get(f"{url}/health/ready"), httpx.get(f"{url}/v1/status")
        finally:
            process.kill()
            process.stderr.read()
    assert ready.status_code == 503
    assert "downloading owner/tiny: " in ready.text
    assert "downloading owner/tiny: " in status.text
