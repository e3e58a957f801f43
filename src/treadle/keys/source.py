"""Keys of a running server: `--api-key`, and a keys file that is reloaded when it changes, without a restart."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path

from ..errors import ConfigError, one_line, spell
from .file import read
from .ring import Key, Keyring, single_key

log = logging.getLogger(__name__)

POLL_S = 2.0
Work = Callable[[], tuple[Key, ...] | None]
RunBlocking = Callable[[Work], Awaitable[tuple[Key, ...] | None]]


class KeySource:
    """The currently valid keys, in `ring`. `configured`: whether keys are required at all."""

    def __init__(self, api_key: str | None = None, path: Path | None = None) -> None:
        """Load the keys. Raises ConfigError for a keys file that is missing or malformed, or holds the key of
        `api_key`, and when there are no keys."""
        self._path = path
        self._single = () if api_key is None else (single_key(api_key),)
        self._stamp: tuple[int, ...] = ()
        self._last_error = ""
        self.configured = bool(self._single) or path is not None
        self.ring = Keyring((*self._single, *(self._load() if path is not None else ())))

    async def watch(self, run_blocking: RunBlocking, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep) -> None:
        """Check the file for changes every POLL_S seconds, until cancelled. `run_blocking` runs a function off the
        event loop, as the file may be on a network."""
        while self._path is not None:
            await sleep(POLL_S)
            await self.reload_if_changed(run_blocking)

    async def reload_if_changed(self, run_blocking: RunBlocking) -> None:
        """Reload the file if it has changed. If it is unreadable or malformed, or reading it fails in any other way,
        log an error and keep the old keys."""
        try:
            keys = await run_blocking(self._read_if_changed)
        except ConfigError as error:
            self._report(spell(error.message, {"api_keys": "the keys file", "api_key": "the key of --api-key"}))
            return
        except Exception as error:
            self._report(f"{self._path}: {type(error).__name__}: {one_line(error)}", error)
            return
        if keys is not None:
            self._last_error = ""
            self._replace_keys(keys)

    def _report(self, why: str, error: Exception | None = None) -> None:
        """Log why the file can't be used, once until that changes; `error` with its traceback."""
        if why != self._last_error:
            self._last_error = why
            told = "the keys file can't be used, so the keys read before stay valid until it is mended: %s"
            log.error(told, why, exc_info=error)

    def _replace_keys(self, keys: tuple[Key, ...]) -> None:
        before = {key.name for key in self.ring} - {key.name for key in self._single}
        now = {key.name for key in keys}
        self.ring = Keyring((*self._single, *keys))
        fields = {"keys": len(now), "added": ",".join(sorted(now - before)), "removed": ",".join(sorted(before - now))}
        log.info("keys file read again", extra={"fields": {name: value for name, value in fields.items() if value}})

    def _load(self) -> tuple[Key, ...]:
        assert self._path is not None
        self._stamp = self._file_stamp()
        keys = self._read(self._path)
        if not keys and not self._single:
            raise ConfigError(
                f"`api_keys` {self._path} holds no key, so nobody could come in: treadle keys add NAME --api-keys "
                f"{self._path}",
                param="api_keys",
            )
        return keys

    def _read_if_changed(self) -> tuple[Key, ...] | None:
        """Read the file's keys if it has changed, or if the last attempt failed; else return None."""
        assert self._path is not None
        stamp = self._file_stamp()
        if stamp == self._stamp and stamp and not self._last_error:
            return None
        keys = self._read(self._path)
        self._stamp = stamp
        return keys

    def _read(self, path: Path) -> tuple[Key, ...]:
        """Read the file's keys. Raises ConfigError also if one is `api_key`: taken out of the file, it would stay valid
        with all rights."""
        keys = read(path)
        single = {key.sha256 for key in self._single}
        for key in keys:
            if key.sha256 in single:
                raise ConfigError(
                    f"`api_key` is '{key.name}' of {path}, which could not be revoked: unset it, or remove "
                    f"'{key.name}' with treadle keys remove {key.name} --api-keys {path}",
                    param="api_key",
                )
        return keys

    def _file_stamp(self) -> tuple[int, ...]:
        """Return an identification of the file's version; () if the file is missing."""
        assert self._path is not None
        try:
            found = self._path.stat()
        except OSError:
            return ()
        return (found.st_mtime_ns, found.st_size, found.st_ino, found.st_mode)
