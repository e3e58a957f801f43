"""Other calls of a model's modules for the length of a pass."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

Call = Callable[..., Any]
"""Gets the module's own call, bound to it, and the arguments of the call."""


@contextmanager
def called_as(calls: Iterable[tuple[Any, Call]]) -> Iterator[None]:
    """Let modules be called by other functions inside the block. Python looks calls up in the class, so each module has
    another class meanwhile."""
    kinds = []
    try:
        for module, call in calls:
            kinds.append((module, type(module)))
            module.__class__ = _calling(type(module), call)
        yield
    finally:
        for module, kind in reversed(kinds):
            module.__class__ = kind


def _calling(kind: Any, call: Call) -> Any:
    def called(self: Any, *args: Any, **named: Any) -> Any:
        return call(lambda *own, **others: kind.__call__(self, *own, **others), *args, **named)

    return type(kind.__name__, (kind,), {"__call__": called, "__module__": kind.__module__})
