"""Keys file: TOML with a table `[keys.NAME]` for each key, as in

[keys.alice]
sha256 = "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"
scopes = ["use"]
requests_per_minute = 60
"""

from __future__ import annotations

import contextlib
import difflib
import fcntl
import os
import re
import stat
import tempfile
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from .ring import SINGLE, Key, KeyLimits, Scope

MAX_BYTES = 1 << 20
MAX_KEYS = 1000
LIMITS = ("requests_per_minute", "tokens_per_minute", "max_running")
FIELDS = ("sha256", "scopes", *LIMITS)
MAX_LIMIT = 10**12
ENDLESS = "a number of thousands of digits"
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
HEADER = re.compile(r"\s*\[\s*keys\s*\.\s*[\"']?([A-Za-z0-9_-]+)[\"']?\s*\]\s*(?:#.*)?")


def read(path: Path) -> tuple[Key, ...]:
    """Read the keys of a file. Raises ConfigError for a file that can't be read, is malformed, or is writable by all
    users of this machine."""
    return parse(_read_text(path), str(path))


def parse(text: str, source: str) -> tuple[Key, ...]:
    """Parse the keys in `text`; `source` names it in errors. Raises ConfigError."""
    try:
        whole = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise ConfigError(f"{source} is not valid TOML: {error}", param="api_keys") from error
    except ValueError as error:
        raise _error(source, f"holds a value that can't be read, such as {ENDLESS}: correct it") from error
    tables = whole.pop("keys", {})
    if whole or not isinstance(tables, dict):
        raise _error(source, f"holds '{next(iter(whole), 'keys')}': it may hold tables [keys.NAME] alone")
    if len(tables) > MAX_KEYS:
        raise _error(source, f"holds {len(tables)} keys: {MAX_KEYS} at most")
    keys = tuple(_parse_key(name, table, source) for name, table in tables.items())
    _check_distinct(keys, source)
    return keys


def add(path: Path, key: Key) -> None:
    """Append `key` to the file. A missing file is created with its folders, accessible to its owner alone. Raises
    ConfigError when the file already has the name or the key, is full, or can't be written."""
    check_name(key.name)
    with _edited(path, make=True):
        before = _read_text(path) if path.exists() else ""
        held = parse(before, str(path))
        _check_distinct((*held, key), str(path))
        if any(known.name == key.name for known in held):
            raise _error(path, f"has a key named '{key.name}': remove it first, or choose another name")
        if len(held) >= MAX_KEYS:
            raise _error(path, f"holds {len(held)} keys, as many as it may: remove one first")
        text = before + block(key)
        if _keys_of(text) != (*held, key):
            raise _error(path, "is written in a form that is not edited here: write each key as a table [keys.NAME]")
        _write_atomically(path, text)


def remove(path: Path, name: str) -> None:
    """Remove the key `name` from the file, leaving the rest of its text unchanged. Raises ConfigError."""
    read(path)
    with _edited(path):
        before = _read_text(path)
        held = parse(before, str(path))
        if all(key.name != name for key in held):
            near = difflib.get_close_matches(name, [key.name for key in held], n=1)
            raise _error(path, f"has no key named '{name}'" + (f"; did you mean '{near[0]}'?" if near else ""))
        text = _remove_table(before, name)
        if _keys_of(text) != tuple(key for key in held if key.name != name):
            raise _error(path, f"writes the key '{name}' in a form that is not edited here: take it out by hand")
        _write_atomically(path, text)


def _make_folder(folder: Path) -> None:
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)


def block(key: Key) -> str:
    """Return the TOML table of `key`."""
    lines = ["", f"[keys.{key.name}]", f'sha256 = "{key.sha256.hex()}"']
    lines.append("scopes = [" + ", ".join(f'"{scope}"' for scope in sorted(key.scopes)) + "]")
    limits = ((name, getattr(key.limits, name)) for name in LIMITS)
    lines.extend(f"{name} = {limit}" for name, limit in limits if limit is not None)
    return "\n".join([*lines, ""])


def check_name(name: str) -> None:
    """Raise ConfigError for an invalid key name."""
    if NAME.fullmatch(name) is None:
        raise ConfigError(
            f"'{name[:80]}' can't name a key: use 1 to 64 letters, digits, '-' and '_', the first a letter or a digit",
            param="name",
        )
    if name == SINGLE:
        raise ConfigError(f"'{SINGLE}' is the name of the key of --api-key: choose another", param="name")


# Reading --------------------------------------------------------------------------------------------------------------


def _read_text(path: Path) -> str:
    try:
        found = path.stat()
        if not stat.S_ISREG(found.st_mode):
            raise ConfigError(f"`api_keys` {path} is no file", param="api_keys")
        if found.st_size > MAX_BYTES:
            raise _error(path, f"has {found.st_size} bytes: {MAX_BYTES} at most")
        if found.st_mode & stat.S_IWOTH:
            raise _error(path, f"can be written by every user of this machine, who could add a key: chmod o-w {path}")
        return path.read_bytes().decode("utf-8")  # with the ends of lines that it has
    except FileNotFoundError as error:
        raise ConfigError(
            f"`api_keys` {path} does not exist: make it with treadle keys add NAME --api-keys {path}", param="api_keys"
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ConfigError(f"`api_keys` {path} can't be read: {why}", param="api_keys") from error


def _parse_key(name: str, table: Any, source: str) -> Key:
    where = f"[keys.{name}]"
    check_name(name)
    if not isinstance(table, dict):
        raise _error(source, f"{where} is no table")
    for field in table:
        if field not in FIELDS:
            near = difflib.get_close_matches(field, FIELDS, n=1)
            hint = f"did you mean '{near[0]}'?" if near else f"known: {', '.join(FIELDS)}"
            raise _error(source, f"{where} has an unknown field '{field}'; {hint}")
    limits = KeyLimits(**{limit: _parse_limit(table, limit, where, source) for limit in LIMITS})
    return Key(name, _parse_sha256(table, where, source), _parse_scopes(table, where, source), limits)


def _parse_sha256(table: Mapping[str, Any], where: str, source: str) -> bytes:
    given = table.get("sha256")
    if isinstance(given, str) and re.fullmatch(r"[0-9a-fA-F]{64}", given):
        return bytes.fromhex(given)
    raise _error(source, f"{where} needs sha256, 64 hexadecimal digits: treadle keys add makes the entry")


def _parse_scopes(table: Mapping[str, Any], where: str, source: str) -> frozenset[Scope]:
    given = table.get("scopes", ["use"])
    if not isinstance(given, list) or not given or not all(scope in [*Scope] for scope in given):
        raise _error(source, f"{where} scopes must be a list of {' and '.join(Scope)}, not {_shown(given)}"[:200])
    scopes = frozenset(map(Scope, given))
    return frozenset(Scope) if Scope.ADMIN in scopes else scopes


def _parse_limit(table: Mapping[str, Any], name: str, where: str, source: str) -> int | None:
    given = table.get(name)
    if given is None or (isinstance(given, int) and not isinstance(given, bool) and 1 <= given <= MAX_LIMIT):
        return given
    raise _error(source, f"{where} {name} must be a whole number from 1 to {MAX_LIMIT}, not {_shown(given)}"[:200])


def _check_distinct(keys: tuple[Key, ...], source: str) -> None:
    names: dict[bytes, str] = {}
    for key in keys:
        other = names.setdefault(key.sha256, key.name)
        if other != key.name:
            raise _error(source, f"'{other}' and '{key.name}' are the same key: give each name its own")


def _shown(value: Any) -> str:
    try:
        return repr(value)
    except ValueError:  # Python writes no whole number of so many digits
        return ENDLESS


def _error(source: str | Path, fault: str) -> ConfigError:
    return ConfigError(f"the keys file {source}: {fault}", param="api_keys")


# Writing --------------------------------------------------------------------------------------------------------------


def _remove_table(text: str, name: str) -> str:
    """Return `text` without the table of `name`, from its header to the next one."""
    result, inside = [], False
    for line in text.splitlines(keepends=True):
        if line.lstrip().startswith("["):
            header = HEADER.fullmatch(line.rstrip("\r\n"))
            inside = header is not None and header[1] == name
        if not inside:
            result.append(line)
    return "".join(result)


def _keys_of(text: str) -> tuple[Key, ...] | None:
    """Return the keys of an edited text; None if it is none of a keys file."""
    try:
        return parse(text, "")
    except ConfigError:
        return None


@contextlib.contextmanager
def _edited(path: Path, *, make: bool = False) -> Iterator[None]:
    """Context manager that holds other edits of the folder's files off; with `make` it creates the folder. Raises
    ConfigError for an OSError in it."""
    try:
        if make:
            _make_folder(path.parent)
        handle = os.open(path.resolve().parent, os.O_RDONLY | os.O_CLOEXEC)
        try:
            with contextlib.suppress(OSError):  # some network file systems have no locks
                fcntl.flock(handle, fcntl.LOCK_EX)
            yield
        finally:
            os.close(handle)
    except OSError as error:
        raise ConfigError(f"can't write {path}: {error.strerror}", param="api_keys") from error


def _write_atomically(path: Path, text: str) -> None:
    """Replace the file atomically, keeping its owner and mode: a reader sees either the old keys or the new ones."""
    path = path.resolve()
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with open(handle, "w", encoding="utf-8", newline="") as file:
            file.write(text)
            file.flush()
            if path.exists():
                _copy_access(path, handle)
            os.fsync(handle)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def _copy_access(path: Path, handle: int) -> None:
    """Give the open file the owner, group and mode of `path`. Raises ConfigError where that is not permitted: a server
    that can no longer read its file keeps the old keys."""
    old, new = path.stat(), os.fstat(handle)
    mode = stat.S_IMODE(old.st_mode)
    if (new.st_uid, new.st_gid) != (old.st_uid, old.st_gid):
        try:
            os.fchown(handle, old.st_uid, old.st_gid)
        except PermissionError as error:
            if new.st_uid != old.st_uid or mode & stat.S_IRWXG:
                raise _error(
                    path,
                    f"belongs to the user {old.st_uid} and the group {old.st_gid}, for whom you can't write it anew, "
                    f"so that its server could no longer read it: nothing is changed; run this as that user (sudo -u "
                    f"'#{old.st_uid}') or as root",
                ) from error
    os.fchmod(handle, mode)
