"""Vectors of Nemotron and Hunyuan, after their chat templates."""

from __future__ import annotations

from treadle.text.events import Malformed, Reasoning, Text

from . import vector
from .family import Vector, begun, call, family

_PARIS = '{"city": "Paris"}'
_CALLED = call(0, "get_weather", _PARIS)
_ONE = f'{{"name": "get_weather", "arguments": {_PARIS}}}'


def _vectors(begin: str, end: str) -> tuple[Vector, ...]:
    return (
        Vector("one call", f"{begin}[{_ONE}]{end}", _CALLED),
        Vector("white space", f"{begin}\n[\n  {_ONE}\n]\n{end}\n", _CALLED),
        Vector(
            "several calls",
            f'{begin}[{_ONE}, {{"name": "ping", "arguments": {{}}}}]{end}',
            (*_CALLED, *call(1, "ping", "{}")),
        ),
        Vector("a call without an array", f"{begin}{_ONE}{end}", _CALLED),
        Vector("an empty array", f"{begin}[]{end}", ()),
        Vector("no closing marker", f"{begin}[{_ONE}]", _CALLED),
        Vector("text around", f"Sure.\n{begin}[{_ONE}]{end}\nDone.", (Text("Sure."), *_CALLED, Text("\nDone."))),
        Vector(
            "arguments as a string",
            f'{begin}[{{"name": "get_weather", "arguments": "{{\\"city\\": \\"Paris\\"}}"}}]{end}',
            _CALLED,
        ),
        Vector(
            "brackets and markers in strings",
            f'{begin}[{{"name": "search", "arguments": {{"query": "]}}{end}{begin}[\\"{{"}}}}]{end}',
            call(0, "search", f'{{"query": "]}}{end}{begin}[\\"{{"}}'),
        ),
        Vector(
            "unicode and all types",
            f'{begin}[{{"name": "search", '
            f'"arguments": {{"query": "é東🙂", "limit": 3, "x": [null, true, {{"y": 1.5}}]}}}}]{end}',
            call(0, "search", '{"query": "é東🙂", "limit": 3, "x": [null, true, {"y": 1.5}]}'),
        ),
        Vector("reasoning before", f"<think>Hm.</think>\n\n{begin}[{_ONE}]{end}", (Reasoning("Hm."), *_CALLED)),
        Vector("reasoning in the prompt", f"Hm.\n</think>\n{begin}[{_ONE}]{end}", (Reasoning("Hm."), *_CALLED), True),
        Vector("malformed", f"{begin}none of them", (Malformed(""), Text(f"{begin}none of them"))),
        Vector(
            "malformed: no name",
            f'{begin}[{{"arguments": {{"a": 1}}}}]{end}',
            (Malformed(""), Text(f'{begin}[{{"arguments": {{"a": 1}}}}]{end}')),
        ),
        Vector("cut off in the arguments", f"{begin}[{_ONE[:-5]}", begun(0, "get_weather", '{"city": "Par')),
        Vector("cut off in the marker", f"{begin}[{_ONE}]{end[:4]}", _CALLED),
    )


def _family(name: str, begin: str, end: str, most: int | None = None) -> list[vector.Vector]:
    return family(name, _vectors(begin, end)[:most], special=(begin, end), reasoning="think")


VECTORS = [
    *_family("nemotron", "<TOOLCALL>", "</TOOLCALL>"),
    *_family("hunyuan_a13b", "<tool_calls>", "</tool_calls>", 4),  # the parser is the same
]
