"""Vectors of Gemma 3: the forms of calls that prompts ask it for."""

from __future__ import annotations

from treadle.text.events import Malformed, Text

from .family import Vector, begun, call, family

_CALLED = call(0, "get_weather", '{"city": "Paris"}')
_PING = call(1, "ping", "{}")
_JSON = '{"name": "get_weather", "parameters": {"city": "Paris"}}'

_VECTORS = (
    Vector("a JSON object", _JSON, _CALLED),
    Vector("JSON objects on lines", f'{_JSON}\n{{"name": "ping", "parameters": {{}}}}', (*_CALLED, *_PING)),
    Vector("an array of JSON objects", f'[{_JSON}, {{"name": "ping"}}]', (*_CALLED, *_PING)),
    Vector("JSON in a block of Markdown", f"```json\n{_JSON}\n```", _CALLED),
    Vector("a block of tool_call", f"```tool_call\n{_JSON}\n```\n", _CALLED),
    Vector("white space before", f"\n {_JSON}\n", _CALLED),
    Vector("a list in Python", '[get_weather(city="Paris"), ping()]', (*_CALLED, *_PING)),
    Vector("a block of tool_code", '```tool_code\nget_weather(city="Paris")\n```', _CALLED),
    Vector(
        "a block of tool_code behind text",
        'I look it up:\n```tool_code\nprint(get_weather(city="Paris"))\nping()\n```',
        (Text("I look it up:"), *_CALLED, *_PING),
    ),
    Vector(
        "a list in a block of tool_code",
        "```tool_code\n[get_weather(city='Paris'), ping()]\n```",
        (*_CALLED, *_PING),
    ),
    Vector(
        "all types in Python",
        "[search(query='é東🙂 \"]) ```', limit=3, exact=False, score=-0.5, tags=['a', None], x={'y': {}})]",
        call(
            0,
            "search",
            '{"query": "é東🙂 \\"]) ```", "limit": 3, "exact": false, "score": -0.5, '
            '"tags": ["a", null], "x": {"y": {}}}',
        ),
    ),
    Vector(
        "all types in JSON",
        '{"name": "search", "parameters": {"query": "}]\\"```", "limit": 3, "exact": true, "x": [null, {"y": 1.5}]}}',
        call(0, "search", '{"query": "}]\\"```", "limit": 3, "exact": true, "x": [null, {"y": 1.5}]}'),
    ),
    Vector("JSON that is no call", '{"city": "Paris"}', (Text('{"city": "Paris"}'),)),
    Vector("JSON of an unknown tool", '{"name": "x", "parameters": {}}', (Text('{"name": "x", "parameters": {}}'),)),
    Vector("a list that is no call", "[1, 2] and [x(a=1)]", (Text("[1, 2] and [x(a=1)]"),)),
    Vector("a list of an unknown tool", "[f(a=1)]", (Text("[f(a=1)]"),)),
    Vector("code that is no call", "```python\nprint(1)\n```", (Text("```python\nprint(1)\n```"),)),
    Vector("JSON behind text", f"Like {_JSON}", (Text(f"Like {_JSON}"),)),
    Vector("malformed tool_code", "```tool_code\nx = 1\n```", (Malformed(""), Text("```tool_code\nx = 1\n```"))),
    Vector(
        "malformed arguments",
        "[get_weather(city=Paris)]",
        (*begun(0, "get_weather", '{"city": '), Malformed(""), Text("Paris)]")),
    ),
    Vector("cut off in the name", "[get_wea", (Text("[get_wea"),)),
    Vector("cut off in JSON", _JSON[:-5], begun(0, "get_weather", '{"city": "Par')),
    Vector("cut off in Python", '[get_weather(city="Par', begun(0, "get_weather", '{"city": "Par')),
)

VECTORS = [
    *family("gemma3", _VECTORS),
    *family("gemma3_pythonic", _VECTORS),
    *family("gemma3_tool_code", _VECTORS),
]
