"""Vectors of LFM2, after the chat templates of LFM2 and LFM2.5."""

from __future__ import annotations

from treadle.text.events import Malformed, Reasoning, Text

from .family import Vector, begun, call, family

_CALLED = call(0, "get_weather", '{"city": "Paris"}')
_BEGIN, _END = "<|tool_call_start|>", "<|tool_call_end|>"

VECTORS = family(
    "lfm2",
    (
        Vector("one call", f"{_BEGIN}[get_weather(city='Paris')]{_END}<|im_end|>", _CALLED),
        Vector("double quotes and space", f'{_BEGIN} [ get_weather( city = "Paris" , ) ] {_END}', _CALLED),
        Vector(
            "several calls",
            f"{_BEGIN}[get_weather(city='Paris'), ping(), web.search(query='x')]{_END}",
            (*_CALLED, *call(1, "ping", "{}"), *call(2, "web.search", '{"query": "x"}')),
        ),
        Vector(
            "text before and behind",
            f"I look.{_BEGIN}[ping()]{_END}Done.",
            (Text("I look."), *call(0, "ping", "{}"), Text("Done.")),
        ),
        Vector(
            "all types",
            f"{_BEGIN}[search(query='5', limit=-3, exact=True, score=1.5, "
            f"tags=['a', \"b\", None], x={{'y': [{{}}]}})]{_END}",
            call(
                0,
                "search",
                '{"query": "5", "limit": -3, "exact": true, "score": 1.5, "tags": ["a", "b", null], "x": {"y": [{}]}}',
            ),
        ),
        Vector(
            "brackets, quotes, lines and markers in strings",
            f"""{_BEGIN}[write_file(path="C:\\\\x", content='"]) {_END}\\n\\'[ping()]')]{_END}""",
            call(0, "write_file", f"""{{"path": "C:\\\\x", "content": "\\"]) {_END}\\n'[ping()]"}}"""),
        ),
        Vector(
            "a line feed in a string",
            f"{_BEGIN}[search(query='a\nb')]{_END}",
            call(0, "search", '{"query": "a\\nb"}'),
        ),
        Vector(
            "quotes that are not escaped",
            f"{_BEGIN}[search(query='sed -n '1,5p' \"a b\"', tags=['it's', ''])]{_END}",
            call(0, "search", '{"query": "sed -n \'1,5p\' \\"a b\\"", "tags": ["it\'s", ""]}'),
        ),
        Vector("unicode", f"{_BEGIN}[search(query='é東🙂\\u00e9')]{_END}", call(0, "search", '{"query": "é東🙂é"}')),
        Vector(
            "JSON",
            f'{_BEGIN}[{{"name": "get_weather", "arguments": {{"city": "Paris"}}}}, '
            f'{{"name": "ping", "arguments": {{}}}}]{_END}',
            (*_CALLED, *call(1, "ping", "{}")),
        ),
        Vector("one JSON object", f'{_BEGIN}{{"name": "ping", "arguments": {{}}}}{_END}', call(0, "ping", "{}")),
        Vector("a call without a list", f"{_BEGIN}ping(){_END}", call(0, "ping", "{}")),
        Vector("an empty list", f"{_BEGIN}[]{_END}", ()),
        Vector(
            "reasoning before",
            f"<think>Let me see.</think>{_BEGIN}[get_weather(city='Paris')]{_END}",
            (Reasoning("Let me see."), *_CALLED),
        ),
        Vector("malformed", f"{_BEGIN}[1, 2]{_END}", (Malformed(""), Text(f"{_BEGIN}[1, 2]{_END}"))),
        Vector(
            "malformed: a positional argument",
            f"{_BEGIN}[ping('x')]",
            (*begun(0, "ping"), Malformed(""), Text("'x')]")),
        ),
        Vector("cut off in the name", f"{_BEGIN}[get_w", (Malformed(""), Text(f"{_BEGIN}[get_w"))),
        Vector("cut off in a string", f"{_BEGIN}[search(query='a\\", begun(0, "search", '{"query": "a')),
    ),
    special=(_BEGIN, _END, "<|im_end|>"),
    reasoning="think",
)
