"""The keys of a running server: `--api-key`, and a keys file that is read again when it changes, so that a key is added
or revoked without a restart."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path

from ..errors import ConfigError, spell
from .file import read
from .ring import Key, Keyring, single_key

log = logging.getLogger(__name__)

LOOK_EVERY_S = 2.0
Work = Callable[[], tuple[Key, ...] | None]
Aside = Callable[[Work], Awaitable[tuple[Key, ...] | None]]


class KeySource:
    """The keys that open the server now. `configured`: there are keys at all; without, everyone may come in."""

    def __init__(self, api_key: str | None = None, path: Path | None = None) -> None:
        """Raises ConfigError for a file that is missing, malformed or without keys."""
        self._path = path
        self._single = () if api_key is None else (single_key(api_key),)
        self._stamp: tuple[int, ...] = ()
        self._complaint = ""
        self.configured = bool(self._single) or path is not None
        self.ring = Keyring((*self._single, *(self._first() if path is not None else ())))

    async def watch(self, aside: Aside, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep) -> None:
        """Look for changes of the file every LOOK_EVERY_S seconds, until cancelled. `aside` runs work off the event
        loop: the file may be on a network."""
        while self._path is not None:
            await sleep(LOOK_EVERY_S)
            await self.look(aside)

    async def look(self, aside: Aside) -> None:
        """Read the file if it has changed. One that can't be read or is malformed changes nothing but the log."""
        try:
            keys = await aside(self._changed)
        except ConfigError as error:
            if error.message != self._complaint:
                self._complaint = error.message
                why = spell(error.message, {"api_keys": "the keys file"})
                log.error("the keys file can't be used, so the keys read before stay valid until it is mended: %s", why)
            return
        if keys is not None:
            self._complaint = ""
            self._adopt(keys)

    def _adopt(self, keys: tuple[Key, ...]) -> None:
        before = {key.name for key in self.ring} - {key.name for key in self._single}
        now = {key.name for key in keys}
        self.ring = Keyring((*self._single, *keys))
        fields = {"keys": len(now), "added": ",".join(sorted(now - before)), "removed": ",".join(sorted(before - now))}
        log.info("keys file read again", extra={"fields": {name: value for name, value in fields.items() if value}})

    def _first(self) -> tuple[Key, ...]:
        assert self._path is not None
        self._stamp = self._now()
        keys = read(self._path)
        if not keys and not self._single:
            raise ConfigError(
                f"`api_keys` {self._path} holds no key, so nobody could come in: treadle keys add NAME --api-keys "
                f"{self._path}",
                param="api_keys",
            )
        return keys

    def _changed(self) -> tuple[Key, ...] | None:
        """The file's keys where it is another one than before, or can be used again, else None."""
        assert self._path is not None
        stamp = self._now()
        if stamp == self._stamp and stamp and not self._complaint:
            return None
        keys = read(self._path)
        self._stamp = stamp
        return keys

    def _now(self) -> tuple[int, ...]:
        """Which version of the file is there; empty where there is none."""
        assert self._path is not None
        try:
            found = self._path.stat()
        except OSError:
            return ()
        return (found.st_mtime_ns, found.st_size, found.st_ino, found.st_mode)
