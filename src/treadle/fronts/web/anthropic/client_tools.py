"""Tools of Anthropic's own that the client runs, with their documented schemas: shell, text editor and memory."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ....text.formats.base import ToolSpec

Schema = dict[str, Any]

_TEXT: Schema = {"type": "string"}
_LINE: Schema = {"type": "integer"}
_RANGE: Schema = {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 2}
VERSIONED = "(bash_(20241022|20250124)|text_editor_(20241022|20250124|20250429|20250728)|memory_20250818)"
"""Pattern of the types that are known."""
_EDITORS: Mapping[str, tuple[str, str, bool]] = {
    "20241022": ("str_replace_editor", "new_str", True),
    "20250124": ("str_replace_editor", "new_str", True),
    "20250429": ("str_replace_based_edit_tool", "new_str", False),
    "20250728": ("str_replace_based_edit_tool", "insert_text", False),
}
"""Text editors by version: the tool's name, the key of the text that `insert` adds, and whether it can undo."""


def client_tool(kind: str) -> ToolSpec | None:
    """Return the tool of a type such as `bash_20250124`; None for a type that is not known."""
    if re.fullmatch(VERSIONED, kind) is None:
        return None
    family, _, version = kind.rpartition("_")
    if family == "text_editor":
        return _editor(version)
    return ToolSpec(name=family, description=_ABOUT[family], parameters=_SCHEMAS[family])


def _editor(version: str) -> ToolSpec:
    name, inserted, undoes = _EDITORS[version]
    commands = ["view", "create", "str_replace", "insert", *(["undo_edit"] if undoes else [])]
    keys = dict.fromkeys(("file_text", "old_str", "new_str", inserted), _TEXT)
    properties = {**keys, "insert_line": _LINE, "view_range": _RANGE}
    about = (
        "View, create and edit files. view shows a file or folder, or the lines in view_range; create writes "
        "file_text; str_replace replaces old_str, which must occur once, by new_str; insert puts "
        f"{inserted} after insert_line."
    )
    return ToolSpec(name=name, description=about, parameters=_commands(commands, ["path"], **properties))


def _commands(commands: list[str], needed: list[str], **properties: Schema) -> Schema:
    first: Schema = {"command": {"type": "string", "enum": commands}, **dict.fromkeys(needed, _TEXT)}
    return {"type": "object", "properties": {**first, **properties}, "required": ["command", *needed]}


_ABOUT: Mapping[str, str] = {
    "bash": "Run a command in a shell that keeps its state between calls. restart starts it anew.",
    "memory": "Store and read notes as files below /memories, which last beyond this conversation. view shows a file "
    "or folder; create writes file_text; str_replace replaces old_str by new_str; insert puts insert_text after "
    "insert_line; delete removes path; rename moves old_path to new_path.",
}
_SCHEMAS: Mapping[str, Schema] = {
    "bash": {"type": "object", "properties": {"command": _TEXT, "restart": {"type": "boolean"}}},
    "memory": _commands(
        ["view", "create", "str_replace", "insert", "delete", "rename"],
        [],
        **dict.fromkeys(("path", "file_text", "old_str", "new_str", "insert_text", "old_path", "new_path"), _TEXT),
        insert_line=_LINE,
        view_range=_RANGE,
    ),
}
