"""Base of the tool-call formats: tools and the choice among them, and the parser and grammar that each format gives."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import msgspec

from ...core.messages import Constraint
from . import lark
from .reasoning import ReasoningMarkers
from .scanner import Scanner, Steps
from .writer import EventWriter

NONE, AUTO, REQUIRED = "none", "auto", "required"


class ToolSpec(msgspec.Struct, frozen=True, omit_defaults=True):
    """A function that the model may call. `parameters` is the JSON schema of its arguments, an object.
    `text_grammar` is the Lark grammar of a text that is its one parameter, `input`; empty for others."""

    name: str
    description: str = ""
    parameters: dict[str, Any] = {}
    strict: bool = False
    text_grammar: str = ""


class ToolChoice(msgspec.Struct, frozen=True, omit_defaults=True):
    """Whether the answer calls tools: `mode` is "none", "auto" or "required". With `names` only these may be called: a
    named tool is "required" with its name, allowed_tools are a mode with several. `single`: it is called exactly
    once."""

    mode: str = AUTO
    names: tuple[str, ...] = ()
    single: bool = False

    def allowed(self, tools: Sequence[ToolSpec]) -> tuple[ToolSpec, ...]:
        """Return the tools that may be called, in their order."""
        if self.mode == NONE:
            return ()
        return tuple(tool for tool in tools if not self.names or tool.name in self.names)


class CallContext:
    """State that a parser of calls works on: the text, the writer of events, and the types of the tools' parameters
    (by tool and parameter; empty where they are not declared)."""

    __slots__ = ("out", "scan", "types")

    def __init__(self, scan: Scanner, out: EventWriter, types: Mapping[str, Mapping[str, Sequence[str]]]) -> None:
        self.scan = scan
        self.out = out
        self.types = types


class ToolFormat(ABC):
    """The text in which a family of models writes tool calls.

    `starts` are the texts that begin a call (or a list of calls), wherever they stand. `bare_starts` begin one only at
    the start of the answer, and only with the name of a known tool, as other text may begin so too. `special` are
    further special tokens that the parser reads; all others are dropped. `typed`: arguments are texts, and the parser
    needs the types of the parameters. `one_block`: all calls stand behind one starting text; otherwise each has its
    own, and text may stand between them. `own_reasoning`: the parser reads the format's own markers of reasoning, and
    every answer, also without tools; `reasoning` are those markers then, for a budget. `answer_start`: the text that
    begins the header of the visible answer; None where that begins at once, or behind the reasoning. `turn_start`: the
    text at the end of a rendered chat, in front of such a header. `text_grammars`: the grammar holds a tool's text to
    its own grammar; otherwise it may be any text.
    """

    name: ClassVar[str]
    starts: ClassVar[tuple[str, ...]]
    bare_starts: ClassVar[tuple[str, ...]] = ()
    special: ClassVar[tuple[str, ...]] = ()
    typed: ClassVar[bool] = False
    one_block: ClassVar[bool] = False
    own_reasoning: ClassVar[bool] = False
    reasoning: ClassVar[ReasoningMarkers | None] = None
    answer_start: ClassVar[str | None] = None
    turn_start: ClassVar[str | None] = None
    text_grammars: ClassVar[bool] = True

    @abstractmethod
    def detect(self, template: str) -> bool:
        """Whether a chat template is of a model that writes this format."""

    @abstractmethod
    def read(self, context: CallContext, start: str) -> Steps[None]:
        """Read the calls behind `start`, one of the starting texts, which was consumed.

        Returns behind the last character that belongs to them. Raises Mismatch where the text is no call; what was
        consumed since the last event becomes text then.
        """

    @abstractmethod
    def calls(self, tools: Sequence[ToolSpec], grammar: lark.Grammar, *, several: bool) -> str:
        """Return a Lark expression of one call of one of `tools`, with `several` of one or more, from the starting
        text to the last character that belongs to them. Rules are added to `grammar`. Raises Unheld for a strict tool
        with a schema that the format can't hold calls to; values of others are free then."""

    def can_name(self, key: str) -> bool:
        """Whether a call's text can have a parameter of this name."""
        return True

    def past_calls(self, calls: Sequence[str], mark: Callable[[str], str]) -> str | None:
        """Return past calls of one turn as text, for templates that write none; None where the format has no form of
        its own for that. Each call is a JSON object with `name` and `arguments`. `mark` returns a stand-in for a
        special token, which becomes one in the prompt."""
        return None

    def constraint(
        self,
        tools: Sequence[ToolSpec],
        choice: ToolChoice,
        *,
        parallel: bool = True,
        special: Mapping[str, int] | None = None,
        schema: lark.SchemaWriter = lark.plain_schema,
        reasons: bool = True,
        unheld: dict[str, list[str]] | None = None,
    ) -> Constraint | None:
        """Return the grammar of an answer of calls alone ("required"), or of the calls in an answer that may have some
        ("auto"); None where no tool may be called.

        `special` are the ids of the vocabulary's special tokens by text. `schema` writes a JSON schema for Lark's
        `%json`. With `parallel` there may be several calls. Without `reasons` the grammar has no reasoning of the
        format's own: it begins behind it. To `unheld` it adds, by the names of tools, why values are free.
        """
        allowed = choice.allowed(tools)
        if not allowed:
            return None
        grammar = lark.Grammar(special or {}, schema, unheld)
        several = parallel and (self.one_block or choice.mode != AUTO)
        calls = self.calls(allowed, grammar, several=several)
        if choice.mode != AUTO:
            return Constraint("tool", grammar.render(self.whole_answer(calls, grammar, reasons=reasons)))
        return Constraint("tool", grammar.render(calls), triggers=self.triggers(allowed), then_free=parallel)

    def whole_answer(self, end: str, grammar: lark.Grammar, *, reasons: bool, opened: bool = False) -> str:
        """Return a Lark expression of an answer that ends with the expression `end`, of calls or of the visible answer
        with its header. With `reasons` the format's own reasoning may be in it; `opened`: it begins inside of one."""
        return end

    def answer_header(self, grammar: lark.Grammar) -> str:
        """Return a Lark expression of the header that begins with `answer_start`."""
        return grammar.text(self.answer_start or "")

    def triggers(self, tools: Sequence[ToolSpec]) -> tuple[str, ...]:
        """Return the texts with which the grammar of "auto" begins. The grammar has no other beginning."""
        return self.starts
