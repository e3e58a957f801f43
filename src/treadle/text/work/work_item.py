"""Work items of the pool, handles of its workers, and counters."""

from __future__ import annotations

import asyncio
import signal
from collections import Counter
from dataclasses import dataclass, field

from ...errors import TreadleError, from_code
from .channel import Channel
from .item_queue import QueuedItem
from .messages import Exited, Failed, Order, Speeds

MIN_CPU_S = 1.0
"""Limit of processor time of the smallest item, in seconds. Larger items get MARGIN times their expected time more."""
MARGIN = 25.0
ELAPSED_SLACK = 4.0
MIN_ELAPSED_S = 6.0
MEAN_OVER = 10  # items


@dataclass(eq=False, kw_only=True)
class WorkItem(QueuedItem):
    """One call of a job, from its caller to its result. `grammar` is the digest of the grammar that it checks, b"" for
    none; `explores`: that is a new one. `attempts` counts the workers that have begun it."""

    order: Order
    payload: bytes
    grammar: bytes = b""
    explores: bool = False
    attempts: int = 0

    @property
    def size(self) -> int:
        return len(self.order.params) + len(self.payload)

    @property
    def elapsed_limit_s(self) -> float:
        """Limit of elapsed time, in seconds: several times the limit of processor time."""
        return max(MIN_ELAPSED_S, ELAPSED_SLACK * self.order.cpu_s)

    def failure(self, exited: Exited | None, late: bool) -> str:
        """Describe how the item broke its worker; `late`: it exceeded `elapsed_limit_s`."""
        if late:
            return f"took more than {self.elapsed_limit_s:.1f} s on this request"
        if exited is not None and exited.signal == signal.SIGPROF:
            return f"took more than {self.order.cpu_s:.1f} s of processor time on this request"
        return "crashed on this request"


@dataclass(eq=False)
class WorkerHandle:
    """A forked worker. `exited` is set when the fork server reports its end; `item` is the item it works on."""

    number: int
    pid: int
    channel: Channel
    exited: asyncio.Future[Exited]
    item: WorkItem | None = None


@dataclass
class Counters:
    """Counts since the start; processes `killed` by stage or cause. `mean_s`: recent mean service time of an item in
    seconds."""

    done: int = 0
    refused: int = 0
    killed: Counter[str] = field(default_factory=Counter)
    restarts: int = 0
    mean_s: float = 0.0

    def record(self, spent_s: float) -> None:
        """Count an item that took `spent_s` seconds."""
        self.done += 1
        self.mean_s += (spent_s - self.mean_s) / min(self.done, MEAN_OVER)


def cpu_limit_s(speeds: Speeds, parsed: int, tokenized: int) -> float:
    """Return the limit of processor time in seconds for inputs of these sizes in bytes."""
    text_s = tokenized / speeds.tokenize_bytes + speeds.render_s * (1 + tokenized / 100)
    return MIN_CPU_S + MARGIN * (parsed / speeds.parse_bytes + text_s)


def error_from(message: Failed) -> TreadleError:
    """Return the error of a failed job, as it was raised in the worker."""
    error = from_code(message.code, message.message)
    error.param = message.param
    return error
