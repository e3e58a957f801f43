"""Command line of `treadle connect`."""

from __future__ import annotations

from typing import Annotated

import typer

from ...config import check_api_key
from ...environment import KEY_VARIABLE
from ...errors import ConfigError


def _names(incomplete: str) -> list[str]:
    from .clients import CLIENTS

    return [name for name in CLIENTS if name.startswith(incomplete)]


def connect_command(
    client: Annotated[
        str | None,
        typer.Argument(
            help="The client, such as claude, codex or zed. Without one: all clients and their files.",
            metavar="[CLIENT]",
            autocompletion=_names,
            show_default=False,
        ),
    ] = None,
    url: Annotated[str, typer.Option("--url", help="Address of the server.", metavar="URL")] = "http://127.0.0.1:8000",
    model: Annotated[
        str | None,
        typer.Option("--model", help="The model's name. Default: the one served.", metavar="NAME", show_default=False),
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option("--api-key", help="Key of the server.", metavar="KEY", envvar=KEY_VARIABLE, show_default=False),
    ] = None,
    write: Annotated[
        bool, typer.Option("--write", help="Write the settings, with a backup, after a diff and a question.")
    ] = False,
    remove: Annotated[bool, typer.Option("--remove", help="Take the settings out again.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    write_key: Annotated[
        bool, typer.Option("--write-key", help="Write the key itself, instead of the variable's name.")
    ] = False,
) -> None:
    """Print the settings with which CLIENT uses this server; with --write, write them into its files."""
    if write and remove:
        raise ConfigError("--write and --remove exclude each other: give one")
    if write_key and not api_key:
        raise ConfigError(f"--write-key needs the key: set {KEY_VARIABLE}, or give --api-key")
    if api_key:
        check_api_key(api_key)
    from .command import Options, run

    options = Options(url, model, api_key or None, write=write, remove=remove, yes=yes, write_key=write_key)
    raise typer.Exit(run(client, options))
