"""Vectors of Granite 3, after the chat templates of granite-3.0 to granite-3.3."""

from __future__ import annotations

from treadle.text.events import Malformed, Reasoning, Text

from .family import Vector, begun, call, family

_PARIS = '{"city": "Paris"}'
_CALLED = call(0, "get_weather", _PARIS)
_ONE = f'{{"name": "get_weather", "arguments": {_PARIS}}}'

GRANITE = family(
    "granite",
    special=("<|tool_call|>", "<|end_of_text|>"),
    reasoning="think",
    vectors=(
        Vector("one call", f"<|tool_call|>[{_ONE}]<|end_of_text|>", _CALLED),
        Vector("white space", f"<|tool_call|> [\n    {_ONE}\n]", _CALLED),
        Vector(
            "several calls",
            f'<|tool_call|>[{_ONE}, {{"name": "ping", "arguments": {{}}}}]',
            (*_CALLED, *call(1, "ping", "{}")),
        ),
        Vector("Granite 3.1's plain marker", f"<tool_call>[{_ONE}]</tool_call>", _CALLED),
        Vector("a call without an array", f"<|tool_call|>{_ONE}", _CALLED),
        Vector("an empty array", "<|tool_call|>[]", ()),
        Vector("text before", f"Sure.\n<|tool_call|>[{_ONE}]", (Text("Sure."), *_CALLED)),
        Vector(
            "brackets and markers in strings",
            '<|tool_call|>[{"name": "search", "arguments": {"query": "]}<|tool_call|>[\\"{"}}]',
            call(0, "search", '{"query": "]}<|tool_call|>[\\"{"}'),
        ),
        Vector(
            "unicode and all types",
            '<|tool_call|>[{"name": "search", '
            '"arguments": {"query": "é東🙂", "limit": 3, "x": [null, true, {"y": 1.5}]}}]',
            call(0, "search", '{"query": "é東🙂", "limit": 3, "x": [null, true, {"y": 1.5}]}'),
        ),
        Vector(
            "reasoning before",
            f"<think>Let me see.</think><|tool_call|>[{_ONE}]",
            (Reasoning("Let me see."), *_CALLED),
        ),
        Vector("malformed", "<|tool_call|>none of them", (Malformed(""), Text("<|tool_call|>none of them"))),
        Vector(
            "malformed: no name",
            '<|tool_call|>[{"arguments": {"a": 1}}]',
            (Malformed(""), Text('<|tool_call|>[{"arguments": {"a": 1}}]')),
        ),
        Vector("cut off in the arguments", f"<|tool_call|>[{_ONE[:-5]}", begun(0, "get_weather", '{"city": "Par')),
    ),
)

VECTORS = [*GRANITE]
