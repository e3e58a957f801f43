"""One worker: does pieces of work one after the other until its socket ends.

A piece that breaks its limit of processor time is ended by the kernel together with the worker (SIGPROF); one that
breaks the limit of memory fails, or the worker ends by the allocator's abort. The stage of the work, one byte in memory
shared with the fork server, then says what it was doing.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping
from mmap import mmap
from typing import Any

from ...errors import InvalidRequest, ModelError, TreadleError
from ..tokenizer import TextModel
from . import limits
from .messages import Done, Failed, FromWorker, Order, order_of, read, write
from .stages import IDLE, STAGES

MOST_GROWTH_BYTES = 48 << 20
"""A worker that keeps more than this of its last piece is replaced by a fresh one."""

Enter = Callable[[int], None]
Job = Callable[[TextModel, bytes, bytes, Enter], bytes]
"""`job(model, params, payload, enter)` gives the result; `enter` is told the stage that begins."""


class Worker:
    """The worker's loop. `stages` is the shared memory, `slot` this worker's byte in it."""

    def __init__(self, sock: socket.socket, model: TextModel, jobs: Mapping[str, Job], stages: mmap, slot: int) -> None:
        self._sock = sock
        self._model = model
        self._jobs = jobs
        self._stages = stages
        self._slot = slot
        self._resident = limits.resident_bytes()

    def serve(self) -> None:
        """Returns when the server's end of the socket has closed, or after a piece that was the last."""
        while (frame := read(self._sock, order_of)) is not None:
            order, payload = frame
            message, result = self._do(order, payload)
            write(self._sock, message, result)
            if message.last:
                return

    def _do(self, order: Order, payload: bytes) -> tuple[FromWorker, bytes]:
        limits.bound_cpu(order.cpu_s)
        try:
            result = self._jobs[order.job](self._model, order.params, payload, self._enter)
            return Done(last=self._grown()), result
        except TreadleError as error:
            return Failed(error.code, error.message, error.param, last=self._grown()), b""
        except MemoryError:
            return self._failed("needs more memory than a request may take", InvalidRequest), b""
        except RecursionError:
            return self._failed("is nested too deeply for this request", InvalidRequest), b""
        except Exception as error:
            return self._failed(f"failed on this request ({_line(error)})", ModelError), b""
        except BaseException:  # a panic of a native library: its words help nobody
            return self._failed("crashed on this request", InvalidRequest), b""
        finally:
            limits.bound_cpu(0.0)
            self._enter(IDLE)

    def _failed(self, how: str, kind: type[TreadleError]) -> Failed:
        what = STAGES[self._stages[self._slot]] or "text work"
        return Failed(kind.code, f"{what} {how}: send fewer or shorter messages", last=True)

    def _enter(self, stage: int) -> None:
        self._stages[self._slot] = stage

    def _grown(self) -> bool:
        return limits.resident_bytes() - self._resident > MOST_GROWTH_BYTES


def _line(error: Any) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
