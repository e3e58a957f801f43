"""LRU cache of compiled forward passes, by input shapes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any, NamedTuple

MOST = 768
"""Compiled passes to keep, at least those of the warm-up of 1,024 sequences: each takes about half a megabyte."""


class _Call(NamedTuple):
    """A call of the `program` for `shapes` with `inputs`: arrays, lists of them, and None."""

    shapes: Hashable
    program: Callable[..., Any]
    inputs: tuple[Any, ...]

    def is_of(self, shapes: Hashable, inputs: tuple[Any, ...]) -> bool:
        """Whether a call for `shapes` has the same arrays as inputs, not only equal ones."""
        pairs = zip(_leaves(self.inputs), _leaves(inputs), strict=True)
        return shapes == self.shapes and all(mine is other for mine, other in pairs)


class CompiledPasses:
    """Compiled functions by the shapes they are for; the least recently used is dropped first.

    A compiled function of MLX's that is called with ever new shapes keeps a program for each, and searches all of them
    at every call. One function for each set of shapes can be dropped.

    To call one takes the host a millisecond in large models, in which MLX makes the graph of all layers. The graph of
    the next pass can be made ahead, of arrays that get their numbers later.
    """

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._known: OrderedDict[Hashable, Callable[..., Any]] = OrderedDict()
        self._notes = False
        self._noted: _Call | None = None
        self._ahead: tuple[_Call, Any] | None = None

    def __len__(self) -> int:
        return len(self._known)

    def get(self, shapes: Hashable, make: Callable[[], Callable[..., Any]]) -> Callable[..., Any]:
        """The function for `shapes`, made by `make` where there is none."""
        program = self._known.pop(shapes, None) or make()
        self._known[shapes] = program
        if len(self._known) > self._most:
            self._known.popitem(last=False)
        return program

    def call(self, shapes: Hashable, make: Callable[[], Callable[..., Any]], *inputs: Any) -> Any:
        """Call the function for `shapes`, made by `make` where there is none. Return its outputs: those made ahead, if
        that was done for these inputs."""
        program = self.get(shapes, make)
        if self._notes:
            self._noted = _Call(shapes, program, inputs)
        ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead[0].is_of(shapes, inputs):
            return ahead[1]
        return program(*inputs)

    def note(self, on: bool) -> None:
        """Remember the last call from now on, for `prepare`; or no other than that so far."""
        self._notes = on

    def prepare(self, later: Mapping[int, Any]) -> None:
        """Do the noted call ahead, once more, with arrays that are known already in place of its inputs, `later` by
        their ids. The outputs are dropped if the next call is another one."""
        if (noted := self._noted) is not None and later:
            inputs = tuple(_replaced(one, later) for one in noted.inputs)
            self._ahead = noted._replace(inputs=inputs), noted.program(*inputs)

    def clear(self) -> None:
        self._known.clear()
        self._noted = self._ahead = None


def _leaves(inputs: tuple[Any, ...]) -> Iterator[Any]:
    for one in inputs:
        if isinstance(one, list):
            yield from one
        else:
            yield one


def _replaced(one: Any, later: Mapping[int, Any]) -> Any:
    return [later.get(id(array), array) for array in one] if isinstance(one, list) else later.get(id(one), one)
