"""Engine process: its main thread is the owner.

Started as `python -m treadle.engine.child FD TABLE MODULE:FUNCTION`. FD is one end of a socket pair, TABLE a descriptor
of the memory of the in-flight table. The first frame holds plain arguments; `FUNCTION(arguments)` returns the runner
factory and the owner's limits, and is called on the main thread before MLX is imported.

Three threads without MLX run beside the owner: a receiver that fills the mailbox, a sender that empties the outbox, and
a writer of standard error, so that a stalled reader delays no step. SIGINT, SIGTERM and SIGHUP are ignored: the process
exits on Stop, or when the parent closes the socket. If the owner is stuck then, the receiver ends the process after
ORPHAN_GRACE_S seconds.
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

from .. import output_streams
from ..core.messages import Failed, FromOwner, JobDone, Ready, Stop, ToOwner
from ..runner.base import RunnerFactory
from .framing import HEADER, frame, to_owner
from .in_flight_table import InFlightTable, map_table
from .mailbox import Mailbox
from .outbox import Outbox
from .owner import OwnerLimits, Send, describe_start_failure, run_owner

ORPHAN_GRACE_S = 1.0
EXIT_CLEAN, EXIT_FAILED, EXIT_STUCK = 0, 3, 4

log = logging.getLogger(__name__)


class Channel:
    """Blocking frames on one end of the socket."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._stream = sock.makefile("rb")

    def read(self) -> bytes | None:
        """Read the next frame's body; None at the end of the stream."""
        header = self._stream.read(HEADER.size)
        if len(header) < HEADER.size:
            return None
        (size,) = HEADER.unpack(header)
        body = self._stream.read(size)
        return body if len(body) == size else None

    def write(self, data: bytes) -> None:
        self._sock.sendall(data)


def receive(channel: Channel, mailbox: Mailbox) -> None:
    """Fill the mailbox until the parent closes the socket; then stop the owner, and exit if it does not stop in
    time."""
    try:
        while (body := channel.read()) is not None:
            message: ToOwner = to_owner.decode(body)
            mailbox.put(message)
    except OSError:
        log.debug("the server's end of the socket is gone", exc_info=True)
    except msgspec.MsgspecError:
        log.exception("the server sent an invalid message; the engine process stops")
    mailbox.put(Stop())
    threading.Event().wait(ORPHAN_GRACE_S)
    os._exit(EXIT_STUCK)


def transmit(channel: Channel, outbox: Outbox) -> None:
    """Send the outbox's messages until it is closed or the parent has closed the socket."""
    while messages := outbox.take():
        try:
            channel.write(b"".join(_frame(message) for message in messages))
        except OSError:
            return
        except Exception:
            log.exception("a message of the owner can't be serialized; the engine process exits")
            os._exit(EXIT_STUCK)


def _frame(message: FromOwner) -> bytes:
    """Serialize a message. A job's result that can't be serialized fails only that job."""
    try:
        return frame(message)
    except Exception as error:
        if not isinstance(message, JobDone):
            raise
        cause = f"its result is not made of plain values: {error}"
        return frame(JobDone(id=message.id, code="engine_job_failed", message=cause))


def serve(channel: Channel, build: RunnerFactory, limits: OwnerLimits, table: InFlightTable) -> int:
    """Run the owner on this thread; returns the exit code."""
    mailbox, outbox = Mailbox(), Outbox()
    threading.Thread(target=receive, args=(channel, mailbox), name="receiver", daemon=True).start()
    sender = threading.Thread(target=transmit, args=(channel, outbox), name="sender", daemon=True)
    sender.start()
    try:
        clean = run_owner(build, limits, mailbox, freeze_gc_when_ready(outbox.put), table=table)
    finally:
        outbox.close()
        sender.join()
    return EXIT_CLEAN if clean else EXIT_FAILED


def freeze_gc_when_ready(send: Send) -> Send:
    """Wrap `send` to call `gc.freeze()` before Ready is sent: a full collection of the loaded modules takes 40 to 70
    ms, during which no sequence gains a token."""

    def freeze_and_send(message: FromOwner) -> None:
        if isinstance(message, Ready):
            gc.collect()
            gc.freeze()
        send(message)

    return freeze_and_send


def load(entry: str, arguments: Any) -> tuple[RunnerFactory, OwnerLimits]:
    """Import and call `MODULE:FUNCTION` with the parent's arguments."""
    module, _, function = entry.partition(":")
    made: tuple[RunnerFactory, OwnerLimits] = getattr(importlib.import_module(module), function)(arguments)
    return made


def main(argv: list[str]) -> int:
    """Run the engine process, see the module's docstring; returns the exit code."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sock = socket.socket(fileno=int(argv[0]))
    table = map_table(int(argv[1]))
    os.close(int(argv[1]))
    sock.set_inheritable(False)  # otherwise a child of this process could keep it open
    channel = Channel(sock)
    first = channel.read()
    if first is None:
        return EXIT_FAILED
    try:
        build, limits = load(argv[2], msgspec.msgpack.decode(first))
    except Exception as error:
        log.exception("the engine could not start")
        channel.write(frame(Failed(code="start_failed", message=describe_start_failure(error))))
        return EXIT_FAILED
    return serve(channel, build, limits, table)


def run(argv: list[str]) -> NoReturn:
    """Run `main` and end the process without the interpreter's teardown, which may abort under MLX's threads
    (mlx.md)."""
    output_streams.open_missing_descriptors()
    output_streams.unblock()
    code = EXIT_FAILED
    try:
        code = main(argv)
    except BaseException:
        log.exception("the engine process failed")
    logging.shutdown()
    output_streams.flush_within()
    os._exit(code)


if __name__ == "__main__":
    run(sys.argv[1:])
