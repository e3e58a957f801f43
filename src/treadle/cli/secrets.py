"""The API key as users give it: kept out of the environment of other processes, and told of where `ps` shows it."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence

from ..environment import KEY_VARIABLE

log = logging.getLogger(__name__)

FLAG = "--api-key"


def forget_key() -> None:
    """Take the key out of this process's environment, so that nothing it starts inherits it. What the user set stays
    readable in /proc/PID/environ, for the same user and root alone."""
    os.environ.pop(KEY_VARIABLE, None)


def warn_of_command_line(arguments: Sequence[str] | None = None) -> None:
    """Log a warning where the key stands on the command line."""
    given = sys.argv[1:] if arguments is None else arguments
    if any(argument == FLAG or argument.startswith(f"{FLAG}=") for argument in given):
        log.warning(
            "%s is on the command line, where ps shows it to every user of this machine: set %s, or use --api-keys "
            "with a file of hashed keys",
            FLAG,
            KEY_VARIABLE,
        )
