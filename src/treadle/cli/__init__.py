"""Command line: serve, doctor, pull, models, rm, bench, fleet, keys, connect."""

from __future__ import annotations

import logging
import os
import sys
from typing import Any, NoReturn, cast

from .. import output_streams

INTERRUPTED = 130
SERVING = ("serve", "doctor")


def main() -> NoReturn:
    """Run the `treadle` command. A usage error, or an error of Treadle's own, is one line and a non-zero exit.

    Ends the process with `os._exit`: threads of a download that was given up would delay the interpreter's own end.
    """
    output_streams.open_missing_descriptors()
    code = _run()
    logging.shutdown()
    output_streams.flush_within()
    os._exit(code)


def _run() -> int:
    from ..gc_pause import without_collections

    with without_collections():
        import typer

        from ..errors import TreadleError, spell
        from .app import app
        from .flags import FLAGS

    usage_error = cast(type[Exception], typer.BadParameter.__mro__[1])  # typer names only this leaf in public
    try:
        code = app(standalone_mode=False)
    except TreadleError as error:
        return _print_error(spell(error.message, FLAGS), exit_code(error))
    except usage_error as error:
        return _print_usage_error(error)
    except typer.Abort:
        return _print_error("aborted", 1)
    except KeyboardInterrupt:
        return INTERRUPTED
    return code if isinstance(code, int) else 0


def exit_code(error: Exception) -> int:
    """Return 2 for a wrong setting, 1 for every other error."""
    from ..errors import ConfigError

    return 2 if isinstance(error, ConfigError) else 1


def _print_usage_error(error: BaseException) -> int:
    """Print one line for a wrong command line; without arguments typer has printed the help already."""
    message = error.format_message().replace(": Value error, ", ": ")  # type: ignore[attr-defined]
    context = error.ctx  # type: ignore[attr-defined]
    if context is not None and context.info_name in SERVING and (refused := getattr(error, "option_name", "")):
        from .foreign_options import cure

        message = cure(refused, sys.argv[1:], _command_line(context)) or message
    return _print_error(f"{message.rstrip('.')}; see {_command_line(context)} --help", 2) if message else 2


def _command_line(context: Any) -> str:
    """Return the command and subcommand of `context` as the user ran them."""
    from ..installation import command

    if context is None:
        return command()
    subcommand: str = context.command_path.removeprefix(context.find_root().command_path)
    return command() + subcommand


def _print_error(message: str, code: int) -> int:
    print(f"treadle: error: {' '.join(message.split())}", file=sys.stderr)
    return code
