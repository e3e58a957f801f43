"""An image process, on the event loop: start, one image at a time, end."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from typing import Any

import msgspec

from ..environment import without_secrets
from ..processes import is_stopped
from ..text.work.channel import Channel, start_child
from .messages import Prepare, Prepared, Refused, Start, Started, from_child

START_S = 60.0
"""Seconds for the interpreter and its imports, on a machine that is busy."""
REPORT_S = 2.0


class Lost(Exception):
    """The process has ended or was killed while it prepared an image. `outside`: not by the image."""

    def __init__(self, how: str, *, outside: bool) -> None:
        super().__init__(how)
        self.how = how
        self.outside = outside


class ImageProcess:
    """One image process. `limit_s`: the longest time for an image, in seconds."""

    module = "treadle.media.child"

    def __init__(self, start: Start, limit_s: float) -> None:
        self._start = start
        self._limit_s = limit_s
        self._process: asyncio.subprocess.Process | None = None
        self._channel: Channel | None = None

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    @property
    def ended(self) -> bool:
        """Whether a process that was started has ended since."""
        return self._process is not None and self._process.returncode is not None

    async def start(self) -> None:
        """Start the process and wait until it takes images. Raises OSError where it doesn't."""
        environment = {**without_secrets(), "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        self._process, self._channel = await start_child(self.module, environment)
        try:
            async with asyncio.timeout(START_S):
                await self._channel.write(self._start)
                message, _ = await self._channel.read(from_child)
                assert isinstance(message, Started)
        except (EOFError, TimeoutError, msgspec.MsgspecError) as error:
            await self.close()
            raise OSError(f"it did not start ({type(error).__name__})") from error
        except BaseException:
            await self.close()
            raise

    async def prepare(self, order: Prepare, data: bytes) -> Prepared | Refused:
        """Prepare an image. Raises Lost where that cost the process."""
        assert self._channel is not None
        try:
            async with asyncio.timeout(self._limit_s):
                await self._channel.write(order, data)
                message: Any = (await self._channel.read(from_child))[0]
        except TimeoutError:
            stopped = self.pid is not None and is_stopped(self.pid)
            raise Lost(f"took more than {self._limit_s:g} s", outside=stopped) from None
        except (EOFError, OSError, msgspec.MsgspecError):
            raise await self._lost() from None
        assert isinstance(message, Prepared | Refused)
        return message

    async def _lost(self) -> Lost:
        """Return why the process is gone."""
        assert self._process is not None
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._process.wait(), REPORT_S)
        code = self._process.returncode
        if code == -signal.SIGPROF:
            return Lost(f"took more than {self._start.cpu_s:g} s of processor time", outside=False)
        return Lost("crashed", outside=code in (-signal.SIGKILL, -signal.SIGTERM))

    async def close(self) -> None:
        """Kill the process and wait for its exit. Idempotent."""
        if self._channel is not None:
            self._channel.close()
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()
