"""References of JSON Schema within one document, with their places in the request."""

from __future__ import annotations

from typing import Any

from ..schema_pointers import MISSING, SchemaPointers, child, steps
from .places import below, refusal

MAX_NAME = 100


class References:
    """References to the schemas of the document `root`, which stands at `place` of the request."""

    def __init__(self, root: Any, place: str) -> None:
        self._root = root
        self._place = place
        self._pointers = SchemaPointers(root)

    def pointer(self, ref: str, place: str) -> str:
        """Return the JSON pointer that `ref` leads to. Raises InvalidRequest with `place` where it leads out of the
        document or to nothing."""
        pointer = self._pointers.pointer(ref)
        if pointer is None:
            raise refusal(place, _astray(ref))
        if self.schema(pointer) is MISSING:
            raise refusal(place, f"leads to nothing: the schema has no '{ref[:MAX_NAME]}'")
        return pointer

    def schema(self, pointer: str) -> Any:
        """Return the schema at a pointer."""
        return self._pointers.find(pointer)

    def place(self, pointer: str) -> str:
        """Return the place of a pointer in the request."""
        place, node = self._place, self._root
        for step in steps(pointer):
            place = below(place, int(step) if isinstance(node, list) else step)
            node = child(node, step)
        return place


def _astray(ref: str) -> str:
    return f"leads out of the schema, to '{ref[:MAX_NAME]}', and nothing is fetched: copy that schema into $defs"
