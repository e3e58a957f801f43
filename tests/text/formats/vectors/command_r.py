"""Vectors of Command R7B, after its chat template."""

from __future__ import annotations

from treadle.text.events import Malformed, Reasoning, Text

from .family import Vector, begun, call, family

_PARIS = '{"city": "Paris"}'
_CALLED = call(0, "get_weather", _PARIS)
_BEGIN, _END = "<|START_ACTION|>", "<|END_ACTION|>"
_MARKERS = f'{{"query": "{_END}]}} {_BEGIN}"}}'
_THOUGHT = "<|START_THINKING|>I look it up.<|END_THINKING|>"


def _one(name: str, arguments: str, number: int = 0) -> str:
    return f'{{"tool_call_id": "{number}", "tool_name": "{name}", "parameters": {arguments}}}'


_PARIS_CALL = _one("get_weather", _PARIS)

COMMAND_R = family(
    "command_r",
    special=(
        *(_BEGIN, _END, "<|START_THINKING|>", "<|END_THINKING|>", "<|START_RESPONSE|>", "<|END_RESPONSE|>"),
        "<|END_OF_TURN_TOKEN|>",
    ),
    reasoning="command_r",
    vectors=(
        Vector(
            "reasoning and a call",
            f"{_THOUGHT}{_BEGIN}[\n    {_PARIS_CALL}\n]{_END}<|END_OF_TURN_TOKEN|>",
            (Reasoning("I look it up."), *_CALLED),
        ),
        Vector(
            "several calls",
            f"{_BEGIN}[\n    {_PARIS_CALL},\n    {_one('ping', '{}', 1)}\n]{_END}",
            (*_CALLED, *call(1, "ping", "{}")),
        ),
        Vector("an answer", "<|START_RESPONSE|>It is sunny.<|END_RESPONSE|>", (Text("It is sunny."),)),
        Vector(
            "markers in strings",
            f"{_BEGIN}[{_one('search', _MARKERS)}]{_END}",
            call(0, "search", _MARKERS),
        ),
        Vector("no closing marker", f"{_BEGIN}[{_PARIS_CALL}]", _CALLED),
        Vector("malformed", f"{_BEGIN}none", (Malformed(""), Text(f"{_BEGIN}none"))),
        Vector("cut off in the arguments", f"{_BEGIN}[{_PARIS_CALL[:-4]}", begun(0, "get_weather", '{"city": "Pari')),
    ),
)

VECTORS = [*COMMAND_R]
