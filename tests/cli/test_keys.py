"""`treadle keys`, as typed."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from treadle.cli.secrets import forget_key, warn_of_command_line
from treadle.keys import ALL, KeyLimits, digest
from treadle.keys.file import read

OWN = "k" * 32


def keys(*arguments: str, given: str = "", env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "treadle", "keys", *arguments]
    plain = {name: value for name, value in os.environ.items() if name != "TREADLE_API_KEYS"}
    return subprocess.run(command, capture_output=True, text=True, timeout=60, input=given, env=plain | (env or {}))


def test_a_key_is_printed_once_and_kept_as_a_hash(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    limits = ("--requests-per-minute", "60", "--tokens-per-minute", "9000", "--max-running", "2")
    added = keys("add", "alice", "--api-keys", str(path), "--scope", "admin", *limits)
    assert added.returncode == 0, added.stderr
    key = added.stdout.strip()
    assert "which is shown this once" in added.stderr
    (found,) = read(path)
    assert (found.name, found.sha256, found.scopes) == ("alice", digest(key.encode()), ALL)
    assert found.limits == KeyLimits(60, 9000, 2)
    env = {"TREADLE_API_KEYS": str(path)}
    listed = keys("list", env=env).stdout
    assert listed == "alice  use+admin  requests per minute 60, tokens per minute 9000, max running 2\n"
    assert key not in path.read_text() + listed
    removed = keys("remove", "alice", env=env)
    assert (removed.returncode, removed.stderr) == (0, f"Removed 'alice' from {path}\n")
    assert keys("list", env=env).stdout == ""


def test_the_variable_may_begin_with_a_tilde(tmp_path: Path) -> None:
    """An environment file of systemd is read by no shell."""
    env = {"TREADLE_API_KEYS": "~/keys.toml", "HOME": str(tmp_path)}
    assert keys("add", "alice", env=env).returncode == 0
    assert [key.name for key in read(tmp_path / "keys.toml")] == ["alice"]


def test_a_key_of_ones_own_comes_on_standard_input(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    added = keys("add", "own", "--stdin", "--api-keys", str(path), given=f"{OWN}\n")
    assert (added.returncode, added.stdout) == (0, "")
    assert read(path)[0].sha256 == digest(OWN.encode())


@pytest.mark.parametrize(
    ("arguments", "given", "says"),
    [
        (("add", "a"), "", "which keys file? give --api-keys FILE, or set TREADLE_API_KEYS"),
        (("add", "a", "--stdin"), "short\n", "the key has 5 characters: give 32 or more random ones"),
        (("add", "a", "--stdin"), "", "the key on standard input is empty"),
        (("add", "a", "--stdin"), "ü" * 40, "visible ASCII"),
        (("add", "a b"), "", "can't name a key"),
        (("add", "a", "--scope", "root"), "", "root"),
        (("add", "a", "--max-running", "0"), "", "greater than or equal to 1"),
        (("remove", "a"), "", "does not exist"),
        (("list",), "", "does not exist"),
    ],
)
def test_a_mistake_is_one_line(arguments: tuple[str, ...], given: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    env = {} if says.startswith("which") else {"TREADLE_API_KEYS": str(path)}
    ran = keys(*arguments, given=given, env=env)
    assert ran.returncode == 2
    assert len(ran.stderr.splitlines()) == 1
    assert says in ran.stderr
    assert ran.stdout == ""
    assert not path.exists()


def test_the_key_leaves_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TREADLE_API_KEY", "hunter2")
    forget_key()
    forget_key()
    assert "TREADLE_API_KEY" not in os.environ


@pytest.mark.parametrize(
    ("arguments", "warned"),
    [
        (["serve", "--api-key", "hunter2"], True),
        (["serve", "--api-key=hunter2"], True),
        (["serve", "--api-keys", "keys.toml"], False),
        (["serve"], False),
    ],
)
def test_a_key_that_ps_shows_is_warned_of(
    arguments: list[str], warned: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.WARNING)
    warn_of_command_line(arguments)
    monkeypatch.setattr(sys, "argv", ["treadle", *arguments])
    warn_of_command_line()
    assert len(caplog.records) == 2 * warned
    assert "hunter2" not in caplog.text
