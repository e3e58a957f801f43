"""`treadle keys`: make, list and remove the API keys of a keys file."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from ..config import check_api_key
from ..errors import ConfigError, spelled
from ..keys import ALL, Key, KeyLimits, Scope, digest, new_key
from ..keys.file import LIMITS, MAX_LIMIT, add, check_name, read, remove

MIN_CHOSEN_CHARS = 32
FILE_VARIABLE = "TREADLE_API_KEYS"

app = typer.Typer(name="keys", help="Make, list and remove API keys in a file for --api-keys.", no_args_is_help=True)

File = Annotated[
    Path | None,
    typer.Option("--api-keys", help="The keys file.", metavar="FILE", envvar=FILE_VARIABLE, show_default=False),
]
Name = Annotated[str, typer.Argument(help="The key's name, as logs and metrics show it.")]


def _count(flag: str, help_: str) -> typer.models.OptionInfo:
    found: typer.models.OptionInfo = typer.Option(
        flag, help=help_, min=1, max=MAX_LIMIT, metavar="N", show_default=False
    )
    return found


@app.command("add")
def add_key(
    name: Name,
    file: File = None,
    scope: Annotated[Scope, typer.Option("--scope", help="What the key may do; admin includes use.")] = Scope.USE,
    requests_per_minute: Annotated[int | None, _count("--requests-per-minute", "Generations a minute.")] = None,
    tokens_per_minute: Annotated[
        int | None, _count("--tokens-per-minute", "Prompt and answer tokens a minute.")
    ] = None,
    max_running: Annotated[int | None, _count("--max-running", "Sequences that run or wait at once.")] = None,
    from_stdin: Annotated[
        bool, typer.Option("--stdin", help="Take a key of your own from standard input, instead of a new one.")
    ] = False,
) -> None:
    """Add a key to the file, which is made where there is none. A new key is printed once, on standard output: the file
    holds its hash alone. A running server takes it within seconds."""
    path = _path(file)
    check_name(name)
    key = _key_from_stdin() if from_stdin else new_key()
    scopes = ALL if scope is Scope.ADMIN else frozenset({scope})
    limits = KeyLimits(requests_per_minute, tokens_per_minute, max_running)
    add(path, Key(name, digest(key.encode()), scopes, limits))
    if from_stdin:
        _report(f"Added '{name}' to {path}")
    else:
        _report(f"Added '{name}' to {path}. Its key, which is shown this once:")
        print(key)


@app.command("list")
def list_keys(file: File = None) -> None:
    """List the keys' names, scopes and limits."""
    keys = read(_path(file))
    width = max((len(key.name) for key in keys), default=0)
    for key in keys:
        limits = ((limit, getattr(key.limits, limit)) for limit in LIMITS)
        text = ", ".join(f"{limit.replace('_', ' ')} {value}" for limit, value in limits if value is not None)
        print(f"{key.name:<{width}}  {'+'.join(sorted(key.scopes, reverse=True)):<9}  {text or 'no limits'}")


@app.command("remove")
def remove_key(name: Name, file: File = None) -> None:
    """Take a key out of the file. A running server refuses it within seconds."""
    path = _path(file)
    remove(path, name)
    _report(f"Removed '{name}' from {path}")


def _path(file: Path | None) -> Path:
    if file is None:
        raise ConfigError(f"which keys file? give --api-keys FILE, or set {FILE_VARIABLE}", param="api_keys")
    return Path(os.path.expanduser(file))  # no shell has read the variable


def _key_from_stdin() -> str:
    """Read the key on standard input. Raises ConfigError for a short one: a reader of the file could guess it."""
    key = sys.stdin.readline().strip()
    with spelled({"api_key": "the key on standard input"}):
        if not key:
            raise ConfigError("`api_key` is empty: pipe it in, or leave --stdin out to have one made", param="api_key")
        check_api_key(key)
    if len(key) < MIN_CHOSEN_CHARS:
        raise ConfigError(
            f"the key has {len(key)} characters: give {MIN_CHOSEN_CHARS} or more random ones (openssl rand -hex 24), "
            "or leave --stdin out to have one made"
        )
    return key


def _report(text: str) -> None:
    print(text, file=sys.stderr)
