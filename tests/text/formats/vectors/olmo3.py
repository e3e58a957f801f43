"""Vectors of Olmo 3, after its chat template."""

from __future__ import annotations

from treadle.text.events import Malformed, Text

from .family import Vector, begun, call, family

_PARIS = '{"city": "Paris"}'
_CALLED = call(0, "get_weather", _PARIS)
_BEGIN, _END = "<function_calls>", "</function_calls>"

OLMO3 = family(
    "olmo3",
    special=(_BEGIN, _END, "<|im_end|>"),
    vectors=(
        Vector("one call", f"{_BEGIN}\nget_weather(city='Paris')\n{_END}<|im_end|>", _CALLED),
        Vector("one line", f'{_BEGIN}get_weather(city="Paris"){_END}', _CALLED),
        Vector(
            "several calls",
            f"{_BEGIN}\nget_weather(city='Paris')\nping()\n{_END}",
            (*_CALLED, *call(1, "ping", "{}")),
        ),
        Vector("text before", f"Sure.\n{_BEGIN}\nget_weather(city='Paris')\n{_END}", (Text("Sure."), *_CALLED)),
        Vector("no closing marker", f"{_BEGIN}\nget_weather(city='Paris')", _CALLED),
        Vector("no calls", f"{_BEGIN}\n{_END}", ()),
        Vector(
            "all types and markers in strings",
            f"{_BEGIN}\nsearch(query='é東🙂 {_END})', limit=3, exact=true, tags=[null, 'x'])\n{_END}",
            call(0, "search", f'{{"query": "é東🙂 {_END})", "limit": 3, "exact": true, "tags": [null, "x"]}}'),
        ),
        Vector("malformed", f"{_BEGIN}\nI would call", (Malformed(""), Text(f"{_BEGIN}\nI would call"))),
        Vector(
            "cut off in the arguments", f"{_BEGIN}\nget_weather(city='Par", begun(0, "get_weather", '{"city": "Par')
        ),
    ),
)

VECTORS = [*OLMO3]
