"""Vectors of GLM's formats, after the chat templates of GLM-4.5, GLM-4.6 and GLM-4.7."""

from __future__ import annotations

from collections.abc import Iterable

from treadle.text.events import Malformed, Reasoning, Text

from .family import Vector, begun, call, family

_SPECIAL = ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
_CALLED = call(0, "get_weather", '{"city": "Paris"}')


def _call(name: str, *arguments: tuple[str, str], line: str) -> str:
    pairs = (f"<arg_key>{key}</arg_key>{line}<arg_value>{value}</arg_value>{line}" for key, value in arguments)
    return f"<tool_call>{name}{line}{''.join(pairs)}</tool_call>"


def _vectors(line: str) -> Iterable[Vector]:
    paris = _call("get_weather", ("city", "Paris"), line=line)
    head = f"<tool_call>search{line}<arg_key>query</arg_key>{line}<arg_value>"
    yield Vector("one call", paris, _CALLED)
    yield Vector("several calls", f"{paris}\n{_call('ping', line=line)}", (*_CALLED, *call(1, "ping", "{}")))
    yield Vector("several calls on one line", paris + _call("ping", line=""), (*_CALLED, *call(1, "ping", "{}")))
    yield Vector("text before", f"I look it up.\n{paris}", (Text("I look it up."), *_CALLED))
    yield Vector("text behind", f"{paris}\nDone.", (*_CALLED, Text("Done.")))
    yield Vector(
        "all types",
        _call(
            "search",
            ("query", "5"),
            ("limit", "-3"),
            ("exact", "true"),
            ("score", "1.5e3"),
            ("tags", '["a", "</arg_key>"]'),
            line=line,
        ),
        call(
            0,
            "search",
            '{"query": "5", "limit": -3, "exact": true, "score": 1.5e3, "tags": ["a", "</arg_key>"]}',
        ),
    )
    yield Vector(
        "an object, null, and a parameter that is not declared",
        _call(
            "write_file",
            ("path", "a b"),
            ("content", "{}"),
            ("owner", "null"),
            ("meta", '{"mode": {"x": [1, null]}}'),
            ("more", "3"),
            line=line,
        ),
        call(
            0,
            "write_file",
            '{"path": "a b", "content": "{}", "owner": null, "meta": {"mode": {"x": [1, null]}}, "more": 3}',
        ),
    )
    yield Vector(
        "braces, quotes, lines and markers in a string",
        _call("write_file", ("path", "C:\\x"), ("content", ' {"a":\n"b"} <tool_call>ping</arg_key> \n'), line=line),
        call(0, "write_file", '{"path": "C:\\\\x", "content": " {\\"a\\":\\n\\"b\\"} <tool_call>ping</arg_key> \\n"}'),
    )
    yield Vector(
        "unicode",
        _call("search", ("query", "Zürich 東京 🙂"), line=line),
        call(0, "search", '{"query": "Zürich 東京 🙂"}'),
    )
    yield Vector(
        "a value of another type than declared",
        _call("search", ("query", "x"), ("limit", "many"), line=line),
        call(0, "search", '{"query": "x", "limit": "many"}'),
    )
    yield Vector("reasoning before", f"<think>Let me see.</think>\n{paris}", (Reasoning("Let me see."), *_CALLED))
    yield Vector(
        "malformed: no value",
        "<tool_call>ping\n<arg_key>a</arg_key>b",
        (*begun(0, "ping"), Malformed(""), Text("<arg_key>a</arg_key>b")),
    )
    yield Vector(
        "malformed: a sentence",
        "<tool_call>\nis the marker of a call",
        (Malformed(""), Text("<tool_call>\nis the marker of a call")),
    )
    yield Vector("cut off in the name", "<tool_call>sea", (Malformed(""), Text("<tool_call>sea")))
    yield Vector("cut off in a string", f"{head}a\nb</arg", begun(0, "search", '{"query": "a\\nb</arg'))
    yield Vector("no call", "Just <arg_key>.", (Text("Just <arg_key>."),))


VECTORS = [
    *family("glm", _vectors("\n"), reasoning="think"),
    *family("glm47", _vectors(""), reasoning="think"),
    *family("glm", [Vector("special tokens", _call("ping", line="\n"), call(0, "ping", "{}"))], special=_SPECIAL),
]
