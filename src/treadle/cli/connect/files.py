"""Writing of settings files: a diff, a backup beside each file, and replacement in one step."""

from __future__ import annotations

import contextlib
import difflib
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from .errors import ConnectError

_MAX_BYTES = 4 << 20


@dataclass(frozen=True)
class Change:
    """The new text of a file; None removes it. `before` is its text now; None where there is none."""

    path: Path
    before: str | None
    after: str | None
    secret: bool = False
    """Whether the new text holds an API key: a new file is for its owner alone then."""

    @property
    def needed(self) -> bool:
        return self.before != self.after

    def diff(self) -> str:
        """Return the change as a unified diff."""
        old, new = ((text or "").splitlines(keepends=True) for text in (self.before, self.after))
        name = str(self.path)
        lines = difflib.unified_diff(
            old, new, name if self.before is not None else "/dev/null", name if self.after is not None else "/dev/null"
        )
        return "".join(line if line.endswith("\n") else f"{line}\n" for line in lines)


def read(path: Path) -> str | None:
    """Return a file's text; None where there is none. Raises ConnectError."""
    try:
        if path.is_file() and path.stat().st_size > _MAX_BYTES:
            raise ConnectError(f"{path} is larger than any settings file: is it one?")
        return path.read_bytes().decode("utf-8")
    except FileNotFoundError:
        return None
    except UnicodeDecodeError:
        raise ConnectError(f"{path} is not UTF-8: save it as UTF-8 first") from None
    except OSError as error:
        raise ConnectError(f"can't read {path}: {error.strerror}") from None


def write(change: Change) -> Path | None:
    """Make a change; return the backup of what was there. Raises ConnectError if the file can't be written, or has
    changed since it was read."""
    target = change.path.resolve()
    if read(target) != change.before:
        raise ConnectError(f"{change.path} was changed by another program just now: run the command again")
    try:
        backup = _back_up(target) if change.before is not None else None
        if change.after is None:
            change.path.unlink()
        else:
            _replace(target, change.after, secret=change.secret)
    except OSError as error:
        raise ConnectError(f"can't write {change.path}: {error.strerror}") from None
    return backup


def _back_up(path: Path) -> Path:
    """Copy a file, with its mode, to a new name beside it."""
    stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
    for backup in _names(f"{path}.bak-{stamp}"):
        with contextlib.suppress(FileExistsError):
            os.close(os.open(backup, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
            shutil.copy2(path, backup)
            return backup
    raise AssertionError


def _names(name: str) -> Iterator[Path]:
    yield Path(name)
    number = 1
    while True:
        number += 1
        yield Path(f"{name}-{number}")


def _replace(path: Path, text: str, *, secret: bool) -> None:
    """Write a file so that readers see the old text or the new one, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with open(descriptor, "wb") as file:
            file.write(text.encode())
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, _mode(path, secret=secret))
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise


def _mode(path: Path, *, secret: bool) -> int:
    """Return the mode of the file that is there, else that of a new one."""
    with contextlib.suppress(FileNotFoundError):
        return path.stat().st_mode & 0o7777
    if secret:
        return 0o600
    mask = os.umask(0)
    os.umask(mask)
    return 0o666 & ~mask
