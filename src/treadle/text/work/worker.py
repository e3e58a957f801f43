"""Text worker: runs jobs one after the other until its socket closes.

A job that exceeds its processor time is killed together with the worker (SIGPROF). A job that exceeds the memory limit
fails, or ends the worker if the allocator aborts. The current stage is one byte in memory shared with the fork server,
which reports it when the worker dies.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping
from mmap import mmap
from typing import Any

import msgspec

from ...errors import InvalidRequest, ModelError, TreadleError
from ..tokenizer import TextModel
from . import limits
from .messages import Done, Failed, FromWorker, Order, order_of, read, write
from .stages import COMPILING, IDLE, STAGES, refusal
from .worker_log import LineCollector

MAX_GROWTH_BYTES = 48 << 20
"""A worker whose resident memory has grown by more than this exits after its job, and is replaced."""

Enter = Callable[[int], None]
Job = Callable[[TextModel, bytes, bytes, Enter], bytes]
"""`job(model, params, payload, enter)` returns the result; it calls `enter(stage)` at the start of each stage."""


class Worker:
    """A worker's loop. `stages` is the shared memory, `slot` this worker's byte in it, `log` this process's lines."""

    def __init__(
        self,
        sock: socket.socket,
        model: TextModel,
        jobs: Mapping[str, Job],
        stages: mmap,
        slot: int,
        log: LineCollector,
    ) -> None:
        self._sock = sock
        self._model = model
        self._jobs = jobs
        self._stages = stages
        self._slot = slot
        self._log = log
        self._resident = limits.resident_bytes()

    def serve(self) -> None:
        """Run jobs until the server closes the socket, or until this worker must be replaced."""
        while (frame := read(self._sock, order_of)) is not None:
            order, payload = frame
            message, result = self._run_job(order, payload)
            if (lines := self._log.take()) is not None:
                message = msgspec.structs.replace(message, log=lines)
            write(self._sock, message, result)
            if message.last:
                return

    def _run_job(self, order: Order, payload: bytes) -> tuple[FromWorker, bytes]:
        limits.limit_cpu(order.cpu_s)
        try:
            result = self._jobs[order.job](self._model, order.params, payload, self._enter)
            return Done(last=self._has_grown(), compiled=self._stages[self._slot] == COMPILING), result
        except TreadleError as error:
            return Failed(error.code, error.message, error.param, last=self._has_grown()), b""
        except MemoryError:
            return self._failed("needs more memory than a request may take", InvalidRequest), b""
        except RecursionError:
            return self._failed("is nested too deeply for this request", InvalidRequest), b""
        except Exception as error:
            return self._failed(f"failed on this request ({_one_line(error)})", ModelError), b""
        except BaseException:  # a panic of a native library, whose text is of no use to a client
            return self._failed("crashed on this request", InvalidRequest), b""
        finally:
            limits.limit_cpu(0.0)
            self._enter(IDLE)

    def _failed(self, how: str, kind: type[TreadleError]) -> Failed:
        stage = STAGES[self._stages[self._slot]] or "text work"
        return Failed(kind.code, refusal(stage, how), last=True, fault=f"{stage} {how}")

    def _enter(self, stage: int) -> None:
        self._stages[self._slot] = stage

    def _has_grown(self) -> bool:
        return limits.resident_bytes() - self._resident > MAX_GROWTH_BYTES


def _one_line(error: Any) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
