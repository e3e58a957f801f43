"""The name under which the user ran Treadle, for messages that tell what to run next."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

from .commands import shown
from .origin import NAME

VARIABLE = "TREADLE_COMMAND"
"""What a wrapper script sets to its own path: the program that it starts has another."""


def command() -> str:
    """`treadle`, `./treadle` or `python -m treadle`: the words that run this copy from the current folder, quoted for a
    shell. `treadle` where Treadle is part of another program."""
    typed = os.environ.get(VARIABLE) or sys.argv[0]
    path = Path(typed)
    if path.name == "__main__.py" and path.parent.name == NAME:
        return f"{_python()} -m {NAME}"
    if path.name != NAME or os.sep not in typed or _is_on_path(path):
        return NAME
    short = shown(path.absolute())
    return short if os.sep in short else f"./{short}"


def _is_on_path(path: Path) -> bool:
    """Whether a shell that is given the bare name runs `path`."""
    found = shutil.which(path.name)
    try:
        return found is not None and os.path.samefile(found, path)
    except OSError:
        return False


def _python() -> str:
    """This interpreter, by its bare name where a shell finds it by that."""
    here = Path(sys.executable)
    for name in ("python", "python3"):
        found = shutil.which(name)
        if found is not None and Path(found).parent == here.parent:
            return name
    return shown(here)
