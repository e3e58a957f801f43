"""The command line: serve, doctor."""

from __future__ import annotations

import sys


def main() -> None:
    """Entry of the `treadle` command. An error of Treadle's own is one line and a non-zero exit, never a traceback."""
    from ..errors import ConfigError, TreadleError
    from .app import app

    try:
        app()
    except TreadleError as error:
        print(f"treadle: error: {error.message}", file=sys.stderr)
        sys.exit(2 if isinstance(error, ConfigError) else 1)
