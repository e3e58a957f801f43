"""Formats of Llama 3 and 4."""

from __future__ import annotations

from treadle.text.events import CallArguments, CallStart, Malformed, Text
from treadle.text.formats.reader import ReaderSetup

from .vector import Vector, call

JSON = ReaderSetup("llama3_json", tools=("weather", "find"))
PYTHONIC = ReaderSetup("llama_pythonic", tools=("weather", "find"))
PARIS = '{"city": "Paris"}'
CALL = f'{{"name": "weather", "parameters": {PARIS}}}'
SPECIAL = ("<|python_tag|>", "<|eom_id|>", "<|eot_id|>", "<|python_start|>", "<|python_end|>", "<|eot|>")

VECTORS = [
    Vector("text alone", JSON, "It is {sunny} in [Paris].", (Text("It is {sunny} in [Paris]."),)),
    Vector("bare call", JSON, CALL, call(0, "weather", PARIS)),
    Vector("bare call and its end", JSON, f"\n\n{CALL}\n<|eot_id|>", call(0, "weather", PARIS), special=SPECIAL),
    Vector(
        "behind the tag, two calls",
        JSON,
        f'<|python_tag|>{CALL}; {{"type": "function", "function": "find", "parameters": {{}}}}<|eom_id|>',
        (*call(0, "weather", PARIS), *call(1, "find", "{}")),
        special=SPECIAL,
    ),
    Vector("in a list", JSON, f'[{CALL}, {{"name": "find"}}]', (*call(0, "weather", PARIS), *call(1, "find", "{}"))),
    Vector("JSON that is no call", JSON, '{"city": "Paris"}', (Text('{"city": "Paris"}'),)),
    Vector("name of no tool", JSON, '{"name": "Ann", "parameters": {}}', (Text('{"name": "Ann", "parameters": {}}'),)),
    Vector("list that is no call", JSON, '[{"a": 1}, 2]', (Text('[{"a": 1}, 2]'),)),
    Vector("empty object", JSON, "{}", (Text("{}"),)),
    Vector("name cut off", JSON, '{"name": "wea', (Text('{"name": "wea'),)),
    Vector("call behind text", JSON, f"So: {CALL}", (Text(f"So: {CALL}"),)),
    Vector(
        "built-in tool",
        JSON,
        '<|python_tag|>find.call(query="a \\"b\\"")<|eom_id|>',
        call(0, "find", '{"query": "a \\"b\\""}'),
        special=SPECIAL,
    ),
    Vector(
        "code behind the tag",
        JSON,
        "<|python_tag|>import math\n",
        (Malformed(""), Text("<|python_tag|>import math\n")),
        special=SPECIAL,
    ),
    Vector(
        "cut in the arguments",
        JSON,
        '{"name": "find", "parameters": {"q": "a',
        (CallStart(0, "find"), CallArguments(0, '{"q": "a')),
    ),
    Vector(
        "Python calls",
        PYTHONIC,
        '[weather(city="Paris", days=2), find(), find(q=\'it\\\'s "x"\\n\', ok=True, no=None)]<|eot|>',
        (
            *call(0, "weather", '{"city": "Paris", "days": 2}'),
            *call(1, "find", "{}"),
            *call(2, "find", '{"q": "it\'s \\"x\\"\\n", "ok": true, "no": null}'),
        ),
        special=SPECIAL,
    ),
    Vector(
        "Python values",
        PYTHONIC,
        "[find(a=[1, -2.5,], b={'x': (1, 'y'), \"z\": {}}, c=[], d='''it's\n'''  , e='', "
        "f='\\x41\\u00e9\\U0001f600\\d\\\n')]",
        call(
            0,
            "find",
            '{"a": [1, -2.5], "b": {"x": [1, "y"], "z": {}}, "c": [], "d": "it\'s\\n", "e": "", "f": "Aé😀\\\\d"}',
        ),
    ),
    Vector(
        "Python calls between their tokens",
        PYTHONIC,
        '<|python_start|>[find(q=")]")]<|python_end|>',
        call(0, "find", '{"q": ")]"}'),
        special=SPECIAL,
    ),
    Vector("reference to a source", PYTHONIC, "[1] says so, [find] too.", (Text("[1] says so, [find] too."),)),
    Vector("function that is no tool", PYTHONIC, "[f(x=1)] is a list", (Text("[f(x=1)] is a list"),)),
    Vector(
        "positional argument",
        PYTHONIC,
        "[find('a')]",
        (CallStart(0, "find"), Malformed(""), Text("'a')]")),
    ),
    Vector(
        "cut in a Python string",
        PYTHONIC,
        "[find(), find(q='ab",
        (*call(0, "find", "{}"), CallStart(1, "find"), CallArguments(1, '{"q": "ab')),
    ),
    Vector(
        "cut before the second name",
        PYTHONIC,
        "[find(), fin",
        (*call(0, "find", "{}"), Malformed(""), Text(", fin")),
    ),
    Vector("JSON call instead", PYTHONIC, CALL, call(0, "weather", PARIS)),
]
