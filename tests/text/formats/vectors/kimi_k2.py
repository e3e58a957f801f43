"""Vectors of Kimi K2, after the tool-calling guide of moonshotai/Kimi-K2-Instruct."""

from __future__ import annotations

from treadle.text.events import Malformed, Reasoning, Text

from .family import Vector, begun, call, family

_BEGIN, _END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
_PARIS = '{"city": "Paris"}'
_X = '{"query": "x"}'
_NESTED = '{"query": "}}<|tool_call_end|>{ \\\\\\" "}'
_ALL = '{"query": "é東🙂", "score": 1.5, "exact": true, "x": {"y": null}}'


def _call(call_id: str, arguments: str) -> str:
    return f"<|tool_call_begin|>{call_id}<|tool_call_argument_begin|>{arguments}<|tool_call_end|>"


_WEATHER = _call("functions.get_weather:0", _PARIS)
_CALLED = call(0, "get_weather", _PARIS, "functions.get_weather:0")

KIMI_K2 = family(
    "kimi_k2",
    special=(
        *(_BEGIN, _END, "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>", "<|im_end|>"),
    ),
    reasoning="think",
    vectors=(
        Vector("one call", f"{_BEGIN}{_WEATHER}{_END}<|im_end|>", _CALLED),
        Vector(
            "several calls",
            f"{_BEGIN}{_WEATHER}{_call('functions.search:1', _X)}{_END}",
            (*_CALLED, *call(1, "search", '{"query": "x"}', "functions.search:1")),
        ),
        Vector("white space between markers", f"{_BEGIN}\n{_WEATHER}\n{_END}\n", _CALLED),
        Vector("text before", f"I look it up.{_BEGIN}{_WEATHER}{_END}", (Text("I look it up."), *_CALLED)),
        Vector("a call without a section", f"Sure. {_WEATHER}", (Text("Sure."), *_CALLED)),
        Vector(
            "braces and markers in strings",
            f"{_BEGIN}{_call('functions.search:7', _NESTED)}{_END}",
            call(0, "search", _NESTED, "functions.search:7"),
        ),
        Vector(
            "unicode and all types",
            f"{_BEGIN}{_call('functions.search:0', _ALL)}",
            call(0, "search", _ALL, "functions.search:0"),
        ),
        Vector(
            "a name with a dot, no prefix",
            f"{_BEGIN}{_call('web.ping:3', '{}')}{_END}",
            call(0, "web.ping", "{}", "web.ping:3"),
        ),
        Vector(
            "no arguments",
            f"{_BEGIN}{_call('functions.ping:0', '')}{_END}",
            call(0, "ping", "{}", "functions.ping:0"),
        ),
        Vector(
            "reasoning before",
            f"<think>Let me see.</think>{_BEGIN}{_WEATHER}{_END}",
            (Reasoning("Let me see."), *_CALLED),
        ),
        Vector(
            "a call ends the reasoning",
            f"Let me see.{_BEGIN}{_WEATHER}{_END}",
            (Reasoning("Let me see."), *_CALLED),
            opened=True,
        ),
        Vector("malformed: text in the section", f"{_BEGIN}Paris?", (Malformed(""), Text(f"{_BEGIN}Paris?"))),
        Vector(
            "malformed arguments",
            f"{_BEGIN}<|tool_call_begin|>functions.ping:0<|tool_call_argument_begin|>[1]",
            (*begun(0, "ping", "", "functions.ping:0"), Malformed(""), Text("[1]")),
        ),
        Vector(
            "cut off in the id",
            f"{_BEGIN}<|tool_call_begin|>funct",
            (Malformed(""), Text(f"{_BEGIN}<|tool_call_begin|>funct")),
        ),
        Vector(
            "cut off in the arguments",
            f'{_BEGIN}{_WEATHER}<|tool_call_begin|>functions.search:1<|tool_call_argument_begin|>{{"que',
            (*_CALLED, *begun(1, "search", '{"que', "functions.search:1")),
        ),
        Vector("no call", "Just <text>.", (Text("Just <text>."),)),
    ),
)

VECTORS = [*KIMI_K2]
