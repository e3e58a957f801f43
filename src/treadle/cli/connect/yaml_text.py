"""Edits of lists in YAML files that leave all other text as it is.

A list is the root of the document, or the value of a key of the root. Each function takes the text, and returns the new
text. Edits that can't be made by adding or replacing whole lines raise UnreadableSettings, as does a result that a
parser does not read as intended.
"""

from __future__ import annotations

from typing import Any

import yaml

from .errors import UnreadableSettings

Path = tuple[str, ...]

_MAX_WIDTH = 1 << 16  # a value stays on its line


def load(text: str) -> Any:
    """Return the document's data. Raises UnreadableSettings."""
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f"line {mark.line + 1}: " if mark is not None else ""
        raise UnreadableSettings(f"{place}{getattr(error, 'problem', None) or 'it is no YAML'}") from None
    except RecursionError:
        raise UnreadableSettings("it is nested too deeply") from None


def put_item(text: str, path: Path, key: str, value: dict[str, Any]) -> str:
    """Add an object to the list at `path`, or merge it into the item with the same `key`."""
    items = _items(text, path)
    index = _index(items, key, value[key])
    merged = {**items[index], **value} if index < len(items) else value
    if index < len(items) and items[index] == merged:
        return text
    expected = _with(load(text), path, [*items[:index], merged, *items[index + 1 :]])
    return _checked(_written(text, path, index, merged), expected)


def remove_item(text: str, path: Path, key: str, name: str) -> str:
    """Remove the item of the list at `path` whose `key` is `name`."""
    if not text.strip():
        return text
    items = _items(text, path)
    index = _index(items, key, name)
    if index == len(items):
        return text
    node = _node(text, path)
    expected = _with(load(text), path, items[:index] + items[index + 1 :])
    begin, end = _lines_of(text, node, index)
    if len(items) == 1:
        begin, end, empty = node.start_mark.index, end, "[]\n"
        begin = len(text[:begin].rstrip(" \t"))
        gap = " " if text[:begin].endswith(":") else ""
        if path:
            begin = len(text[:begin].rstrip())
            gap = " "
        return _checked(f"{text[:begin]}{gap}{empty}{text[end:]}", expected)
    return _checked(text[:begin] + text[end:], expected)


def dump(path: Path, value: dict[str, Any]) -> str:
    """Return a document with one item in the list at `path`."""
    document: Any = [value]
    for name in reversed(path):
        document = {name: document}
    return _dumped(document)


def _dumped(value: Any) -> str:
    text: str = yaml.safe_dump(value, sort_keys=False, allow_unicode=True, width=_MAX_WIDTH)
    return text


def _items(text: str, path: Path) -> list[Any]:
    """Return the list at `path`; an empty one where there is none."""
    data = load(text)
    for name in path:
        if data is not None and not isinstance(data, dict):
            raise UnreadableSettings("it is no mapping")
        data = (data or {}).get(name)
    if data is not None and not isinstance(data, list):
        raise UnreadableSettings(f"{'.'.join(path) or 'the file'} is no list")
    return data or []


def _with(data: Any, path: Path, items: list[Any]) -> Any:
    if not path:
        return items
    return {**(data or {}), path[0]: _with((data or {}).get(path[0]), path[1:], items)}


def _index(items: list[Any], key: str, name: Any) -> int:
    found = (i for i, item in enumerate(items) if isinstance(item, dict) and item.get(key) == name)
    return next(found, len(items))


def _checked(text: str, expected: Any) -> str:
    if load(text) != expected:
        raise UnreadableSettings("its layout can't be changed safely")
    return text


def _written(text: str, path: Path, index: int, value: dict[str, Any]) -> str:
    node = _node(text, path)
    if node is None or not node.value:
        return _first(text, path, node, value)
    if node.flow_style:
        raise UnreadableSettings("its list is in brackets")
    added = _indented(_dumped([value]), node.start_mark.column)
    begin, end = _lines_of(text, node, min(index, len(node.value) - 1))
    if index == len(node.value):
        return f"{_line_end(text[:end])}{added}{text[end:]}"
    if "#" in text[begin:end]:
        raise UnreadableSettings("the entry to change has comments")
    return text[:begin] + added + text[end:]


def _first(text: str, path: Path, node: Any, value: dict[str, Any]) -> str:
    """Write the first item of a list that is empty or missing."""
    if node is None:
        return _line_end(text) + dump(path, value)
    begin, end = node.start_mark.index, node.end_mark.index
    before = text[:begin].rstrip(" ")
    return f"{_line_end(before) if path else before}{_dumped([value])}{text[end:].lstrip(chr(10))}"


def _line_end(text: str) -> str:
    return text if not text or text.endswith("\n") else f"{text}\n"


def _indented(text: str, column: int) -> str:
    return "".join(f"{' ' * column}{line}" for line in text.splitlines(keepends=True))


def _node(text: str, path: Path) -> Any:
    """Return the node of the list at `path`; None where there is none."""
    node = yaml.compose(text, Loader=yaml.SafeLoader)
    for name in path:
        members = node.value if isinstance(node, yaml.MappingNode) else []
        node = next((value for key, value in members if key.value == name), None)
    return node


def _lines_of(text: str, node: Any, index: int) -> tuple[int, int]:
    """Return the span of the lines of an item, without the comments and blank lines behind it."""
    if node.flow_style:
        raise UnreadableSettings("its list is in brackets")
    item = node.value[index]
    end = _end(item)
    if not text[:end].endswith("\n"):
        end = text.find("\n", end) + 1 or len(text)
    return text.rfind("\n", 0, item.start_mark.index) + 1, end


def _end(node: Any) -> int:
    """Return where the content of a node ends: a block's own mark is behind the comments that follow."""
    if isinstance(node, yaml.ScalarNode) or node.flow_style or not node.value:
        return int(node.end_mark.index)
    last = node.value[-1]
    return _end(last[1] if isinstance(last, tuple) else last)
