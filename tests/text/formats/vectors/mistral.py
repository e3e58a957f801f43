"""Vectors of Mistral's formats, after mistral-common's tokenizers v3, v11 and v13."""

from __future__ import annotations

from treadle.text.events import Malformed, Reasoning, Text

from .family import Vector, begun, call, family

_PARIS = '{"city": "Paris"}'

MISTRAL = family(
    "mistral",
    special=("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[THINK]", "[/THINK]", "</s>"),
    reasoning="mistral",
    vectors=(
        Vector("one call", f"[TOOL_CALLS]get_weather[ARGS]{_PARIS}</s>", call(0, "get_weather", _PARIS)),
        Vector(
            "a call with an id",
            f"[TOOL_CALLS]get_weather[CALL_ID]abcDEF123[ARGS]{_PARIS}",
            call(0, "get_weather", _PARIS, "abcDEF123"),
        ),
        Vector(
            "several calls",
            f'[TOOL_CALLS]get_weather[ARGS]{_PARIS}[TOOL_CALLS]search[ARGS]{{"query": "x", "limit": 3}}',
            (*call(0, "get_weather", _PARIS), *call(1, "search", '{"query": "x", "limit": 3}')),
        ),
        Vector(
            "several calls with ids",
            f"[TOOL_CALLS]get_weather[CALL_ID]000000001[ARGS]{_PARIS}[TOOL_CALLS]ping[CALL_ID]000000002[ARGS]{{}}",
            (*call(0, "get_weather", _PARIS, "000000001"), *call(1, "ping", "{}", "000000002")),
        ),
        Vector(
            "text before",
            f"I look it up.\n[TOOL_CALLS]get_weather[ARGS]{_PARIS}",
            (Text("I look it up."), *call(0, "get_weather", _PARIS)),
        ),
        Vector(
            "no marker before the arguments",
            f"[TOOL_CALLS]get_weather{_PARIS}",
            call(0, "get_weather", _PARIS),
        ),
        Vector(
            "braces, quotes and markers in strings",
            r'[TOOL_CALLS]write_file[ARGS]{"path": "a\\b", "content": "} ]\"{ [TOOL_CALLS]ping[ARGS]{}"}',
            call(0, "write_file", r'{"path": "a\\b", "content": "} ]\"{ [TOOL_CALLS]ping[ARGS]{}"}'),
        ),
        Vector(
            "unicode",
            '[TOOL_CALLS]search[ARGS]{"query": "Zürich 東京 🙂 \\u00e9"}',
            call(0, "search", '{"query": "Zürich 東京 🙂 \\u00e9"}'),
        ),
        Vector(
            "all types",
            '[TOOL_CALLS]write_file[ARGS]{"a": [1, -2.5e3, true, null, {"b": {}}], "c": []}',
            call(0, "write_file", '{"a": [1, -2.5e3, true, null, {"b": {}}], "c": []}'),
        ),
        Vector(
            "reasoning before",
            f"[THINK]Let me see.[/THINK]Sure.[TOOL_CALLS]get_weather[ARGS]{_PARIS}",
            (Reasoning("Let me see."), Text("Sure."), *call(0, "get_weather", _PARIS)),
        ),
        Vector(
            "malformed: no arguments",
            "[TOOL_CALLS]is what I would write.",
            (Malformed(""), Text("[TOOL_CALLS]is what I would write.")),
        ),
        Vector(
            "malformed arguments",
            '[TOOL_CALLS]get_weather[ARGS]{"city": Paris} and so on',
            (*begun(0, "get_weather", '{"city": '), Malformed(""), Text("Paris} and so on")),
        ),
        Vector("cut off in the name", "[TOOL_CALLS]get_wea", (Malformed(""), Text("[TOOL_CALLS]get_wea"))),
        Vector(
            "cut off in the arguments",
            '[TOOL_CALLS]get_weather[ARGS]{"city": "Par',
            begun(0, "get_weather", '{"city": "Par'),
        ),
        Vector("no call", "Just text [1] {2}.", (Text("Just text [1] {2}."),)),
    ),
)

_ARRAY = '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Paris"}'

MISTRAL_ARRAY = family(
    "mistral_array",
    special=("[TOOL_CALLS]", "</s>"),
    vectors=(
        Vector("one call", f"{_ARRAY}}}]</s>", call(0, "get_weather", _PARIS)),
        Vector(
            "several calls with ids behind the arguments",
            _ARRAY + ', "id": "abcDEF123"}, {"name": "ping", "arguments": {}, "id": "000000002"}]',
            (*call(0, "get_weather", _PARIS), *call(1, "ping", "{}")),
        ),
        Vector(
            "the id first, the name last",
            '[TOOL_CALLS][{"id": "abcDEF123", "arguments": {"city": "Paris"}, "name": "get_weather"}]',
            call(0, "get_weather", _PARIS, "abcDEF123"),
        ),
        Vector("text before", f"Sure: {_ARRAY}}}]", (Text("Sure:"), *call(0, "get_weather", _PARIS))),
        Vector(
            "braces and markers in strings",
            '[TOOL_CALLS] [{"name": "search", "arguments": {"query": "}]}, [TOOL_CALLS] [{\\"name\\": 1}]"}}]',
            call(0, "search", '{"query": "}]}, [TOOL_CALLS] [{\\"name\\": 1}]"}'),
        ),
        Vector(
            "unicode and all types",
            '[TOOL_CALLS] [{"name": "search", '
            '"arguments": {"query": "é東🙂", "limit": -1, "exact": false, "tags": [null]}}]',
            call(0, "search", '{"query": "é東🙂", "limit": -1, "exact": false, "tags": [null]}'),
        ),
        Vector(
            "arguments as a string",
            '[TOOL_CALLS] [{"name": "get_weather", "arguments": "{\\"city\\": \\"Paris\\"}"}]',
            call(0, "get_weather", _PARIS),
        ),
        Vector(
            "malformed: numbers",
            "[TOOL_CALLS] [1, 2]",
            (Malformed(""), Text("[TOOL_CALLS] [1, 2]")),
        ),
        Vector(
            "the second call is malformed",
            _ARRAY + '}, {"nom": "x"}] really',
            (*call(0, "get_weather", _PARIS), Malformed(""), Text('}, {"nom": "x"}] really')),
        ),
        Vector("cut off in the arguments", _ARRAY[:-5], begun(0, "get_weather", '{"city": "Pa')),
        Vector("cut off behind a call", _ARRAY + "}, ", call(0, "get_weather", _PARIS)),
        Vector("the newer format", f"[TOOL_CALLS]get_weather{_PARIS}", call(0, "get_weather", _PARIS)),
    ),
)

VECTORS = [*MISTRAL, *MISTRAL_ARRAY]
