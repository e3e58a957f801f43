"""A header that is compiled once, for all functions that MLX has compiled on the CPU (A1)."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from treadle.runner.device import cpu_header

PROGRAM = """
from treadle.runner.device import cpu_header
import mlx.core as mx

thread = cpu_header.prepare()
print("begun" if thread else "nothing to do")
if thread:
    thread.join()
mx.set_default_device(mx.cpu)
print(mx.compile(lambda x: mx.exp(x) * x + 3)(mx.zeros(3)).tolist())
"""
GCC = shutil.which("g++")
pytestmark = pytest.mark.skipif(GCC is None or not sys.platform.startswith("linux"), reason="MLX asks GCC on Linux")


def run(folder: Path, script: str, **more: str) -> list[str]:
    """What PROGRAM prints whose compiler is a shell script, and whose temporary files are in `folder`."""
    tools = folder / "bin"
    tools.mkdir(exist_ok=True)
    compiler = tools / "g++"
    compiler.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
    compiler.chmod(0o755)
    env = {**os.environ, "TMPDIR": str(folder), "PATH": f"{tools}:{os.environ['PATH']}", **more}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=env, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def compiled(folder: Path) -> list[Path]:
    return [*folder.glob(f"mlx/*/cpu/{cpu_header.HEADER}.gch*")]


def test_functions_are_compiled_with_the_compiled_header(tmp_path: Path) -> None:
    """GCC names the headers that it reads on stderr, and those that are compiled by an exclamation mark."""
    log = tmp_path / "log"
    script = f'{GCC} -H "$@" 2>> {log}'
    assert run(tmp_path, script) == ["begun", "[3.0, 3.0, 3.0]"]
    (made,) = compiled(tmp_path)
    assert f"! {made}\n" in log.read_text()
    assert run(tmp_path, script)[0] == "nothing to do"


def test_a_compiler_that_fails_leaves_nothing_behind(tmp_path: Path) -> None:
    script = f'case "$*" in *c++-header*) echo broken >&2; exit 1;; esac; {GCC} "$@"'
    assert run(tmp_path, script) == ["begun", "[3.0, 3.0, 3.0]"]
    assert not compiled(tmp_path)


def test_a_folder_that_takes_no_files_is_no_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mlx").write_text("a file where a folder should be")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    thread = cpu_header.prepare()
    assert thread is not None
    thread.join()


@pytest.mark.parametrize("missing", ["compiler", "Linux"])
def test_nothing_begins_where_mlx_does_not_ask_gcc(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if missing == "compiler":
        monkeypatch.setattr(shutil, "which", lambda name: None)
    else:
        monkeypatch.setattr(sys, "platform", "darwin")
    assert cpu_header.prepare() is None
