"""Edits of lists in YAML: the rest of the text stays, and odd layouts are refused instead of broken."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from treadle.cli.connect import yaml_text
from treadle.cli.connect.errors import UnreadableSettings

CONTINUE = """# my assistant
name: Mine
models:
  # the big one
  - name: Sonnet
    provider: anthropic  # paid
    roles:
      - chat

# rules below
rules:
  - Be brief
"""
ENTRY = {"name": "Treadle", "provider": "openai", "roles": ["chat", "edit"]}


def put(text: str, path: tuple[str, ...] = ("models",), entry: dict[str, Any] = ENTRY) -> str:
    return yaml_text.put_item(text, path, "name", entry)


def test_an_item_is_added_in_the_lists_indentation_and_removed_again() -> None:
    after = put(CONTINUE)
    entry = "  - name: Treadle\n    provider: openai\n    roles:\n    - chat\n    - edit\n"
    assert after == CONTINUE.replace("      - chat\n", f"      - chat\n{entry}")
    assert put(after) == after
    assert yaml_text.remove_item(after, ("models",), "name", "Treadle") == CONTINUE


def test_an_item_is_merged_into_its_earlier_form() -> None:
    before = put(CONTINUE, entry={**ENTRY, "mine": 1, "provider": "old"})
    data = yaml.safe_load(put(before))
    assert data["models"][1] == {**ENTRY, "mine": 1}
    assert data["rules"] == ["Be brief"]


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("", ()),
        ("# nothing yet\n", ()),
        ("[]\n", ()),
        ("- name: a\n", ()),
        ("- name: a", ()),
        ("- name: a\n  text: |\n    two\n    lines\n", ()),
        ("-   name: a\n    more: {x: [1, 2]}\n# end\n", ()),
        ("name: x\n", ("models",)),
        ("models: []\nname: x\n", ("models",)),
        ("models:\nname: x\n", ("models",)),
        ("models:\n- name: a\nname: x\n", ("models",)),
        ("models:\n    - name: a\n\n\nname: x\n", ("models",)),
    ],
)
def test_every_common_layout_gets_the_item(text: str, path: tuple[str, ...]) -> None:
    data = yaml.safe_load(text)
    items = (data if not path else (data or {}).get("models")) or []
    after = put(text, path)
    found = yaml.safe_load(after)
    assert (found["models"] if path else found) == [*items, ENTRY]
    assert put(after, path) == after
    removed = yaml.safe_load(yaml_text.remove_item(after, path, "name", "Treadle"))
    assert (removed["models"] if path else removed) == items


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("models: [{name: a}]\n", "in brackets"),
        ("models: 3\n", "models is no list"),
        ("- a\n", "it is no mapping"),
        ("a: [\n", "line 2"),
        ("a: 1\n---\nb: 2\n", "another document"),
        ("models:\n- name: Treadle # mine\n", "has comments"),
        ("a: !secret x\n", "line 1: could not determine a constructor"),
        ("{name: a}\n", ""),
        ("- " * 5000, "nested too deeply"),
    ],
)
def test_what_can_not_be_changed_safely_is_refused(text: str, reason: str) -> None:
    with pytest.raises(UnreadableSettings) as error:
        put(text)
    assert reason in str(error.value)


def test_nothing_to_remove_changes_nothing() -> None:
    assert yaml_text.remove_item("", (), "name", "Treadle") == ""
    assert yaml_text.remove_item(CONTINUE, ("models",), "name", "Treadle") == CONTINUE
