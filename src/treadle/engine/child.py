"""The child process: its main thread is the owner.

Start: `python -m treadle.engine.child FD ROSTER MODULE:FUNCTION`. FD is one end of a socket pair, ROSTER a descriptor
of the memory for its roster. The first frame holds plain
arguments; `FUNCTION(arguments)` gives the runner factory and the owner's limits, and is called on the main thread
before anything of MLX is imported.

Beside the owner run three threads, free of MLX: a receiver that fills the mailbox, a sender that empties the outbox,
and one that writes standard error, so that a reader who stalls holds up no step. SIGINT, SIGTERM and SIGHUP are
ignored: the child ends on Stop or when the parent's end of the socket closes, and if the owner is stuck then, the
receiver ends the process after a grace.
"""

from __future__ import annotations

import gc
import importlib
import logging
import os
import signal
import socket
import sys
import threading
from typing import Any, NoReturn

import msgspec

from .. import streams
from ..core.messages import Failed, FromOwner, JobDone, Ready, Stop, ToOwner
from ..runner.base import RunnerFactory
from .framing import HEADER, frame, to_owner
from .mailbox import Mailbox
from .outbox import Outbox
from .owner import OwnerLimits, Send, run_owner, why
from .roster import Roster, shared

ORPHAN_GRACE_S = 1.0
EXIT_CLEAN, EXIT_FAILED, EXIT_STUCK = 0, 3, 4

log = logging.getLogger(__name__)


class Channel:
    """One end of the socket, read and written in whole frames."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._stream = sock.makefile("rb")

    def read(self) -> bytes | None:
        """The next frame's body, or None at the end of the stream."""
        header = self._stream.read(HEADER.size)
        if len(header) < HEADER.size:
            return None
        (size,) = HEADER.unpack(header)
        body = self._stream.read(size)
        return body if len(body) == size else None

    def write(self, data: bytes) -> None:
        self._sock.sendall(data)


def receive(channel: Channel, mailbox: Mailbox) -> None:
    """Fill the mailbox until the parent has gone; then the owner has a grace to unwind."""
    try:
        while (body := channel.read()) is not None:
            message: ToOwner = to_owner.decode(body)
            mailbox.put(message)
    except OSError:
        log.debug("the parent has gone", exc_info=True)
    except msgspec.MsgspecError:
        log.exception("the parent sent what can't be read")
    mailbox.put(Stop())
    threading.Event().wait(ORPHAN_GRACE_S)
    os._exit(EXIT_STUCK)


def transmit(channel: Channel, outbox: Outbox) -> None:
    """Empty the outbox until it is closed; a parent that has gone is nobody to tell."""
    while messages := outbox.take():
        try:
            channel.write(b"".join(_frame(message) for message in messages))
        except OSError:
            return
        except Exception:
            log.exception("the owner said what can't be sent")
            os._exit(EXIT_STUCK)


def _frame(message: FromOwner) -> bytes:
    """`message` as one frame. A job's result that can't cross fails that job alone."""
    try:
        return frame(message)
    except Exception as error:
        if not isinstance(message, JobDone):
            raise
        what = f"its result is not made of plain values: {error}"
        return frame(JobDone(id=message.id, code="engine_job_failed", message=what))


def serve(channel: Channel, build: RunnerFactory, limits: OwnerLimits, roster: Roster) -> int:
    """Own a runner on this thread until the end; the exit code."""
    mailbox, outbox = Mailbox(), Outbox()
    threading.Thread(target=receive, args=(channel, mailbox), name="receiver", daemon=True).start()
    sender = threading.Thread(target=transmit, args=(channel, outbox), name="sender", daemon=True)
    sender.start()
    try:
        clean = run_owner(build, limits, mailbox, freeze_gc_when_ready(outbox.put), roster=roster)
    finally:
        outbox.close()
        sender.join()
    return EXIT_CLEAN if clean else EXIT_FAILED


def freeze_gc_when_ready(send: Send) -> Send:
    """`send`, before which, once the owner is ready, everything that is loaded leaves Python's collection of garbage:
    to go through it takes 40 to 70 ms, in which no row gains a token."""

    def settled(message: FromOwner) -> None:
        if isinstance(message, Ready):
            gc.collect()
            gc.freeze()
        send(message)

    return settled


def load(entry: str, arguments: Any) -> tuple[RunnerFactory, OwnerLimits]:
    """Call `MODULE:FUNCTION` with the parent's arguments."""
    module, _, function = entry.partition(":")
    made: tuple[RunnerFactory, OwnerLimits] = getattr(importlib.import_module(module), function)(arguments)
    return made


def main(argv: list[str]) -> int:
    """The child's main: see the module's docstring."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sock = socket.socket(fileno=int(argv[0]))
    roster = shared(int(argv[1]))
    os.close(int(argv[1]))
    sock.set_inheritable(False)  # a process that the owner starts must not keep it open after this one's end
    channel = Channel(sock)
    first = channel.read()
    if first is None:
        return EXIT_FAILED
    try:
        build, limits = load(argv[2], msgspec.msgpack.decode(first))
    except Exception as error:
        log.exception("the engine could not start")
        channel.write(frame(Failed(code="start_failed", message=why(error))))
        return EXIT_FAILED
    return serve(channel, build, limits, roster)


def run(argv: list[str]) -> NoReturn:
    """`main`, and then the end of the process: the interpreter's own teardown may abort under MLX's threads (mlx.md),
    and nothing is left to unwind."""
    streams.open_missing_descriptors()
    streams.unblock()
    code = EXIT_FAILED
    try:
        code = main(argv)
    except BaseException:
        log.exception("the engine process failed")
    logging.shutdown()
    streams.flush_within()
    os._exit(code)


if __name__ == "__main__":
    run(sys.argv[1:])
