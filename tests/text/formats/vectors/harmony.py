"""Harmony format of gpt-oss."""

from __future__ import annotations

from treadle.text.events import CallArguments, CallStart, Event, Malformed, Reasoning, Text
from treadle.text.formats.reader import ReaderSetup

from .vector import Vector as AnyVector
from .vector import call

SPECIAL = (
    *("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|call|>", "<|return|>"),
    "<|endoftext|>",
)
TOOLS = ReaderSetup("harmony", tools=("weather", "find"))
PARIS = '{"city": "Paris"}'
THOUGHT = "<|channel|>analysis<|message|>Hm, so.<|end|>"
TURN = "<|start|>assistant"


def Vector(name: str, text: str, events: tuple[Event, ...], setup: ReaderSetup = TOOLS) -> AnyVector:
    return AnyVector(name, setup, text, events, SPECIAL)


def to(name: str, *, constrain: str = "<|constrain|>json") -> str:
    return f"<|channel|>commentary to=functions.{name} {constrain}<|message|>"


VECTORS = [
    Vector("answer alone", "<|channel|>final<|message|>Sunny.\n<|return|>", (Text("Sunny.\n"),)),
    Vector(
        "reasoning and answer",
        f"{THOUGHT}{TURN}<|channel|>final<|message|>Sunny.<|return|>",
        (Reasoning("Hm, so."), Text("Sunny.")),
    ),
    Vector(
        "reasoning and call",
        f"{THOUGHT}{TURN}{to('weather')}{PARIS}<|call|>",
        (Reasoning("Hm, so."), *call(0, "weather", PARIS)),
    ),
    Vector(
        "call without its type",
        f"{THOUGHT}{TURN}{to('weather', constrain='json')}{PARIS}",
        (Reasoning("Hm, so."), *call(0, "weather", PARIS)),
    ),
    Vector(
        "recipient in the role",
        f"{THOUGHT}{TURN} to=functions.weather<|channel|>commentary json<|message|>{PARIS}<|call|>",
        (Reasoning("Hm, so."), *call(0, "weather", PARIS)),
    ),
    Vector(
        "recipient in the role that the prompt began",
        f" to=functions.weather<|channel|>commentary <|constrain|>json<|message|>{PARIS}<|call|>",
        call(0, "weather", PARIS),
    ),
    Vector(
        "text for the user in front of a call",
        f"<|channel|>commentary<|message|>I look.<|end|>{TURN}{to('find')}{{}}<|call|>",
        (Text("I look."), *call(0, "find", "{}")),
    ),
    Vector(
        "two calls",
        f"{to('weather')}{PARIS}<|end|>{TURN}{to('find')}<|call|>",
        (*call(0, "weather", PARIS), *call(1, "find", "{}")),
    ),
    Vector(
        "the model's own tool",
        f"<|channel|>analysis to=python code<|message|>print(1)<|end|>{TURN}<|channel|>final<|message|>1",
        (Reasoning("print(1)"), Text("1")),
    ),
    Vector(
        "no tools",
        f"{to('weather')}{PARIS}<|call|>",
        (Reasoning(PARIS),),
        ReaderSetup("harmony"),
    ),
    Vector(
        "end of the reasoning missing",
        "<|channel|>analysis<|message|>a<|channel|>final<|message|>b",
        (Reasoning("a"), Text("b")),
    ),
    Vector("reasoning cut off", "<|channel|>analysis<|message|>a\n<b", (Reasoning("a\n<b"),)),
    Vector("header cut off", f"{THOUGHT}{TURN}<|channel|>comm", (Reasoning("Hm, so."),)),
    Vector(
        "arguments cut off", f'{to("weather")}{{"city": "P', (CallStart(0, "weather"), CallArguments(0, '{"city": "P'))
    ),
    Vector("no channel", f"{TURN}<|message|>Hello", (Text("Hello"),)),
    Vector("text without a message", "Hello", (Text("Hello"),)),
    Vector("broken header", "<|channel|>final\nHello", (Malformed(""), Text("<|channel|>final\nHello"))),
    Vector(
        "arguments that are no JSON", f"{to('find')}a, b<|call|>", (CallStart(0, "find"), Malformed(""), Text("a, b"))
    ),
]
