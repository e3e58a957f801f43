"""API key of the user: removed from the environment of child processes, with a warning if `ps` shows it."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence

from ..environment import KEY_VARIABLE

log = logging.getLogger(__name__)

FLAG = "--api-key"


def forget_key() -> None:
    """Remove the key from this process's environment, so that no child inherits it. The original value stays readable
    in /proc/PID/environ, for the same user and root alone."""
    os.environ.pop(KEY_VARIABLE, None)


def warn_of_command_line(arguments: Sequence[str] | None = None) -> None:
    """Log a warning if the key stands on the command line."""
    given = sys.argv[1:] if arguments is None else arguments
    if any(argument == FLAG or argument.startswith(f"{FLAG}=") for argument in given):
        log.warning(
            "%s is on the command line, where ps shows it to every user of this machine: set %s, or use --api-keys "
            "with a file of hashed keys",
            FLAG,
            KEY_VARIABLE,
        )
