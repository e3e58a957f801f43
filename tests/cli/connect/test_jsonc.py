"""Edits of JSON with comments: the rest of the text stays, and the result is what a merge of the data gives."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from treadle.cli.connect import jsonc
from treadle.cli.connect.errors import UnreadableSettings

ZED = """// Zed settings
{
  "theme": "One Dark", // mine
  /* agents */
  "agent": {
    "enabled": true,
  },
  // last words
}
"""
NAMES = st.sampled_from(["a", "b", "provider", "ä", 'q"', "x.y"])
DATA = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=12,
)
OBJECTS = st.dictionaries(NAMES, DATA, max_size=4)


def written(value: Any, style: random.Random) -> str:
    """The value in JSON with random blanks, comments and trailing commas."""

    def gap() -> str:
        return style.choice(["", " ", "\n", "\n  ", "/* , } ] */", ' // { " ,\n', "\t"])

    if isinstance(value, dict):
        parts = [f"{gap()}{json.dumps(k)}{gap()}:{gap()}{written(v, style)}{gap()}" for k, v in value.items()]
    elif isinstance(value, list):
        parts = [f"{gap()}{written(v, style)}{gap()}" for v in value]
    else:
        return json.dumps(value, ensure_ascii=style.random() < 0.5)
    inner = ",".join(parts) + (f",{gap()}" if parts and style.random() < 0.3 else gap())
    return f"{{{inner}}}" if isinstance(value, dict) else f"[{inner}]"


def merged(data: Any, path: tuple[str, ...], value: Any) -> Any:
    if path:
        return {**data, path[0]: merged(data.get(path[0], {}), path[1:], value)}
    if isinstance(data, dict) and isinstance(value, dict):
        both = dict(data)
        for name, part in value.items():
            both[name] = merged(both[name], (), part) if name in both else part
        return both
    return value


@settings(max_examples=80, deadline=None)
@given(OBJECTS, st.lists(NAMES, min_size=1, max_size=3), DATA, st.randoms(use_true_random=False))
def test_a_put_is_a_merge_of_the_data(data: Any, path: list[str], value: Any, style: random.Random) -> None:
    text = written(data, style)
    assert jsonc.parse(text).value == data
    at: Any = data
    for name in path:
        if not isinstance(at, dict):
            return
        at = at.get(name, {})
    after = jsonc.put(text, tuple(path), value)
    assert jsonc.parse(after).value == merged(data, tuple(path), value)
    assert jsonc.put(after, tuple(path), value) == after


@settings(max_examples=80, deadline=None)
@given(OBJECTS, st.randoms(use_true_random=False))
def test_what_was_put_is_removed_again(data: dict[str, Any], style: random.Random) -> None:
    text = written(data, style)
    added = jsonc.put(text, ("new", "treadle"), {"url": 1, "models": [{"id": 2}]})
    assert jsonc.parse(jsonc.remove(added, ("new", "treadle"))).value == data
    for name in data:
        assert jsonc.parse(jsonc.remove(text, (name,))).value == {k: v for k, v in data.items() if k != name}


def test_comments_and_layout_stay() -> None:
    after = jsonc.put(ZED, ("language_models", "treadle"), {"url": "x"})
    assert after == ZED.replace(
        "  // last words\n",
        '  // last words\n  "language_models": {\n    "treadle": {\n      "url": "x"\n    }\n  },\n',
    )
    assert jsonc.remove(after, ("language_models", "treadle")) == ZED


@pytest.mark.parametrize(
    "text", ['{\n\t"a": 1\n}\n', '{\r\n    "a": {\r\n        "b": 1\r\n    }\r\n}\r\n', '{\n  "a": 1\n}', "{\n}\n"]
)
def test_indentation_and_line_ends_stay_and_a_removal_restores_the_bytes(text: str) -> None:
    after = jsonc.put(text, ("x", "y"), {"z": 1})
    assert ("\r\n" in text) == ("\r\n" in after)
    assert after.count("\r\n") in (0, after.count("\n"))
    assert "\t" not in text or '\n\t"x": {\n\t\t"y": {\n\t\t\t"z": 1' in after
    assert jsonc.remove(after, ("x", "y")) == text


def test_a_blank_file_becomes_an_object() -> None:
    assert jsonc.put("", ("a", "b"), 1) == '{\n  "a": {\n    "b": 1\n  }\n}\n'
    assert jsonc.parse(jsonc.put("// mine\n", ("a",), 1)).value == {"a": 1}


def test_an_item_is_added_once_and_merged_by_its_key() -> None:
    text = '{"l": [{"id": "other"}]}'
    once = jsonc.put_item(text, ("l",), "id", {"id": "t", "n": 1})
    assert jsonc.parse(once).value == {"l": [{"id": "other"}, {"id": "t", "n": 1}]}
    again = jsonc.put_item(once, ("l",), "id", {"id": "t", "n": 2})
    assert jsonc.parse(again).value == {"l": [{"id": "other"}, {"id": "t", "n": 2}]}
    assert jsonc.parse(jsonc.put_item("{}", ("l",), "id", {"id": "t"})).value == {"l": [{"id": "t"}]}


def test_true_is_not_one() -> None:
    assert jsonc.put('{"a": true}', ("a",), 1) == '{"a": 1}'


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{"a": }', "line 1 has '}'"),
        ('{"a": 1\n "b": 2}', "line 2 has '\"'"),
        ('{"a": 1', "the end of the file"),
        ('{"a": "\n"}', "line 1 has '\"'"),
        ("{'a': 1}", 'line 1 has "\'"'),
        ('{"a": 1} x', "line 1 has 'x'"),
        ('{"a": 1, "a": 2}', "it has 'a' twice"),
        ("[1]", "it is no object"),
        ('{"a": ' + "[" * 100_000, "nested too deeply"),
        ('{"a": NaN}', "line 1 has 'N'"),
        ("{/* }", "line 1 has '/'"),
    ],
)
def test_a_broken_file_is_refused_with_its_place(text: str, reason: str) -> None:
    with pytest.raises(UnreadableSettings) as error:
        jsonc.put(text, ("b",), 1)
    assert reason in str(error.value)


@pytest.mark.parametrize(
    ("text", "reason"),
    [('{"p": 1}', "p is no object"), ('{"p": []}', "p is no object"), ('{"p": {"t": null}}', "p.t is no object")],
)
def test_a_path_through_another_kind_of_value_is_refused(text: str, reason: str) -> None:
    with pytest.raises(UnreadableSettings, match=reason):
        jsonc.put(text, ("p", "t", "m"), 1)


def test_a_list_that_is_none_is_refused() -> None:
    with pytest.raises(UnreadableSettings, match="p is no list"):
        jsonc.put_item('{"p": {}}', ("p",), "id", {"id": 1})
