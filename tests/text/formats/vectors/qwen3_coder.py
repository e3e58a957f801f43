"""Formats of Qwen3-Coder, Qwen3.5 and Seed-OSS."""

from __future__ import annotations

from treadle.text.events import CallArguments, CallStart, Malformed, Reasoning, Text
from treadle.text.formats.reader import ReaderSetup
from treadle.text.formats.reasoning import MARKERS

from .vector import Vector, call

TYPES = {
    "edit": {
        "path": ("string",),
        "text": ("string",),
        "line": ("integer",),
        "options": ("object",),
        "lines": ("array",),
        "force": ("boolean",),
        "ratio": ("number",),
        "note": ("string", "null"),
    }
}
PLAIN = ReaderSetup("qwen3_coder", tools=("edit", "now"), types=TYPES)
OPENED = ReaderSetup("qwen3_coder", MARKERS["think"], opened=True, tools=("edit", "now"), types=TYPES)


def function(name: str, *parameters: tuple[str, str]) -> str:
    body = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in parameters)
    return f"<function={name}>\n{body}</function>"


def block(name: str, *parameters: tuple[str, str]) -> str:
    return f"<tool_call>\n{function(name, *parameters)}\n</tool_call>"


CODE = 'def f(x):\n\treturn "<b>\\n" if x < 3 else x\n'
JSON_CODE = '"def f(x):\\n\\treturn \\"<b>\\\\n\\" if x < 3 else x\\n"'

VECTORS = [
    Vector("text alone", PLAIN, "Use <function> or <tool>.", (Text("Use <function> or <tool>."),)),
    Vector(
        "strings and others",
        PLAIN,
        "I edit.\n" + block("edit", ("path", "/a b/é.py"), ("text", CODE), ("line", "3"), ("force", "True")),
        (
            Text("I edit."),
            *call(0, "edit", f'{{"path": "/a b/é.py", "text": {JSON_CODE}, "line": 3, "force": true}}'),
        ),
    ),
    Vector(
        "values by type",
        PLAIN,
        block(
            "edit", ("options", '{"a": [1, {}]}'), ("lines", "[1,\n2]"), ("ratio", "2"), ("note", "null"), ("x", "y")
        ),
        call(0, "edit", '{"options": {"a": [1, {}]}, "lines": [1,\n2], "ratio": 2, "note": null, "x": "y"}'),
    ),
    Vector(
        "values that are no JSON, or text beside it",
        PLAIN,
        block("edit", ("line", "three"), ("options", "{'a': 1}"), ("note", "5"), ("x", "5"), ("path", "5")),
        call(0, "edit", '{"line": "three", "options": "{\'a\': 1}", "note": "5", "x": 5, "path": "5"}'),
    ),
    Vector(
        "marker in a JSON string",
        PLAIN,
        block("edit", ("lines", '["a</parameter>\\"", 1]'), ("path", "x")),
        call(0, "edit", '{"lines": ["a</parameter>\\"", 1], "path": "x"}'),
    ),
    Vector(
        "no parameters, two calls",
        PLAIN,
        f"{block('now')}\n{block('now')}",
        (*call(0, "now", "{}"), *call(1, "now", "{}")),
    ),
    Vector("no outer marker", PLAIN, "So:\n" + function("now"), (Text("So:"), *call(0, "now", "{}"))),
    Vector(
        "values on one line",
        PLAIN,
        "<function=edit><parameter=path>a</parameter><parameter=line>1</parameter></function>",
        call(0, "edit", '{"path": "a", "line": 1}'),
    ),
    Vector(
        "closing markers missing",
        PLAIN,
        "<tool_call>\n<function=edit>\n<parameter=path>\na\n<parameter=text>\nb\n</function>\n</tool_call>\nDone",
        (*call(0, "edit", '{"path": "a", "text": "b"}'), Text("Done")),
    ),
    Vector(
        "empty and blank strings",
        PLAIN,
        block("edit", ("path", ""), ("text", "\n \n")),
        call(0, "edit", '{"path": "", "text": "\\n \\n"}'),
    ),
    Vector(
        "cut in a string",
        PLAIN,
        "<function=edit>\n<parameter=text>\na <b\n",
        (CallStart(0, "edit"), CallArguments(0, '{"text": "a <b\\n')),
    ),
    Vector(
        "cut in a number",
        PLAIN,
        "<function=edit>\n<parameter=path>\na\n</parameter>\n<parameter=line>\n12",
        (CallStart(0, "edit"), CallArguments(0, '{"path": "a"')),
    ),
    Vector("cut before the name", PLAIN, "<tool_call>\n<func", (Malformed(""), Text("<tool_call>\n<func"))),
    Vector(
        "no function",
        PLAIN,
        "<tool_call>\n{}</tool_call>",
        (Malformed(""), Text("<tool_call>\n{}</tool_call>")),
    ),
    Vector(
        "no parameter",
        PLAIN,
        "<function=edit>\nyes</function>",
        (CallStart(0, "edit"), Malformed(""), Text("yes</function>")),
    ),
    Vector(
        "reasoning never closed, then a call",
        OPENED,
        f"Hm\n{block('now')}",
        (Reasoning("Hm"), *call(0, "now", "{}")),
    ),
]


def seed_block(name: str, *parameters: tuple[str, str]) -> str:
    body = "".join(f"<parameter={key}>{value}</parameter>\n" for key, value in parameters)
    return f"<seed:tool_call>\n<function={name}>\n{body}</function>\n</seed:tool_call>"


SEED = ReaderSetup("seed_oss", MARKERS["seed"], tools=("edit", "now"), types=TYPES)
SEED_SPECIAL = ("<seed:tool_call>", "</seed:tool_call>", "<seed:think>", "</seed:think>", "<seed:eos>")

SEED_VECTORS = [
    ("text alone", "Use <seed> or <function>.", (Text("Use <seed> or <function>."),)),
    (
        "strings and others",
        "I edit.\n" + seed_block("edit", ("path", "/a b/é.py"), ("text", CODE), ("line", "3"), ("force", "True")),
        (
            Text("I edit."),
            *call(0, "edit", f'{{"path": "/a b/é.py", "text": {JSON_CODE}, "line": 3, "force": true}}'),
        ),
    ),
    (
        "line feeds belong to a value",
        seed_block("edit", ("path", "\na\n"), ("text", "")),
        call(0, "edit", '{"path": "\\na\\n", "text": ""}'),
    ),
    (
        "values by type",
        seed_block("edit", ("options", '{"a": [1, {}]}'), ("ratio", "2"), ("note", "null"), ("x", "y")),
        call(0, "edit", '{"options": {"a": [1, {}]}, "ratio": 2, "note": null, "x": "y"}'),
    ),
    (
        "two calls behind reasoning",
        f"<seed:think>Hm.</seed:think>\n{seed_block('now')}\n{seed_block('now')}<seed:eos>",
        (Reasoning("Hm."), *call(0, "now", "{}"), *call(1, "now", "{}")),
    ),
    ("no outer marker", "So:\n" + function("now"), (Text("So:"), *call(0, "now", "{}"))),
    (
        "closing markers missing",
        "<seed:tool_call>\n<function=edit>\n<parameter=path>a\n<parameter=text>b\n</function>\n</seed:tool_call>\nDone",
        (*call(0, "edit", '{"path": "a", "text": "b"}'), Text("Done")),
    ),
    (
        "cut in a string",
        "<seed:tool_call><function=edit>\n<parameter=text>a <b\n",
        (CallStart(0, "edit"), CallArguments(0, '{"text": "a <b\\n')),
    ),
    ("no function", "<seed:tool_call>\n{}", (Malformed(""), Text("<seed:tool_call>\n{}"))),
]
VECTORS += [
    Vector(name, SEED, text, events, special)
    for name, text, events in SEED_VECTORS
    for special in ((), SEED_SPECIAL)
    if special or "<seed:eos>" not in text
]
