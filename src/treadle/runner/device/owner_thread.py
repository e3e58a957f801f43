"""Guards of the owner thread, and of calls into MLX's runtime."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import mlx.core as mx

from ..base import RunnerBroken


class WrongThread(AssertionError):
    """Our own bug: an owner's object was used on a thread that did not build it."""


class OwnerThread:
    """The thread that built this object. `check` costs well under a microsecond."""

    __slots__ = ("_ident", "_name")

    def __init__(self) -> None:
        self._ident = threading.get_ident()
        self._name = threading.current_thread().name

    def check(self) -> None:
        """Raise WrongThread on any other thread."""
        if threading.get_ident() != self._ident:
            here = threading.current_thread().name
            raise WrongThread(f"the runner belongs to thread '{self._name}' and was called on '{here}'")


def leave_thread() -> None:
    """End MLX's streams of a thread that will end: nothing of MLX may run on it afterwards.

    A process whose thread has gone with its streams open aborts when it exits. The main thread keeps its own.
    """
    if threading.current_thread() is not threading.main_thread():
        mx.clear_streams()


class OutOfMemory(RuntimeError):
    """There was no memory for a step. Nothing that exists was harmed: what the step was for can be tried again, alone
    or later."""


_NO_MEMORY = re.compile(r"unable to allocate|out of memory|failed to allocate", re.IGNORECASE)


@contextmanager
def mlx_runtime(doing: str) -> Iterator[None]:
    """Work that MLX's runtime does: what it raises means that nothing can be trusted any more, but for an allocation
    that failed. Then everything that was freed and kept is given back, for the next try.

    MLX turns faults of its runtime (streams, command buffers, allocation) into RuntimeError or MemoryError, and wrong
    arguments into ValueError, IndexError or TypeError. A plain RuntimeError of a model's Python code can't be told
    from the former, so it counts as one; Python's own subclasses of it do not.
    """
    try:
        yield
    except (NotImplementedError, RecursionError, OutOfMemory):
        raise
    except (RuntimeError, MemoryError) as error:
        if isinstance(error, MemoryError) or _NO_MEMORY.search(str(error)):
            mx.clear_cache()
            raise OutOfMemory(f"no memory while {doing}: {error or type(error).__name__}") from error
        raise RunnerBroken(f"MLX's runtime failed while {doing}: {error or type(error).__name__}") from error
