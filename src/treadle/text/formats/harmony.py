"""Harmony format of gpt-oss: messages with a channel, `<|channel|>analysis<|message|>...<|end|>`.

The channel "analysis" is reasoning, "final" is the answer, and "commentary" is text for the user, or with a recipient
(`to=functions.name`) a call, whose message is its arguments. The recipient may stand before or behind the channel.
Messages to the model's own browser or Python are reasoning.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from . import lark
from .base import CallContext, ToolFormat, ToolSpec
from .json_text import pass_object, skip_space
from .reasoning import ReasoningMarkers
from .scanner import Markers, Steps

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>")
FUNCTIONS = "functions."
RECIPIENT = "to="
_HEADER = re.compile(r"[^<\n]*")
_BODY_ENDS = Markers(*ENDS, START, CHANNEL)


class Harmony(ToolFormat):
    """Messages of gpt-oss models. The grammars allow reasoning in front of the last one, unless it has a budget."""

    name = "harmony"
    starts = (CHANNEL, START, *ENDS)
    bare_starts = (RECIPIENT,)
    special = (MESSAGE, CONSTRAIN)
    own_reasoning = True
    reasoning = ReasoningMarkers(f"{CHANNEL}analysis{MESSAGE}", "<|end|>", anywhere=True)
    answer_start = f"{CHANNEL}final"
    turn_start = f"{START}assistant"

    def detect(self, template: str) -> bool:
        return CHANNEL in template and MESSAGE in template

    def read(self, context: CallContext, start: str) -> Steps[None]:
        marker: str | None = start
        while marker is not None and marker not in ENDS:
            marker = yield from _read_message(context, marker)

    def calls(self, tools: Sequence[ToolSpec], grammar: lark.Grammar, *, several: bool) -> str:
        """Return a Lark expression of one call: the model ends its turn behind each."""
        begin, middle = grammar.text(f"{CHANNEL}commentary to={FUNCTIONS}"), grammar.text(f" {CONSTRAIN}json{MESSAGE}")
        bodies = (f"{lark.literal(tool.name)} {middle} {grammar.arguments(tool)}" for tool in tools)
        return f"{begin} {lark.any_of(bodies)}"

    def whole_answer(self, end: str, grammar: lark.Grammar, *, reasons: bool, opened: bool = False) -> str:
        """Return a Lark expression of the last message, with `reasons` behind any number of messages of reasoning."""
        turn = grammar.text(f"{START}assistant")
        if not reasons:
            return f"({turn})? {end}"
        reasoning = grammar.text(f"{CHANNEL}analysis{MESSAGE}")
        text = grammar.text_until("<|end|>", (*ENDS, START, CHANNEL))
        begin = f"{text} {turn}" if opened else f"({turn})?"
        return f"{begin} ({reasoning} {text} {turn})* {end}"

    def answer_header(self, grammar: lark.Grammar) -> str:
        """Return a Lark expression of the final channel's header. Models name the type of JSON in it."""
        typed = f'" "? {grammar.text(f"{CONSTRAIN}json")}'
        return f"{grammar.text(self.answer_start)} ({typed})? {grammar.text(MESSAGE)}"

    def triggers(self, tools: Sequence[ToolSpec]) -> tuple[str, ...]:
        return (f"{CHANNEL}commentary to={FUNCTIONS}",)


def _read_message(context: CallContext, marker: str) -> Steps[str | None]:
    """Read the message whose header begins with `marker`. Return the marker behind it; None at the answer's end."""
    scan, header, channel = context.scan, marker if marker == RECIPIENT else "", ""
    while marker != MESSAGE:
        part = yield from scan.take_run(_HEADER)
        if not (yield from scan.peek()):
            return None
        header += f" {part}" if marker != RECIPIENT else part
        channel = part.split()[0] if marker == CHANNEL and part.strip() else channel
        marker = yield from scan.expect(MESSAGE, CONSTRAIN, CHANNEL)
    recipient = next((word.removeprefix(RECIPIENT) for word in header.split() if word.startswith(RECIPIENT)), "")
    scan.forget()
    if recipient.startswith(FUNCTIONS) and context.out.has_tools:
        return (yield from _read_call(context, recipient.removeprefix(FUNCTIONS)))
    if channel == "analysis" or recipient:
        return (yield from _read_reasoning(context))
    return (yield from _pass_body(context, context.out.text))


def _read_reasoning(context: CallContext) -> Steps[str | None]:
    context.out.begin_reasoning()
    marker = yield from _pass_body(context, context.out.reasoning)
    if marker is not None:
        context.out.end_reasoning()
    return marker


def _pass_body(context: CallContext, sink: Callable[[str], None]) -> Steps[str | None]:
    def write(text: str) -> None:
        context.scan.forget()
        sink(text)

    return (yield from context.scan.pass_until(_BODY_ENDS, write))


def _read_call(context: CallContext, name: str) -> Steps[str | None]:
    scan, out = context.scan, context.out
    out.call_start(name)
    yield from skip_space(scan)
    end = yield from scan.accept(*ENDS)
    if end is None:
        yield from pass_object(scan, out.arguments)
    else:
        out.arguments("{}")
    out.call_end()
    yield from scan.skip_space()
    return end or (yield from scan.accept(*ENDS, START, CHANNEL))
