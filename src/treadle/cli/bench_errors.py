"""How the commands of `treadle bench` end."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable


def run_cli(go: Callable[[], int]) -> int:
    """The exit code; what went wrong is one line."""
    from ..errors import TreadleError, spell

    try:
        return go()
    except TreadleError as error:
        print(f"treadle bench: {spell(error.message, {})}", file=sys.stderr)
        return 1
    except (KeyboardInterrupt, asyncio.CancelledError):
        print("treadle bench: interrupted", file=sys.stderr)
        return 130
