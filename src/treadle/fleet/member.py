"""One process of a fleet: start, restart with back-off, signals, stop."""

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
DIE_WITH_PARENT = Path(__file__).with_name("die_with_parent.py")
DEATH_SIGNAL = sys.platform == "linux"
"""Whether the kernel ends a member when the fleet is killed; elsewhere a process beside it does."""

_pipe: tuple[int, int] | None = None


class Member:
    """A worker or the gateway.

    Its output goes to `log`. `cores`: CPU cores it may use (None: all). `stdin_text`: its standard input.
    `hidden_variables`: environment variables that it does not inherit. `failures`: ends since it was last healthy.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        log: Path,
        *,
        variables: Mapping[str, str] | None = None,
        cores: Collection[int] | None = None,
        stdin_text: str | None = None,
        hidden_variables: Collection[str] = (),
    ) -> None:
        self.name = name
        self.log = log
        self.starts = 0
        self.failures = 0
        self._command = list(command)
        self._variables = dict(variables or {})
        self._cores = cores
        self._stdin_text = stdin_text
        self._hidden_variables = hidden_variables
        self._process: subprocess.Popen[bytes] | None = None
        self._not_before = 0.0
        self._terminated = False  # SIGTERM was sent

    # Life ----------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the process. Raises StartFailed when the program can't be run or the log can't be written."""
        self.starts += 1
        self._terminated = False
        with self._open_log() as log:
            try:
                self._process = subprocess.Popen(
                    self._full_command(),
                    stdin=subprocess.DEVNULL if self._stdin_text is None else subprocess.PIPE,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=self._environment(),
                    start_new_session=True,
                    pass_fds=() if DEATH_SIGNAL else (_life_pipe(),),
                )
            except OSError as error:
                raise StartFailed(f"{self.name} could not be started: {self._command[0]}: {error.strerror}") from error
        self._write_stdin()
        if self._cores is not None:
            with contextlib.suppress(OSError):
                os.sched_setaffinity(self._process.pid, self._cores)

    def _full_command(self) -> list[str]:
        """Return the command, which ends with this process. Raises FileNotFoundError."""
        if shutil.which(self._command[0]) is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
        parent = f"pid={os.getpid()}" if DEATH_SIGNAL else f"fd={_life_pipe()}"
        return [sys.executable, "-I", "-S", str(DIE_WITH_PARENT), parent, *self._command]

    def _environment(self) -> dict[str, str]:
        inherited = {name: value for name, value in os.environ.items() if name not in self._hidden_variables}
        return inherited | self._variables

    def _write_stdin(self) -> None:
        """Write the standard input. It is smaller than a pipe's buffer, so this does not block."""
        assert self._process is not None
        if self._stdin_text is not None and self._process.stdin is not None:
            with contextlib.suppress(OSError), self._process.stdin as pipe:
                pipe.write(self._stdin_text.encode())

    def _open_log(self) -> IO[bytes]:
        try:
            return self.log.open("ab")
        except OSError as error:
            raise StartFailed(f"{self.log} can't be written ({error.strerror}): name another folder") from error

    def restart_if_due(self, now: float) -> None:
        """Restart the process if it has ended and its back-off is over. `now` in seconds."""
        if self.alive:
            return
        if self._not_before == 0.0:
            self.failures += 1
            self._not_before = now + BACKOFF_S[min(self.failures, len(BACKOFF_S)) - 1]
        if now >= self._not_before:
            self._not_before = 0.0
            self.start()

    def mark_healthy(self) -> None:
        """Reset the back-off after the process was seen working."""
        self.failures = 0

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the process alone, not to its children, which it ends itself."""
        if self._process is not None and self.alive:
            self._process.send_signal(number)

    def kill(self) -> None:
        """Kill the process and its children."""
        if self._process is not None:
            signal_group(self._process, signal.SIGKILL)
            self._process.wait()

    def terminate(self) -> None:
        """Send SIGTERM once; a second one would make it end without draining."""
        if not self._terminated:
            self._terminated = True
            self.signal(signal.SIGTERM)

    def end_now(self) -> None:
        """Send SIGTERM and SIGINT, so that it ends without draining. Two equal signals could merge into one."""
        self.terminate()
        self.signal(signal.SIGINT)

    async def stop(self, grace_s: float) -> None:
        """Send SIGTERM, unless it was sent, and SIGKILL after `grace_s` seconds."""
        self.terminate()
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

    def exit_description(self) -> str:
        """Describe how it ended: the signal, or the exit code and its last output; "" while it runs."""
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


def _life_pipe() -> int:
    """The read end of a pipe whose write end is open as long as this process lives, and in no other."""
    global _pipe
    if _pipe is None:
        _pipe = os.pipe()
    return _pipe[0]
