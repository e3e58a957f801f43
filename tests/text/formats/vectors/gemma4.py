"""Vectors of Gemma 4 and FunctionGemma, after their chat templates."""

from __future__ import annotations

from treadle.text.events import Malformed, Reasoning, Text

from .family import Vector, begun, call, family

_CALLED = call(0, "get_weather", '{"city": "Paris"}')


def _vectors(begin: str, end: str, quote: str) -> tuple[Vector, ...]:
    paris = f"{begin}call:get_weather{{city:{quote}Paris{quote}}}{end}"
    return (
        Vector("one call", paris, _CALLED),
        Vector(
            "several calls",
            f"{paris}{begin}call:ping{{}}{end}",
            (*_CALLED, *call(1, "ping", "{}")),
        ),
        Vector("several calls on lines", f"{paris}\n{begin}call:ping{{}}{end}\n", (*_CALLED, *call(1, "ping", "{}"))),
        Vector("text before", f"I look it up.\n{paris}", (Text("I look it up."), *_CALLED)),
        Vector("text behind", f"{paris}Done.", (*_CALLED, Text("Done."))),
        Vector(
            "braces, quotes, line feeds and backslashes in strings",
            f'{begin}call:write_file{{path:{quote}C:\\x{quote},content:{quote}}},{{"a":\n[{end}{quote}}}{end}',
            call(0, "write_file", f'{{"path": "C:\\\\x", "content": "}},{{\\"a\\":\\n[{end}"}}'),
        ),
        Vector(
            "unicode",
            f"{begin}call:search{{query:{quote}Zürich 東京 🙂{quote}}}{end}",
            call(0, "search", '{"query": "Zürich 東京 🙂"}'),
        ),
        Vector(
            "all types",
            f"{begin}call:search{{exact:true,limit:-3,none:null,score:1.5e3,"
            f"tags:[{quote}a{quote},2,[],{{}}],x:{{y:{{z:{quote}{quote}}}}}}}{end}",
            call(
                0,
                "search",
                '{"exact": true, "limit": -3, "none": null, "score": 1.5e3, '
                '"tags": ["a", 2, [], {}], "x": {"y": {"z": ""}}}',
            ),
        ),
        Vector(
            "white space, quoted keys and JSON strings",
            f'{begin}call:search{{ {quote}query{quote} : "a\\nb" , "limit": 3 }}{end}',
            call(0, "search", '{"query": "a\\nb", "limit": 3}'),
        ),
        Vector(
            "a bare string",
            f"{begin}call:search{{query:New York,limit:3rd}}{end}",
            call(0, "search", '{"query": "New York", "limit": "3rd"}'),
        ),
        Vector("malformed: no call", f"{begin}Paris{end}?", (Malformed(""), Text(f"{begin}Paris{end}?"))),
        Vector(
            "malformed arguments",
            f"{begin}call:ping(a=1){end}",
            (Malformed(""), Text(f"{begin}call:ping(a=1){end}")),
        ),
        Vector(
            "malformed: brackets",
            f"{begin}call:search{{tags:[1}} and",
            (*begun(0, "search", '{"tags": [1'), Malformed(""), Text("} and")),
        ),
        Vector("cut off in the name", f"{begin}call:get_w", (Malformed(""), Text(f"{begin}call:get_w"))),
        Vector(
            "cut off in a string",
            f"{begin}call:get_weather{{city:{quote}Par",
            begun(0, "get_weather", '{"city": "Par'),
        ),
        Vector("cut off in a number", f"{begin}call:search{{limit:3,x:1", begun(0, "search", '{"limit": 3, "x": 1')),
        Vector("no call", "Just call:text{x:1}.", (Text("Just call:text{x:1}."),)),
    )


GEMMA4 = family(
    "gemma4",
    special=("<|tool_call>", "<tool_call|>", '<|"|>', "<|channel>", "<channel|>", "<|tool_response>", "<turn|>"),
    reasoning="gemma4",
    vectors=(
        *_vectors("<|tool_call>", "<tool_call|>", '<|"|>'),
        Vector(
            "reasoning before",
            '<|channel>thought\nLet me see.<channel|><|tool_call>call:get_weather{city:<|"|>Paris<|"|>}<tool_call|>',
            (Reasoning("Let me see."), *_CALLED),
        ),
    ),
)

FUNCTIONGEMMA = family(
    "functiongemma",
    special=("<start_function_call>", "<end_function_call>", "<escape>", "<end_of_turn>"),
    reasoning="think",
    vectors=(
        *_vectors("<start_function_call>", "<end_function_call>", "<escape>"),
        Vector(
            "reasoning before, as fine-tuned models write it",
            "<think>Let me see.</think>"
            "<start_function_call>call:get_weather{city:<escape>Paris<escape>}<end_function_call>",
            (Reasoning("Let me see."), *_CALLED),
        ),
    ),
)

VECTORS = [*GEMMA4, *FUNCTIONGEMMA]
