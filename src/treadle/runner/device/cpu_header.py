"""Precompiled header for MLX's compiled functions on Linux's CPUs.

MLX has `g++` compile each function of `mx.compile` when it is first used on a machine. Four fifths of that time are
spent on one header, the same for all. GCC takes a header's compiled form, `NAME.gch`, where it looks for the header;
for a quoted name that is first the folder of the source, which is MLX's cache, with a folder for each version of MLX.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from importlib import metadata
from pathlib import Path

import mlx.core as mx

_log = logging.getLogger(__name__)
HEADER = Path("mlx/backend/cpu/compiled_preamble.h")
OPTIONS = ("-std=c++17", "-O3", "-Wall", "-fPIC")
"""Those of MLX: GCC ignores a compiled header that was made with others."""


def prepare() -> threading.Thread | None:
    """Begin to compile the header in a thread, unless it has been before; None where there is nothing to do.
    Nothing depends on it: whatever fails is logged at level debug."""
    if not sys.platform.startswith("linux") or shutil.which("g++") is None:
        return None
    include = Path(mx.__file__).parent / "include"
    made = _cache(metadata.version("mlx")) / HEADER.with_name(f"{HEADER.name}.gch")
    if made.exists() or not (include / HEADER).exists():
        return None
    thread = threading.Thread(target=_compile, args=(include, made), name="treadle-cpu-header", daemon=True)
    thread.start()
    return thread


def _cache(version: str) -> Path:
    """Return the folder in which this version of MLX keeps compiled functions."""
    return Path(tempfile.gettempdir(), "mlx", version, "cpu")


def _compile(include: Path, made: Path) -> None:
    mine = made.with_name(f"{made.name}.{os.getpid()}")
    command = ["g++", *OPTIONS, "-w", "-x", "c++-header", str(include / HEADER), "-I", str(include), "-o", str(mine)]
    try:
        made.parent.mkdir(parents=True, exist_ok=True)
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
        if done.returncode:
            _log.debug("g++ did not compile the header of MLX: %s", done.stderr[:500])
        else:
            mine.replace(made)
    except OSError as error:
        _log.debug("the header of MLX is not compiled: %s", error)
    finally:
        with contextlib.suppress(OSError):
            mine.unlink(missing_ok=True)
