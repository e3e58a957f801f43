"""Threads with a stack that is deep enough for every grammar within the limits.

llguidance recurses along the rules and references of a grammar, some 4 to 9 KB each; a stack that overflows ends the
process. Checks and compilers use the same stack, so a grammar that passed a check can't overflow in the engine. It is
virtual memory: only what is used of it becomes real.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

STACK_BYTES = 128 << 20

T = TypeVar("T")

_on_deep_stack = threading.local()
_stack_size = threading.Lock()  # of the next thread: one setting for the whole process


def start_thread(run: Callable[[], None], name: str) -> threading.Thread:
    """Start a daemon thread with a deep stack. Return it."""
    thread = threading.Thread(target=_marked, args=(run,), name=name, daemon=True)
    with _stack_size:
        before = threading.stack_size(STACK_BYTES)
        try:
            thread.start()
        finally:
            threading.stack_size(before)
    return thread


def call(function: Callable[[], T]) -> T:
    """Call a function on a deep stack, in this thread if that has one. Return its result, or raise its exception.

    A new thread costs up to some milliseconds: put one call around many checks.
    """
    if hasattr(_on_deep_stack, "here"):
        return function()
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:  # a panic in Rust is no Exception
            future.set_exception(error)

    start_thread(run, "grammar-check")
    return future.result()


def _marked(run: Callable[[], None]) -> None:
    _on_deep_stack.here = True
    run()
