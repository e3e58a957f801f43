"""Changes that a client needs in its settings files, and the text of the files with them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import reduce
from pathlib import Path
from typing import Any

from . import jsonc, yaml_text


@dataclass(frozen=True)
class Edit:
    """A value to set at a path. With `item`, the value is an object for the list at the path, and `item` is the key
    that identifies it there. Objects are merged into those that the file has."""

    path: tuple[str, ...]
    value: Any
    item: str | None = None


@dataclass(frozen=True)
class JsonFile:
    """A JSON file of the client, with or without comments."""

    path: Path
    edits: tuple[Edit, ...]

    def with_edits(self, text: str) -> str:
        """Return the file's text with the edits. Raises UnreadableSettings, as does `without_edits`."""

        def apply(text: str, edit: Edit) -> str:
            if edit.item is None:
                return jsonc.put(text, edit.path, edit.value)
            return jsonc.put_item(text, edit.path, edit.item, edit.value)

        return _checked(reduce(apply, self.edits, text))

    def without_edits(self, text: str) -> str:
        """Return the file's text without the edits."""

        def undo(text: str, edit: Edit) -> str:
            if edit.item is None:
                return jsonc.remove(text, edit.path)
            items = jsonc.at_path(text, edit.path)
            items = items if isinstance(items, list) else []
            return jsonc.remove(text, (*edit.path, jsonc.item_index(items, edit.item, edit.value[edit.item])))

        return _checked(reduce(undo, self.edits, text))

    def example(self) -> str:
        """Return a document with the edits alone."""
        return self.with_edits("")


def _checked(text: str) -> str:
    jsonc.parse(text)
    return text


@dataclass(frozen=True)
class YamlFile:
    """A YAML file of the client with a list of models, of which one is the server's."""

    path: Path
    edit: Edit
    head: str = ""
    """The beginning of a new file."""

    def with_edits(self, text: str) -> str:
        """Return the file's text with the edit. Raises UnreadableSettings, as does `without_edits`."""
        begun = text if text.strip() else self.head
        return yaml_text.put_item(begun, self.edit.path, str(self.edit.item), self.edit.value)

    def without_edits(self, text: str) -> str:
        """Return the file's text without the edit."""
        item = str(self.edit.item)
        return yaml_text.remove_item(text, self.edit.path, item, self.edit.value[item])

    def example(self) -> str:
        """Return a document with the edit alone."""
        return self.with_edits("")


@dataclass(frozen=True)
class OwnFile:
    """A file that belongs to this connection alone: the client reads it where it is told to."""

    path: Path
    text: str

    def with_edits(self, text: str) -> str:
        """Return the file's text."""
        return self.text

    def without_edits(self, text: str) -> None:
        """Return None: the file goes."""

    def example(self) -> str:
        """Return the file's text."""
        return self.text


SettingsFile = JsonFile | YamlFile | OwnFile


@dataclass(frozen=True)
class Setup:
    """Settings of one client for one server: `files` to change, `variables` for its environment, the command to `start`
    it, and `notes` for the user."""

    files: tuple[SettingsFile, ...] = ()
    variables: dict[str, str] = field(default_factory=dict)
    start: str = ""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Client:
    """A client: its name on the command line, its name for people, the programs and folders that show that it is
    installed, and the tokens that it sends before the user's first word (0: none to speak of)."""

    name: str
    title: str
    setup: Callable[..., Setup]
    programs: tuple[str, ...] = ()
    folders: tuple[str, ...] = ()
    prompt_tokens: int = 0
