"""Vectors of Phi-4-mini, after its special tokens and the prompt for `functools`."""

from __future__ import annotations

from treadle.text.events import Malformed, Text

from . import vector
from .family import Vector, begun, call, family

_PARIS = '{"city": "Paris"}'
_CALLED = call(0, "get_weather", _PARIS)
_ONE = f'{{"name": "get_weather", "arguments": {_PARIS}}}'
_PING = '{"name": "ping", "arguments": {}}'
_BEGIN, _END = "<|tool_call|>", "<|/tool_call|>"

_SHARED = (
    Vector("one call", f"{_BEGIN}{_ONE}{_END}<|end|>", _CALLED),
    Vector("a list", f"{_BEGIN}[{_ONE}]{_END}", _CALLED),
    Vector("several calls", f"{_BEGIN}{_ONE}{_END}{_BEGIN}{_PING}{_END}", (*_CALLED, *call(1, "ping", "{}"))),
    Vector("several in a list", f"{_BEGIN}[{_ONE}, {_PING}]{_END}", (*_CALLED, *call(1, "ping", "{}"))),
    Vector("functools", f"functools[{_ONE}]", _CALLED),
    Vector("functools, several", f"functools[\n{_ONE},\n{_PING}\n]<|end|>", (*_CALLED, *call(1, "ping", "{}"))),
    Vector("text before", f"Sure.\n{_BEGIN}{_ONE}{_END}", (Text("Sure."), *_CALLED)),
    Vector("text before functools", f"Sure.\nfunctools[{_ONE}]", (Text("Sure."), *_CALLED)),
    Vector("no closing marker", f"{_BEGIN}{_ONE}", _CALLED),
    Vector(
        "markers in strings",
        f'{_BEGIN}{{"name": "search", "arguments": {{"query": "{_END}functools[{_BEGIN}\\"}}"}}}}{_END}',
        call(0, "search", f'{{"query": "{_END}functools[{_BEGIN}\\"}}"}}'),
    ),
    Vector("the word alone", "Use functools, or functools.", (Text("Use functools, or functools."),)),
    Vector("malformed", "functools[0] is a call", (Malformed(""), Text("functools[0] is a call"))),
    Vector("malformed behind the marker", f"{_BEGIN}none", (Malformed(""), Text(f"{_BEGIN}none"))),
    Vector("cut off in the arguments", f"{_BEGIN}{_ONE[:-5]}", begun(0, "get_weather", '{"city": "Par')),
    Vector("cut off in functools", f"functools[{_ONE[:-5]}", begun(0, "get_weather", '{"city": "Par')),
)


def _family(name: str, vectors: tuple[Vector, ...]) -> list[vector.Vector]:
    return family(name, vectors, special=(_BEGIN, _END, "<|end|>"))


VECTORS = [*_family("phi4_mini", _SHARED), *_family("phi4_mini_functools", _SHARED[:6])]  # the parser is the same
