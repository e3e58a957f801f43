"""`treadle connect`: print or write the settings with which a client uses this server."""

from __future__ import annotations

import shutil
import stat
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ...errors import ConfigError
from ...installation import command
from .clients import CLIENTS, TITLE
from .errors import ConnectError, UnreadableSettings
from .files import Change, read, write
from .server import Server, ask
from .settings import Client, SettingsFile, Setup

_ANY = Server("http://127.0.0.1:8000", "MODEL", context=1)
"""Stands for every server where only the places of its settings matter."""
_WIDE = 1000  # output for programs: no cell may be folded


@dataclass(frozen=True)
class Options:
    """Options of the command."""

    url: str
    model: str | None
    key: str | None
    write: bool
    remove: bool
    yes: bool
    write_key: bool


def find(name: str) -> Client:
    """Return the client called `name`. Raises ConfigError."""
    if name not in CLIENTS:
        raise ConfigError(f"no client is called '{name}': choose from {', '.join(CLIENTS)}")
    return CLIENTS[name]


# Without a client ---------------------------------------------------------------------------------------------------


def show_clients() -> int:
    """Print the clients, whether each seems to be installed, and the files that it would change. Returns 0."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=_WIDE)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("CLIENT", "", "INSTALLED", "CONNECTED", "SETTINGS"):
        table.add_column(name, overflow="fold")
    for client in CLIENTS.values():
        files = client.setup(_ANY).files
        shown = ", ".join(str(file.path) for file in files) or "environment variables"
        installed = "yes" if is_installed(client) else "-"
        connected = "yes" if any(is_connected(file) for file in files) else "-"
        table.add_row(*(Text(cell) for cell in (client.name, client.title, installed, connected, shown)))
    console.print(table)
    console.print(f"'{command()} connect CLIENT' prints the settings of one, '--write' writes them", markup=False)
    return 0


def is_installed(client: Client) -> bool:
    """Whether a program of the client is in PATH, or a folder of its own is there."""
    home = Path.home()
    return any(map(shutil.which, client.programs)) or any((home / folder).exists() for folder in client.folders)


def is_connected(file: SettingsFile) -> bool:
    """Whether a settings file has the entry of an earlier connection."""
    try:
        text = read(file.path)
        return text is not None and file.without_edits(text) != text
    except ConnectError:
        return False


# Printing -----------------------------------------------------------------------------------------------------------


def show_settings(client: Client, server: Server) -> int:
    """Print the settings of a client on standard output. Returns 0."""
    setup = client.setup(server)
    for file in setup.files:
        print(f"# {file.path}\n{file.example()}")
    _print_start(setup)
    _warn(client, server)
    if setup.files:
        _report(f"'{command()} connect {client.name} --write' writes this, beside the settings that are there.")
    return 0


def _print_start(setup: Setup) -> None:
    for name, value in setup.variables.items():
        print(f"export {name}={value}")
    print(setup.start)
    for note in setup.notes:
        _report(note)


def _warn(client: Client, server: Server) -> None:
    """Warn of a model that can't serve the client, or hardly."""
    if server.embeds_only:
        _report(
            f"Warning: {server.model} makes embeddings and generates no text: every chat of {client.title} will be "
            "refused. Serve a model that generates text, or give the address of another server with --url."
        )
        return
    if server.context is None or server.context >= 2 * client.prompt_tokens:
        return
    short = server.context <= client.prompt_tokens
    effect = "its requests will be refused" if short else "little is left for the conversation"
    _report(
        f"Warning: {client.title} sends about {client.prompt_tokens:,} tokens before your first word, and the context "
        f"of {server.model} is {server.context:,} here: {effect}. Serve a model with a longer context, or raise "
        "--context."
    )


# Writing ------------------------------------------------------------------------------------------------------------


def connect(client: Client, server: Server, *, yes: bool) -> int:
    """Write the settings of a client after a question. Returns 0; 1 if the answer was no. Raises ConnectError."""
    setup = client.setup(server)
    _check_has_files(client, setup)
    changes = [_with_edits(file, server) for file in setup.files]
    _warn(client, server)
    if not any(change.needed for change in changes):
        _report(f"{client.title} is connected to {server.url} already: nothing was written")
    elif not _make(changes, "Write this?", yes=yes):
        return 1
    _report("Start it with:")
    _print_start(setup)
    return 0


def disconnect(client: Client, *, yes: bool) -> int:
    """Take the settings out of a client's files after a question. Returns 0; 1 if the answer was no."""
    setup = client.setup(_ANY)
    _check_has_files(client, setup)
    changes = [_without_edits(file) for file in setup.files]
    if not any(change.needed for change in changes):
        _report(f"{client.title} has no settings of {TITLE}: nothing was removed")
        return 0
    return 0 if _make(changes, "Remove this?", yes=yes) else 1


def _check_has_files(client: Client, setup: Setup) -> None:
    if not setup.files:
        raise ConfigError(
            f"{client.title} has no settings file to write: '{command()} connect {client.name}' prints the variables "
            "that it needs"
        )


def _with_edits(file: SettingsFile, server: Server) -> Change:
    before = read(file.path)
    try:
        after = file.with_edits(before or "")
    except UnreadableSettings as error:
        print(f"# To add to {file.path}:\n{file.example()}")
        raise ConnectError(
            f"{file.path} can't be changed: {error.message}. Mend it, or add by hand what is printed above"
        ) from None
    key = server.written_key
    return Change(file.path, before, after, secret=key is not None and key in after)


def _without_edits(file: SettingsFile) -> Change:
    before = read(file.path)
    try:
        after = None if before is None else file.without_edits(before)
    except UnreadableSettings as error:
        raise ConnectError(f"{file.path} can't be changed: {error.message}. Mend it, or edit it by hand") from None
    return Change(file.path, before, after)


def _make(changes: list[Change], question: str, *, yes: bool) -> bool:
    """Show the changes, ask, and make them. Returns False if the answer was no."""
    needed = [change for change in changes if change.needed]
    for change in needed:
        print(change.diff(), end="", flush=True)
    if not yes and not _confirmed(question):
        _report("Nothing was changed")
        return False
    for change in needed:
        backup = write(change)
        done = "Removed" if change.after is None else "Wrote"
        _report(f"{done} {change.path}{f'; before: {backup}' if backup else ''}")
        if change.secret and change.path.stat().st_mode & (stat.S_IRGRP | stat.S_IROTH):
            _report(f"Warning: {change.path} holds the key, and other users can read it: chmod 600 {change.path}")
    return True


def _confirmed(question: str) -> bool:
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise ConfigError("there is no terminal to ask on: give --yes to write without asking", param="yes")
    return typer.confirm(question, prompt_suffix=" ", err=True)


def _report(text: str) -> None:
    print(text, file=sys.stderr)


def run(client: str | None, options: Options) -> int:
    """Run the command. Returns the exit code. Raises ConfigError and ConnectError."""
    if client is None:
        if options.write or options.remove:
            raise ConfigError(f"which client? choose from {', '.join(CLIENTS)}")
        return show_clients()
    found = find(client)
    if options.remove:
        return disconnect(found, yes=options.yes)
    server = ask(options.url, options.model, options.key)
    if options.write_key:
        server = replace(server, written_key=options.key)
    return connect(found, server, yes=options.yes) if options.write else show_settings(found, server)
