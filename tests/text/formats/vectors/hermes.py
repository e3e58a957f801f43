"""Hermes format: answers as Qwen2.5, Qwen3 and Hermes models write them."""

from __future__ import annotations

from treadle.text.events import CallArguments, CallStart, Malformed, Reasoning, Text
from treadle.text.formats.reader import ReaderSetup
from treadle.text.formats.reasoning import MARKERS

from .vector import Vector, call

PLAIN = ReaderSetup("hermes", tools=("weather", "find"))
THINKING = ReaderSetup("hermes", MARKERS["think"], tools=("weather", "find"))
OPENED = ReaderSetup("hermes", MARKERS["think"], opened=True, tools=("weather", "find"))
PARIS = '{"city": "Paris"}'


def block(body: str) -> str:
    return f"<tool_call>\n{body}\n</tool_call>"


VECTORS = [
    Vector("text alone", PLAIN, "It is sunny in Paris. \n", (Text("It is sunny in Paris. \n"),)),
    Vector("white space alone", PLAIN, " \n", (Text(" \n"),)),
    Vector("one call", PLAIN, block(f'{{"name": "weather", "arguments": {PARIS}}}'), call(0, "weather", PARIS)),
    Vector(
        "text, two calls, text",
        PLAIN,
        f'Let me see.\n{block(f"""{{"name": "weather", "arguments": {PARIS}}}""")}\n'
        f'{block("""{"name": "find", "arguments": {}}""")}\nDone.',
        (Text("Let me see."), *call(0, "weather", PARIS), *call(1, "find", "{}"), Text("\nDone.")),
    ),
    Vector(
        "arguments before the name",
        PLAIN,
        block(f'{{"arguments": {PARIS}, "id": "7", "name": "weather"}}'),
        call(0, "weather", PARIS, call_id="7"),
    ),
    Vector("no arguments", PLAIN, block('{"name": "find"}'), call(0, "find", "{}")),
    Vector("null arguments", PLAIN, block('{"name": "find", "arguments": null}'), call(0, "find", "{}")),
    Vector(
        "arguments in a string",
        PLAIN,
        block('{"name": "weather", "arguments": "{\\"city\\": \\"Paris\\"}"}'),
        call(0, "weather", PARIS),
    ),
    Vector(
        "markers, brackets and escapes in a string",
        PLAIN,
        block('{"name": "find", "arguments": {"q": "</tool_call> <tool_call> }\\" \\u00e9\\\\"}}'),
        call(0, "find", '{"q": "</tool_call> <tool_call> }\\" \\u00e9\\\\"}'),
    ),
    Vector(
        "mended JSON",
        PLAIN,
        block('{"name": "find", "arguments": {"q": "a\nb \\d \\u12", "t": True, "n": None, "f": False}}'),
        call(0, "find", '{"q": "a\\nb \\\\d \\\\u12", "t": true, "n": null, "f": false}'),
    ),
    Vector(
        "half a surrogate pair in a name, an id, and arguments in a string",
        PLAIN,
        block(
            '{"id": "\\udc00\\ud83d\\ude00", "name": "find\\ud83d", "arguments": "{\\"\\ud800\\": \\"\\\\ud800\\"}"}'
        ),
        call(0, "find\ufffd", '{"\ufffd": "\\ufffd"}', call_id="\ufffd\U0001f600"),
    ),
    Vector(
        "all of JSON",
        PLAIN,
        block('{"name": "find", "arguments": {"a": [1, -2.5e+3, [], {}, [{"b": [[]]}], "é😀"], "c" : {"d":null} }}'),
        call(0, "find", '{"a": [1, -2.5e+3, [], {}, [{"b": [[]]}], "é😀"], "c" : {"d":null} }'),
    ),
    Vector(
        "outer brace missing",
        PLAIN,
        f'<tool_call>\n{{"name": "weather", "arguments": {PARIS}\n</tool_call>',
        call(0, "weather", PARIS),
    ),
    Vector(
        "closing marker missing",
        PLAIN,
        f'<tool_call>{{"name": "weather", "arguments": {PARIS}}}',
        call(0, "weather", PARIS),
    ),
    Vector(
        "closing marker cut off",
        PLAIN,
        f'<tool_call>{{"name": "weather", "arguments": {PARIS}}}\n</tool_c',
        call(0, "weather", PARIS),
    ),
    Vector("unknown function", PLAIN, block('{"name": "rm", "arguments": {}}'), call(0, "rm", "{}")),
    Vector(
        "cut in the arguments",
        PLAIN,
        '<tool_call>{"name": "weather", "arguments": {"city": "Par',
        (CallStart(0, "weather"), CallArguments(0, '{"city": "Par')),
    ),
    Vector(
        "cut before the name",
        PLAIN,
        'Hm.\n<tool_call>{"na',
        (Text("Hm."), Malformed(""), Text('\n<tool_call>{"na')),
    ),
    Vector("part of a marker at the end", PLAIN, "a <tool_", (Text("a <tool_"),)),
    Vector(
        "no JSON",
        PLAIN,
        "<tool_call>weather(Paris)</tool_call> so",
        (Malformed(""), Text("<tool_call>weather(Paris)</tool_call> so")),
    ),
    Vector("no name", PLAIN, block('{"x": 1}'), (Malformed(""), Text(block('{"x": 1}')))),
    Vector("empty name", PLAIN, block('{"name": ""}'), (Malformed(""), Text(block('{"name": ""}')))),
    Vector(
        "arguments are a list",
        PLAIN,
        block('{"name": "find", "arguments": [1]}'),
        (Malformed(""), Text(block('{"name": "find", "arguments": [1]}'))),
    ),
    Vector(
        "broken arguments",
        PLAIN,
        block('{"name": "find", "arguments": {"a": 1,,}}'),
        (CallStart(0, "find"), CallArguments(0, '{"a": 1,'), Malformed(""), Text(",}}\n</tool_call>")),
    ),
    Vector(
        "marker twice",
        PLAIN,
        f'<tool_call>\n{block("""{"name": "find"}""")}',
        (Malformed(""), Text("<tool_call>"), *call(0, "find", "{}")),
    ),
    Vector(
        "reasoning, text, call",
        THINKING,
        f'<think>\nHm, <b>\n</think>\n\nYes.\n{block("""{"name": "find"}""")}',
        (Reasoning("Hm, <b>"), Text("Yes."), *call(0, "find", "{}")),
    ),
    Vector("reasoning is off", THINKING, "Yes </think> <think>", (Text("Yes </think> <think>"),)),
    Vector("empty reasoning", THINKING, "<think>\n\n</think>\n\nYes", (Text("Yes"),)),
    Vector("opened by the prompt", OPENED, "\nHm\n</think>\n\n Yes", (Reasoning("Hm"), Text(" Yes"))),
    Vector("reasoning never closed", OPENED, "Hm\n\nso\n", (Reasoning("Hm\n\nso\n"),)),
    Vector(
        "reasoning never closed, then a call",
        THINKING,
        f'<think>Hm\n{block("""{"name": "find"}""")}\nso',
        (Reasoning("Hm"), *call(0, "find", "{}"), Text("so")),
    ),
    Vector(
        "call in the reasoning, closed behind it",
        OPENED,
        f'Hm\n{block("""{"name": "find"}""")}\n</think>\nso',
        (Reasoning("Hm"), *call(0, "find", "{}"), Text("so")),
    ),
    Vector(
        "markers quoted in the reasoning",
        OPENED,
        f'I write <tool_call> or {block("""{"name": "x"}""")} </think> so',
        (Reasoning(f'I write <tool_call> or {block("""{"name": "x"}""")}'), Text("so")),
    ),
    Vector(
        "reasoning behind a call",
        THINKING,
        f'{block("""{"name": "find"}""")}\n<think>Hm</think>so',
        (*call(0, "find", "{}"), Reasoning("Hm"), Text("so")),
    ),
    Vector(
        "special tokens that are no markers",
        PLAIN,
        '<|im_start|>Yes<|im_end|>\n<tool_call><|x|>{"name": "find"}</tool_call><|im_end|>',
        (Text("Yes"), *call(0, "find", "{}")),
        special=("<|im_start|>", "<|im_end|>", "<|x|>"),
    ),
    Vector(
        "reasoning without tools",
        ReaderSetup(reasoning=MARKERS["think"]),
        "<think>a\n</think>\nb \n",
        (Reasoning("a"), Text("b \n")),
    ),
    Vector("no reader of calls", ReaderSetup(), "<tool_call>{}", (Text("<tool_call>{}"),)),
]
