"""Vectors of DeepSeek's formats, after the chat templates of DeepSeek-V3-0324 and DeepSeek-V3.1."""

from __future__ import annotations

from treadle.text.events import Malformed, Reasoning, Text

from .family import Vector, begun, call, family

_BEGIN, _END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_CALL, _SEP, _CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
_EOS = "<｜end▁of▁sentence｜>"
_PARIS = '{"city": "Paris"}'
_ALL = '{"query": "é東🙂", "limit": -3, "score": 0.5, "exact": false, "tags": ["a", null], "x": {"y": {}}}'
_NESTED = '{"query": "}}\\n```<｜tool▁call▁end｜> \\\\\\" {"}'


def _v3(name: str, arguments: str) -> str:
    return f"{_CALL}function{_SEP}{name}\n```json\n{arguments}\n```{_CALL_END}"


def _v31(name: str, arguments: str) -> str:
    return f"{_CALL}{name}{_SEP}{arguments}{_CALL_END}"


_FENCED = f"```json\n{_PARIS}\n```"
_CALLED = call(0, "get_weather", _PARIS)

V3 = family(
    "deepseek_v3",
    special=(_BEGIN, _END, _CALL, _SEP, _CALL_END, _EOS),
    reasoning="think",
    vectors=(
        Vector("one call", f"{_BEGIN}{_v3('get_weather', _PARIS)}{_END}{_EOS}", _CALLED),
        Vector(
            "several calls",
            f"{_BEGIN}{_v3('get_weather', _PARIS)}\n{_v3('ping', '{}')}{_END}",
            (*_CALLED, *call(1, "ping", "{}")),
        ),
        Vector("text before", f"I look.\n{_BEGIN}{_v3('get_weather', _PARIS)}{_END}", (Text("I look."), *_CALLED)),
        Vector("fences and markers in strings", f"{_BEGIN}{_v3('search', _NESTED)}{_END}", call(0, "search", _NESTED)),
        Vector("unicode and all types", f"{_BEGIN}{_v3('search', _ALL)}{_END}", call(0, "search", _ALL)),
        Vector("no end of the section", f"{_BEGIN}{_v3('get_weather', _PARIS)}", _CALLED),
        Vector("V3.1's form", f"{_BEGIN}{_v31('get_weather', _PARIS)}{_END}", _CALLED),
        Vector(
            "reasoning before",
            f"Let me see.</think>\n\n{_BEGIN}{_v3('get_weather', _PARIS)}{_END}",
            (Reasoning("Let me see."), *_CALLED),
            opened=True,
        ),
        Vector(
            "malformed: no separator",
            f"{_BEGIN}{_CALL}f{_CALL_END}",
            (Malformed(""), Text(f"{_BEGIN}{_CALL}f{_CALL_END}")),
        ),
        Vector(
            "malformed arguments",
            f"{_BEGIN}{_CALL}function{_SEP}ping\n```json\n{{x}}\n```",
            (*begun(0, "ping", "{"), Malformed(""), Text("x}\n```")),
        ),
        Vector("cut off in the name", f"{_BEGIN}{_CALL}function{_SEP}get", begun(0, "get")),
        Vector(
            "cut off in the arguments",
            f'{_BEGIN}{_CALL}function{_SEP}search\n```json\n{{"query": "a\\',
            begun(0, "search", '{"query": "a'),
        ),
    ),
)

V31 = family(
    "deepseek_v31",
    special=(_BEGIN, _END, _CALL, _SEP, _CALL_END, _EOS),
    reasoning="think",
    vectors=(
        Vector("one call", f"{_BEGIN}{_v31('get_weather', _PARIS)}{_END}{_EOS}", _CALLED),
        Vector(
            "several calls",
            f"{_BEGIN}{_v31('get_weather', _PARIS)}{_v31('search', _ALL)}{_END}",
            (*_CALLED, *call(1, "search", _ALL)),
        ),
        Vector("text before", f"I look.{_BEGIN}{_v31('get_weather', _PARIS)}{_END}", (Text("I look."), *_CALLED)),
        Vector("markers in strings", f"{_BEGIN}{_v31('search', _NESTED)}{_END}", call(0, "search", _NESTED)),
        Vector("no arguments", f"{_BEGIN}{_v31('ping', '')}{_END}", call(0, "ping", "{}")),
        Vector("V3's form", f"{_BEGIN}{_v3('get_weather', _PARIS)}{_END}", _CALLED),
        Vector(
            "arguments in a block of Markdown",
            f"{_BEGIN}{_v31('get_weather', _FENCED)}{_END}",
            _CALLED,
        ),
        Vector(
            "reasoning before",
            f"<think>Let me see.</think>{_BEGIN}{_v31('get_weather', _PARIS)}{_END}",
            (Reasoning("Let me see."), *_CALLED),
        ),
        Vector("malformed: text in the section", f"{_BEGIN}none{_END}", (Malformed(""), Text(f"{_BEGIN}none{_END}"))),
        Vector(
            "the second call is malformed",
            f"{_BEGIN}{_v31('get_weather', _PARIS)}and that is it",
            (*_CALLED, Text("and that is it")),
        ),
        Vector("cut off in the arguments", f'{_BEGIN}{_CALL}ping{_SEP}{{"a": [1, 2', begun(0, "ping", '{"a": [1, 2')),
    ),
)

VECTORS = [*V3, *V31]
