"""Queries that the layers of a pass attend with, for those who look at what a model attends to.

A pass keeps them where it is asked to, and only those of layers that see all tokens. Others do nothing for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple, Protocol, runtime_checkable

from ..forward.segments import KvSequence


class Seen(NamedTuple):
    """Queries (T, query heads, 1, D) of a layer in a pass, rotated, whose products with keys are multiplied by `scale`.
    `cache` names the layer's keys (`ObservedBackend.keys`)."""

    cache: Any
    queries: Any
    scale: float


@runtime_checkable
class ObservedBackend(Protocol):
    """A KV backend whose passes can be observed."""

    def seeing(self) -> AbstractContextManager[list[Seen]]:
        """Return a list to which the one pass inside the block adds what its layers attend with, in their order."""
        ...

    def keys(self, cache: Any, sequence: KvSequence, count: int) -> Any:
        """Return the keys (kv heads, count, D) of the first `count` tokens of a sequence."""
        ...


class Observable(Protocol):
    """The state of a pass, which has a list while it is observed."""

    seen: list[Seen] | None


@contextmanager
def seeing(step: Observable) -> Iterator[list[Seen]]:
    """Let the pass inside the block, whose state is `step`, add to the list."""
    step.seen = seen = list[Seen]()
    try:
        yield seen
    finally:
        step.seen = None


def compiled_pass(
    compile: Callable[..., Any], program: Callable[..., Any], seen: list[Seen] | None
) -> Callable[..., Any]:
    """Return `program` compiled, as a function of a list and its own arguments. If it is to be observed it adds to
    `seen` where it is traced, and its queries are added to the list in each call."""
    if seen is None:
        plain = compile(program)
        return lambda unused, *args: plain(*args)
    known: list[Seen] = []

    def traced(*args: Any) -> tuple[Any, ...]:
        seen.clear()
        outputs = program(*args)
        queries = [one.queries for one in seen]
        known[:] = [one._replace(queries=None) for one in seen]
        seen.clear()  # arrays of a trace are no arrays
        return (*outputs, *queries)

    compiled = compile(traced)

    def call(found: list[Seen], *args: Any) -> list[Any]:
        outputs = list(compiled(*args))
        border = len(outputs) - len(known)
        found += [one._replace(queries=queries) for one, queries in zip(known, outputs[border:], strict=True)]
        return outputs[:border]

    return call
