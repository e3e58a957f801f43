"""The command line: serve, doctor, pull, models, rm, bench, fleet."""

from __future__ import annotations

import logging
import os
import sys
from typing import Any, NoReturn, cast

from .. import streams

INTERRUPTED = 130
SERVING = ("serve", "doctor")


def main() -> NoReturn:
    """Entry of the `treadle` command. A mistake, or an error of Treadle's own, is one line and a non-zero exit.

    The process ends here and now: the threads of a download that was given up would hold up the interpreter's own end.
    """
    streams.open_missing_descriptors()
    code = _run()
    logging.shutdown()
    streams.flush_within()
    os._exit(code)


def _run() -> int:
    import typer

    from ..errors import TreadleError, spell
    from .app import app
    from .flags import FLAGS

    usage_error = cast(type[Exception], typer.BadParameter.__mro__[1])  # typer names only this leaf in public
    try:
        code = app(standalone_mode=False)
    except TreadleError as error:
        return _say(spell(error.message, FLAGS), exit_code(error))
    except usage_error as error:
        return _say_usage(error)
    except typer.Abort:
        return _say("aborted", 1)
    except KeyboardInterrupt:
        return INTERRUPTED
    return code if isinstance(code, int) else 0


def exit_code(error: Exception) -> int:
    """2 for a wrong setting, 1 for everything else."""
    from ..errors import ConfigError

    return 2 if isinstance(error, ConfigError) else 1


def _say_usage(error: BaseException) -> int:
    """One line for a wrong command line; without any arguments the help has been shown, and nothing is left to say."""
    message = error.format_message()  # type: ignore[attr-defined]
    context = error.ctx  # type: ignore[attr-defined]
    if context is not None and context.info_name in SERVING and (refused := getattr(error, "option_name", "")):
        from .foreign_options import cure

        message = cure(refused, sys.argv[1:], _typed(context)) or message
    return _say(f"{message.rstrip('.')}; see {_typed(context)} --help", 2) if message else 2


def _typed(context: Any) -> str:
    """The command and subcommand of `context` as the user ran them."""
    from ..installation import command

    if context is None:
        return command()
    subcommand: str = context.command_path.removeprefix(context.find_root().command_path)
    return command() + subcommand


def _say(message: str, code: int) -> int:
    print(f"treadle: error: {' '.join(message.split())}", file=sys.stderr)
    return code
