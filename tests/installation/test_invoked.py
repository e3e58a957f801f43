"""The command's name in messages: as the user typed it, from where the user is."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import treadle
from tests.installation.conftest import program
from treadle.installation import command
from treadle.installation.invoked import VARIABLE


@pytest.fixture(autouse=True)
def unwrapped(environment: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)


def run_as(monkeypatch: pytest.MonkeyPatch, *parts: str) -> str:
    monkeypatch.setattr(sys, "argv", [os.path.join(*parts)])
    return command()


def test_a_program_that_the_shell_finds_has_its_bare_name(environment: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(environment / "bin" / "treadle")
    assert run_as(monkeypatch, str(environment), "bin", "treadle") == "treadle"


def test_a_program_beyond_the_path_is_named_by_its_place(environment: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(environment / "bin" / "treadle")
    monkeypatch.setenv("PATH", "")
    assert run_as(monkeypatch, str(environment), "bin", "treadle") == ".venv/bin/treadle"
    assert run_as(monkeypatch, "/opt/my tools/treadle") == "'/opt/my tools/treadle'"


def test_a_wrapper_is_named_in_place_of_what_it_starts(environment: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(environment / "bin" / "treadle")
    program(environment.parent / "treadle")
    monkeypatch.setenv(VARIABLE, "./treadle")
    assert run_as(monkeypatch, str(environment), "bin", "treadle") == "./treadle"
    (environment.parent / "docs").mkdir()
    monkeypatch.chdir(environment.parent / "docs")
    monkeypatch.setenv(VARIABLE, "../treadle")
    assert run_as(monkeypatch, str(environment), "bin", "treadle") == "../treadle"


def test_a_module_is_run_by_its_interpreter(environment: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_as(monkeypatch, "/site-packages/treadle/__main__.py") == ".venv/bin/python -m treadle"
    program(environment / "bin" / "python")
    assert run_as(monkeypatch, "/site-packages/treadle/__main__.py") == "python -m treadle"


@pytest.mark.parametrize("name", ["-c", "", "/usr/bin/pytest", "treadle"])
def test_inside_another_program_it_is_treadle(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_as(monkeypatch, name) == "treadle"


def test_the_checkouts_wrapper_says_its_own_name(tmp_path: Path) -> None:
    """With its own `make` and environment: what it sets is what the command gets."""
    wrapper = Path(treadle.__file__).parents[2] / "treadle"
    (tmp_path / "treadle").write_bytes(wrapper.read_bytes())
    (tmp_path / "treadle").chmod(0o755)
    (tmp_path / "Makefile").write_text("ready:\n\t@true\n")
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "bin" / "treadle").write_text(f'#!/bin/sh\necho "${VARIABLE} $@"\n')
    (tmp_path / ".venv" / "bin" / "treadle").chmod(0o755)
    environment = {"PATH": "/usr/bin:/bin"}
    ran = subprocess.run(["./treadle", "rm"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
    assert ran.stdout == "./treadle rm\n"
