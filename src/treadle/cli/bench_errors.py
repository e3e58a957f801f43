"""Exit codes and error lines of the `treadle bench` commands."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable


def run_reporting_errors(command: Callable[[], int], *, error_code: int = 1) -> int:
    """Run a command and return its exit code; an error is one line on standard error, and `error_code`."""
    from ..errors import TreadleError, spell

    try:
        return command()
    except TreadleError as error:
        print(f"treadle bench: {spell(error.message, {})}", file=sys.stderr)
        return error_code
    except (KeyboardInterrupt, asyncio.CancelledError):
        print("treadle bench: interrupted", file=sys.stderr)
        return 130
