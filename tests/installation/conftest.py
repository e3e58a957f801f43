from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.packages import Packages


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Packages:
    """Installed packages, replaced by those that the test adds."""
    return Packages(tmp_path / "site", monkeypatch)


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """This interpreter seems to be that of a Linux machine without a GPU, in `.venv` of a folder that is the current
    one; its pip is the one that a shell finds."""
    prefix = tmp_path / "home" / ".venv"
    (prefix / "bin").mkdir(parents=True)
    monkeypatch.chdir(prefix.parent)
    monkeypatch.setattr(sys, "prefix", str(prefix))
    monkeypatch.setattr(sys, "executable", str(prefix / "bin" / "python"))
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    monkeypatch.setattr("platform.libc_ver", lambda: ("glibc", "2.36"))
    monkeypatch.setenv("PATH", str(prefix / "bin"))
    program(prefix / "bin" / "pip")
    return prefix


def program(path: Path) -> None:
    """Write a program that is on the PATH."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/sh\n")
    os.chmod(path, 0o755)


@pytest.fixture
def without_modules(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Hide modules from `importlib.util.find_spec`."""
    real = importlib.util.find_spec

    def hide(*names: str) -> None:
        monkeypatch.setattr(
            importlib.util, "find_spec", lambda name, package=None: None if name in names else real(name, package)
        )

    return hide
