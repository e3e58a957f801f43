"""References of JSON Schema within one document: pointers, anchors and ids. Nothing is ever fetched."""

from __future__ import annotations

from typing import Any
from urllib.parse import unquote

from .places import below, refusal

MAX_NAME = 100


class References:
    """References to the schemas of the document `root`, which stands at `place` of the request."""

    def __init__(self, root: Any, place: str) -> None:
        self._root = root
        self._place = place
        self._names: dict[str, str] | None = None

    def pointer(self, ref: str, place: str) -> str:
        """Return the JSON pointer that `ref` leads to. Raises InvalidRequest with `place` where it leads out of the
        document or to nothing."""
        pointer = ref[1:] if ref.startswith("#/") or ref == "#" else self._named(ref)
        if pointer is None:
            raise refusal(place, _astray(ref))
        if self._find(pointer) is _MISSING:
            raise refusal(place, f"leads to nothing: the schema has no '{ref[:MAX_NAME]}'")
        return pointer

    def schema(self, pointer: str) -> Any:
        """Return the schema at a pointer."""
        return self._find(pointer)

    def place(self, pointer: str) -> str:
        """Return the place of a pointer in the request."""
        place, node = self._place, self._root
        for step in _steps(pointer):
            place = below(place, int(step) if isinstance(node, list) else step)
            node = _child(node, step)
        return place

    def _named(self, ref: str) -> str | None:
        if self._names is None:
            self._names = _names(self._root)
        base, _, fragment = ref.partition("#")
        if fragment.startswith("/") and base in self._names:
            return self._names[base] + fragment
        return self._names.get(ref.removesuffix("#") or "#")

    def _find(self, pointer: str) -> Any:
        node = self._root
        for step in _steps(pointer):
            node = _child(node, step)
        return node


_MISSING = object()


def _names(root: Any) -> dict[str, str]:
    """Return the pointers of all schemas that have an id or an anchor."""
    found: dict[str, str] = {}
    stack: list[tuple[str, Any]] = [("", root)]
    while stack:
        pointer, node = stack.pop()
        if isinstance(node, dict):
            for key, prefix in (("$id", ""), ("id", ""), ("$anchor", "#")):
                if isinstance(name := node.get(key), str):
                    found.setdefault(prefix + name.removesuffix("#"), pointer)
            stack += [(f"{pointer}/{_escaped(key)}", value) for key, value in node.items()]
        elif isinstance(node, list):
            stack += [(f"{pointer}/{index}", value) for index, value in enumerate(node)]
    return found


def _steps(pointer: str) -> list[str]:
    return [unquote(step).replace("~1", "/").replace("~0", "~") for step in pointer.split("/")[1:]]


def _escaped(key: str) -> str:
    return key.replace("%", "%25").replace("~", "~0").replace("/", "~1")


def _child(node: Any, step: str) -> Any:
    if isinstance(node, dict):
        return node.get(step, _MISSING)
    if isinstance(node, list) and step.isdecimal() and int(step) < len(node):
        return node[int(step)]
    return _MISSING


def _astray(ref: str) -> str:
    return f"leads out of the schema, to '{ref[:MAX_NAME]}', and nothing is fetched: copy that schema into $defs"
