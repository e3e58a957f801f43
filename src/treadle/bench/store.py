"""Result file: one JSON document, written completely or not at all."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

import msgspec

from .errors import BenchError
from .samples import Result

FORMAT = 1


class _Head(msgspec.Struct):
    format: int


def save(result: msgspec.Struct, path: Path) -> None:
    """Write `result`, creating folders as needed; the file at `path` stays until the new one is complete. Raises
    BenchError if it can't be written."""
    _write(path, msgspec.json.encode(result) + b"\n")


def write_text(path: Path, text: str) -> None:
    """Write `text` as UTF-8 in the same way. Characters that can't be encoded are replaced."""
    _write(path, text.encode("utf-8", errors="replace"))


def check_writable(path: Path) -> None:
    """Raise BenchError if `path` can't be written: better before a long run than after it. Leaves only the folders
    behind."""
    with _reporting_errors(path):
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if _is_special(path):
            path.open("ab").close()
            return
        temporary = _temporary(_target(path))
        temporary.touch()
        temporary.unlink()


def _write(path: Path, data: bytes) -> None:
    with _reporting_errors(path):
        if _is_special(path):
            path.write_bytes(data)
            return
        target = _target(path)
        temporary = _temporary(target)
        try:
            with temporary.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(target)
        finally:
            temporary.unlink(missing_ok=True)


def _target(path: Path) -> Path:
    """Return the path to write to: the target of a link, with its folder made."""
    target = Path(os.path.realpath(path))
    target.parent.mkdir(parents=True, exist_ok=True)
    return target


def _temporary(target: Path) -> Path:
    return target.parent / f".treadle-bench.{os.getpid()}.part"


def _is_special(path: Path) -> bool:
    """Whether `path` is a device or a pipe: `/dev/null` and `/dev/stdout` are written to, never replaced."""
    return path.exists() and not path.is_file() and not path.is_dir()


@contextlib.contextmanager
def _reporting_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise BenchError(f"{path} can't be written ({_cause(error)}): name another file") from error


def load(path: Path) -> Result:
    """Read the result in `path`. Raises BenchError if there is none, or if it is torn or of another format."""
    try:
        data = path.read_bytes()
    except FileNotFoundError as error:
        raise BenchError(f"there is no {path}: name a file that `treadle bench run` wrote") from error
    except OSError as error:
        raise BenchError(
            f"{path} can't be read ({_cause(error)}): name a file that `treadle bench run` wrote"
        ) from error
    _check_format(path, data)
    try:
        return msgspec.json.decode(data, type=Result)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _not_a_result(path, error) from error


def _check_format(path: Path, data: bytes) -> None:
    try:
        head = msgspec.json.decode(data, type=_Head)
    except (msgspec.ValidationError, UnicodeDecodeError, RecursionError) as error:
        raise _not_a_result(path, error) from error
    except msgspec.DecodeError as error:
        raise BenchError(f"{path} is not whole JSON ({error}): copy it again, or run the benchmark again") from error
    if head.format != FORMAT:
        raise BenchError(
            f"{path} has format {head.format} and this Treadle reads {FORMAT}: "
            "read it with the version that wrote it, or run the benchmark again"
        )


def _not_a_result(path: Path, error: Exception) -> BenchError:
    return BenchError(f"{path} is not a result of treadle bench ({error}): name a file that `treadle bench run` wrote")


def _cause(error: OSError) -> str:
    return error.strerror or type(error).__name__
