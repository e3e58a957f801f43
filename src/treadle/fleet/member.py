"""One process of a fleet: started, asked, stopped, and never left behind."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import IO

from ..errors import StartFailed
from ..processes import last_lines, signal_group, wait_for_exit

BACKOFF_S = (0.0, 1.0, 2.0, 5.0, 10.0, 30.0)
LEASHED = Path(__file__).with_name("leashed.py")


class Member:
    """A worker or the gateway. It is started again when it ends, each time after a longer pause; its output goes to
    `log`. `cores` are those it may use (None: all). `said` is what it reads from standard input, and `withheld` are
    variables that it does not inherit."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        log: Path,
        *,
        variables: Mapping[str, str] | None = None,
        cores: Collection[int] | None = None,
        said: str | None = None,
        withheld: Collection[str] = (),
    ) -> None:
        self.name = name
        self.log = log
        self.starts = 0
        self.failures = 0
        self._command = list(command)
        self._variables = dict(variables or {})
        self._cores = cores
        self._said = said
        self._withheld = withheld
        self._process: subprocess.Popen[bytes] | None = None
        self._not_before = 0.0
        self._asked = False  # to end

    # Life ----------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the process. Raises StartFailed when there is no such program."""
        self.starts += 1
        self._asked = False
        with self._opened() as log:
            try:
                self._process = subprocess.Popen(
                    self._whole_command(),
                    stdin=subprocess.DEVNULL if self._said is None else subprocess.PIPE,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=self._environment(),
                    start_new_session=True,
                )
            except OSError as error:
                raise StartFailed(f"{self.name} could not be started: {self._command[0]}: {error.strerror}") from error
        self._say()
        if self._cores is not None:
            with contextlib.suppress(OSError):
                os.sched_setaffinity(self._process.pid, self._cores)

    def _whole_command(self) -> list[str]:
        """On Linux, a fleet that is killed takes its members along; elsewhere they go on. Raises FileNotFoundError."""
        if sys.platform != "linux":
            return self._command
        if shutil.which(self._command[0]) is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
        return [sys.executable, "-I", "-S", str(LEASHED), str(os.getpid()), *self._command]

    def _environment(self) -> dict[str, str]:
        inherited = {name: value for name, value in os.environ.items() if name not in self._withheld}
        return inherited | self._variables

    def _say(self) -> None:
        """Write what it is to read: less than a pipe holds, so this does not wait."""
        assert self._process is not None
        if self._said is not None and self._process.stdin is not None:
            with contextlib.suppress(OSError), self._process.stdin as pipe:
                pipe.write(self._said.encode())

    def _opened(self) -> IO[bytes]:
        try:
            return self.log.open("ab")
        except OSError as error:
            raise StartFailed(f"{self.log} can't be written ({error.strerror}): name another folder") from error

    def revive(self, now: float) -> None:
        """Start it again if it has ended and its pause is over."""
        if self.alive:
            return
        if self._not_before == 0.0:
            self.failures += 1
            self._not_before = now + BACKOFF_S[min(self.failures, len(BACKOFF_S)) - 1]
        if now >= self._not_before:
            self._not_before = 0.0
            self.start()

    def works(self) -> None:
        """It has been seen to work: its next end is the first again."""
        self.failures = 0

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to it alone: it ends what it has started itself."""
        if self._process is not None and self.alive:
            self._process.send_signal(number)

    def kill(self) -> None:
        """End it and everything it has started."""
        if self._process is not None:
            signal_group(self._process, signal.SIGKILL)
            self._process.wait()

    def ask(self) -> None:
        """The first signal of a shutdown. Idempotent: a second one would hurry it."""
        if not self._asked:
            self._asked = True
            self.signal(signal.SIGTERM)

    def hurry(self) -> None:
        """The second signal of a shutdown; not the number of the first, as equal signals may merge into one."""
        self.ask()
        self.signal(signal.SIGINT)

    async def stop(self, grace_s: float) -> None:
        """SIGTERM, if it has not had one, and SIGKILL for what is left after `grace_s`."""
        self.ask()
        if self._process is not None:
            await wait_for_exit(self._process, grace_s)
        self.kill()

    # State -----------------------------------------------------------------------------------------------------------

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None and self.alive else None

    @property
    def restarts(self) -> int:
        return max(0, self.starts - 1)

    def ending(self) -> str:
        """How it ended, and what it said last where it ended by itself; nothing while it runs."""
        code = None if self._process is None else self._process.poll()
        if code is None:
            return ""
        if code < 0:
            return f"killed by {signal.Signals(-code).name}"
        return f"exit code {code}: {self._last_words()}"

    def _last_words(self) -> str:
        try:
            return last_lines(self.log.read_text("utf-8", "replace"))
        except OSError:
            return ""
