"""Edits of JSON with comments (JSONC) that leave all other text as it is.

Comments, trailing commas, indentation and line ends stay. Each function takes the text of a document whose root is an
object, and returns the new text. A path consists of member names and list indexes.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Any

from .errors import UnreadableSettings

Path = tuple[str | int, ...]

_TRIVIA = re.compile(r"(?:[\s\ufeff]|//[^\n]*|/\*.*?\*/)*", re.DOTALL)
_SCALAR = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][-+]?\d+)?|true|false|null")
_LINE_INDENT = re.compile(r"[ \t]*")
_MEMBER_INDENT = re.compile(r"\{[^\S\n]*(?://[^\n]*)?\n([ \t]+)\S")
_DEFAULT_INDENT = "  "


@dataclass
class Node:
    """A value with its place in the text. `begin` is where its key begins, for members of objects."""

    begin: int
    start: int
    end: int
    value: Any
    children: dict[str | int, Node] = field(default_factory=dict)


def parse(text: str) -> Node:
    """Return the root. A blank text is an empty object. Raises UnreadableSettings."""
    start = _skip(text, 0)
    if start == len(text):
        return Node(start, start, start, {})
    try:
        root = _value(text, start)
    except RecursionError:
        raise UnreadableSettings("it is nested too deeply") from None
    if (end := _skip(text, root.end)) != len(text):
        raise _unexpected(text, end)
    if not isinstance(root.value, dict):
        raise UnreadableSettings("it is no object")
    return root


def _skip(text: str, at: int) -> int:
    found = _TRIVIA.match(text, at)
    assert found is not None
    return found.end()


def _unexpected(text: str, at: int) -> UnreadableSettings:
    line = text.count("\n", 0, at) + 1
    what = repr(text[at]) if at < len(text) else "the end of the file"
    return UnreadableSettings(f"line {line} has {what} where it does not belong")


def _value(text: str, at: int) -> Node:
    if text.startswith("{", at):
        return _object(text, at)
    if text.startswith("[", at):
        return _list(text, at)
    if text.startswith('"', at):
        string, end = _string(text, at)
        return Node(at, at, end, string)
    if found := _SCALAR.match(text, at):
        return Node(at, at, found.end(), json.loads(found[0]))
    raise _unexpected(text, at)


def _string(text: str, at: int) -> tuple[str, int]:
    if not text.startswith('"', at):
        raise _unexpected(text, at)
    try:
        string, end = json.decoder.scanstring(text, at + 1, True)  # type: ignore[attr-defined]
    except ValueError:
        raise _unexpected(text, at) from None
    return str(string), int(end)


def _object(text: str, start: int) -> Node:
    node = Node(start, start, start, {})
    at = _skip(text, start + 1)
    while not text.startswith("}", at):
        begin = at
        name, at = _string(text, at)
        at = _skip(text, at)
        if not text.startswith(":", at):
            raise _unexpected(text, at)
        child = _value(text, _skip(text, at + 1))
        if name in node.children:
            raise UnreadableSettings(f"it has {name!r} twice in one object")
        child.begin = begin
        node.children[name], node.value[name] = child, child.value
        at = _next(text, child.end, "}")
    node.end = at + 1
    return node


def _list(text: str, start: int) -> Node:
    node = Node(start, start, start, [])
    at = _skip(text, start + 1)
    while not text.startswith("]", at):
        child = _value(text, at)
        node.children[len(node.value)] = child
        node.value.append(child.value)
        at = _next(text, child.end, "]")
    node.end = at + 1
    return node


def _next(text: str, at: int, close: str) -> int:
    """Return the place of the next member or item, or of `close`."""
    at = _skip(text, at)
    if text.startswith(",", at):
        return _skip(text, at + 1)
    if not text.startswith(close, at):
        raise _unexpected(text, at)
    return at


def put(text: str, path: Path, value: Any) -> str:
    """Set the value at `path`, and add the objects that lead there. An object is merged into one that is there.

    Raises UnreadableSettings where the path leads through a value that is no object.
    """
    node = parse(text)
    if node.start == node.end:
        return f"{text}{_dumped(_nested(path, value), text, '')}{_newline(text)}"
    for depth, name in enumerate(path):
        _check_holds(node, path[:depth], name)
        if name not in node.children:
            return _insert(text, node, path[depth:], value)
        node = node.children[name]
    if isinstance(value, dict) and isinstance(node.value, dict):
        for name, part in value.items():
            text = put(text, (*path, name), part)
        return text
    if _same(node.value, value):
        return text
    return text[: node.start] + _dumped(value, text, _indent_of(text, node.begin)) + text[node.end :]


def _check_holds(node: Node, path: Path, name: str | int) -> None:
    """Raise UnreadableSettings if a value can't have a member or an item."""
    kind, word = (list, "list") if isinstance(name, int) else (dict, "object")
    if not isinstance(node.value, kind):
        raise UnreadableSettings(f"{spelled(path)} is no {word}")


def put_item(text: str, path: Path, key: str, value: dict[str, Any]) -> str:
    """Add an object to the list at `path`, or merge it into the item with the same `key`."""
    items = at_path(text, path)
    if items is None:
        return put(text, path, [value])
    if not isinstance(items, list):
        raise UnreadableSettings(f"{spelled(path)} is no list")
    return put(text, (*path, item_index(items, key, value[key])), value)


def item_index(items: list[Any], key: str, name: Any) -> int:
    """Return the index of the object whose `key` is `name`; the list's length where there is none."""
    found = (i for i, item in enumerate(items) if isinstance(item, dict) and item.get(key) == name)
    return next(found, len(items))


def at_path(text: str, path: Path) -> Any:
    """Return the value at `path`, or None."""
    node = parse(text)
    for depth, name in enumerate(path):
        _check_holds(node, path[:depth], name)
        if name not in node.children:
            return None
        node = node.children[name]
    return node.value


def remove(text: str, path: Path) -> str:
    """Remove the value at `path`, and the objects and lists on the way that are empty then."""
    nodes = [parse(text)]
    for name in path:
        if name not in nodes[-1].children:
            return text
        nodes.append(nodes[-1].children[name])
    depth = len(path)
    while depth > 1 and len(nodes[depth - 1].children) == 1:
        depth -= 1
    return _delete(text, nodes[depth - 1], path[depth - 1])


def spelled(path: Path) -> str:
    """Return a path as people write it."""
    return "".join(f"[{name}]" if isinstance(name, int) else f".{name}" for name in path).lstrip(".") or "the file"


def _same(one: Any, other: Any) -> bool:
    """Whether two values are the same JSON (for Python, True is 1)."""
    return json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)


def _nested(path: Path, value: Any) -> Any:
    for name in reversed(path):
        value = [value] if isinstance(name, int) else {name: value}
    return value


def _newline(text: str) -> str:
    return "\r\n" if "\r\n" in text else "\n"


def _indent_of(text: str, at: int) -> str:
    """Return the indentation of the line that `at` is on."""
    return _indent_at(text, text.rfind("\n", 0, at) + 1)


def _indent_at(text: str, at: int) -> str:
    found = _LINE_INDENT.match(text, at)
    assert found is not None
    return found[0]


def _dumped(value: Any, text: str, indent: str) -> str:
    """Return a value as JSON, in the style of `text`, for a place whose line is indented by `indent`."""
    found = _MEMBER_INDENT.search(text)
    lines = json.dumps(value, indent=found[1] if found else _DEFAULT_INDENT, ensure_ascii=False).split("\n")
    return f"{_newline(text)}{indent}".join(lines)


def _insert(text: str, parent: Node, path: Path, value: Any) -> str:
    """Add a member or an item behind the last one of `parent`."""
    close = parent.end - 1
    place = len(text[:close].rstrip())
    outer = _indent_of(text, parent.begin)
    last = max(parent.children.values(), key=lambda child: child.end, default=None)
    inner = _inner_indent(text, parent, outer)
    name = "" if isinstance(path[0], int) else f"{json.dumps(path[0], ensure_ascii=False)}: "
    added = f"{_newline(text)}{inner}{name}{_dumped(_nested(path[1:], value), text, inner)}"
    gap = text[place:close] if "\n" in text[place:close] else f"{_newline(text)}{outer}"
    head = text[:place]
    if last is not None and text.startswith(",", _skip(text, last.end)):
        added += ","  # the file's own style
    elif last is not None:
        head = f"{text[: last.end]},{text[last.end : place]}"
    return f"{head}{added}{gap}{text[close:]}"


def _inner_indent(text: str, parent: Node, outer: str) -> str:
    for child in parent.children.values():
        if not text[text.rfind("\n", 0, child.begin) + 1 : child.begin].strip():
            return _indent_of(text, child.begin)
    found = _MEMBER_INDENT.search(text)
    return outer + (found[1] if found else _DEFAULT_INDENT)


def _delete(text: str, parent: Node, name: str | int) -> str:
    """Remove one member or item with its comma, and its lines where nothing else is on them."""
    node = parent.children[name]
    begin, end, comma = node.begin, node.end, None
    behind = _skip(text, end)
    if text.startswith(",", behind):
        end = behind + 1
    elif before := [child.end for child in parent.children.values() if child.end < begin]:
        comma = _skip(text, max(before))
    begin, end = _whole_lines(text, begin, end)
    text = text[:begin] + text[end:]
    return text if comma is None else text[:comma] + text[comma + 1 :]


def _whole_lines(text: str, begin: int, end: int) -> tuple[int, int]:
    """Return the span of the lines of a span that has them for itself, else the span with the blanks behind it."""
    line = text.rfind("\n", 0, begin) + 1
    rest = text.find("\n", end)
    if not text[line:begin].strip() and rest >= 0 and not text[end:rest].strip():
        return line, rest + 1
    return begin, end + len(_indent_at(text, end))
