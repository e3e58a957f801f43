"""Tools of Anthropic's own that the client runs."""

from __future__ import annotations

import pytest

from treadle.errors import InvalidRequest, UnsupportedParameter
from treadle.fronts.web.anthropic.tools import read_tools


@pytest.mark.parametrize(
    ("kind", "name", "keys"),
    [
        ("bash_20241022", "bash", {"command", "restart"}),
        ("bash_20250124", "bash", {"command", "restart"}),
        ("text_editor_20250124", "str_replace_editor", {"command", "path", "view_range", "insert_line", "new_str"}),
        ("text_editor_20250728", "str_replace_based_edit_tool", {"command", "path", "insert_text", "old_str"}),
        ("memory_20250818", "memory", {"command", "path", "insert_text", "old_path", "new_path"}),
    ],
)
def test_tools_that_the_client_runs_have_their_documented_schemas(kind: str, name: str, keys: set[str]) -> None:
    for given in ({"type": kind, "name": name}, {"type": kind}):
        (spec,) = read_tools([given], None).specs
        assert spec.name == name
        assert spec.description
        assert keys <= set(spec.parameters["properties"])


def test_an_editor_undoes_only_in_its_older_versions() -> None:
    for version, undoes in (("20241022", True), ("20250124", True), ("20250429", False), ("20250728", False)):
        (spec,) = read_tools([{"type": f"text_editor_{version}"}], None).specs
        assert ("undo_edit" in spec.parameters["properties"]["command"]["enum"]) is undoes


def test_a_name_of_its_own_and_strict_count() -> None:
    (spec,) = read_tools([{"type": "bash_20250124", "name": "shell", "strict": True}], None).specs
    assert (spec.name, spec.strict) == ("shell", True)


def test_a_wrong_name_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="name"):
        read_tools([{"type": "bash_20250124", "name": "my shell"}], None)


@pytest.mark.parametrize("kind", ["bash_20990101", "text_editor_1", "web_fetch_20250910", "computer_20250124", "x"])
def test_other_types_are_refused_by_name(kind: str) -> None:
    with pytest.raises(UnsupportedParameter, match=rf"tools\[0\].type '{kind}'"):
        read_tools([{"type": kind, "name": "x"}], None)


def test_examples_of_arguments_are_in_the_description() -> None:
    tool = {"name": "f", "input_schema": {}, "description": "Does it.", "input_examples": [{"a": 1}, {"a": 2}]}
    (spec,) = read_tools([tool], None).specs
    assert spec.description == 'Does it.\n\nExamples of arguments:\n{"a": 1}\n{"a": 2}'
