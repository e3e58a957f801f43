"""The command by which the user ran Treadle, for messages that suggest another command."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

from .commands import quote_path
from .origin import NAME

VARIABLE = "TREADLE_COMMAND"
"""Environment variable that a wrapper script sets to its own path."""


def command() -> str:
    """Return the shell command that runs this copy from the current folder: `treadle`, `./treadle` or
    `python -m treadle`. `treadle` if another program uses Treadle as a library."""
    typed = os.environ.get(VARIABLE) or sys.argv[0]
    path = Path(typed)
    if path.name == "__main__.py" and path.parent.name == NAME:
        return f"{_python()} -m {NAME}"
    if path.name != NAME or os.sep not in typed or _is_on_path(path):
        return NAME
    short = quote_path(path.absolute())
    return short if os.sep in short else f"./{short}"


def _is_on_path(path: Path) -> bool:
    """Whether the bare name on the PATH is `path`."""
    found = shutil.which(path.name)
    try:
        return found is not None and os.path.samefile(found, path)
    except OSError:
        return False


def _python() -> str:
    """Return this interpreter for a shell, by its bare name if that is on the PATH."""
    here = Path(sys.executable)
    for name in ("python", "python3"):
        found = shutil.which(name)
        if found is not None and Path(found).parent == here.parent:
            return name
    return quote_path(here)
