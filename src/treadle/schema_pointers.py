"""References of JSON Schema within one document: pointers, anchors and ids. Nothing is ever fetched."""

from __future__ import annotations

from typing import Any
from urllib.parse import unquote

MISSING = object()


class SchemaPointers:
    """Pointers to the schemas of the document `root`."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._names: dict[str, str] | None = None

    def pointer(self, ref: str) -> str | None:
        """Return the JSON pointer that `ref` stands for; None where it leads out of the document."""
        return ref[1:] if ref.startswith("#/") or ref == "#" else self._named(ref)

    def find(self, pointer: str) -> Any:
        """Return the schema at a pointer; MISSING where there is none."""
        node = self._root
        for step in steps(pointer):
            node = child(node, step)
        return node

    def _named(self, ref: str) -> str | None:
        if self._names is None:
            self._names = _names(self._root)
        base, _, fragment = ref.partition("#")
        if fragment.startswith("/") and base in self._names:
            return self._names[base] + fragment
        return self._names.get(ref.removesuffix("#") or "#")


def steps(pointer: str) -> list[str]:
    """Return the keys and indices of a pointer."""
    return [unquote(step).replace("~1", "/").replace("~0", "~") for step in pointer.split("/")[1:]]


def child(node: Any, step: str) -> Any:
    """Return what a key or an index leads to; MISSING where that is nothing."""
    if isinstance(node, dict):
        return node.get(step, MISSING)
    if isinstance(node, list) and step.isdecimal() and int(step) < len(node):
        return node[int(step)]
    return MISSING


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


def _escaped(key: str) -> str:
    return key.replace("%", "%25").replace("~", "~0").replace("/", "~1")
