"""Formats of a model's answers: the parser of its tool calls and the markers of its reasoning, chosen from its chat
template or by the operator."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from ..errors import ConfigError
from .formats.reasoning import MARKERS, pick_reasoning
from .formats.registry import find, pick

if TYPE_CHECKING:
    from .templates import ChatTemplate

AUTO, NONE = "auto", "none"
FALLBACK = "hermes"


class AnswerFormats(msgspec.Struct, frozen=True):
    """Names of a model's formats. `tools` is that of its tool calls; `by_template`: its template describes tools, else
    the server does, in the same format. `reasoning` is the name of its markers, None where it has none. `always_read`:
    each answer is read for them, or because the format has markers of its own."""

    tools: str = FALLBACK
    by_template: bool = False
    reasoning: str | None = None
    always_read: bool = False


def choose_formats(template: ChatTemplate | None, tool_parser: str, reasoning_parser: str) -> AnswerFormats:
    """Return the formats of a model. The parsers are names, "auto" (from the template), and for reasoning "none".
    Raises ConfigError for an unknown name.

    A template that describes no tools leaves the server's own description of them, which asks for `FALLBACK`.
    """
    source = "" if template is None else template.source
    by_template = template is not None and (template.traits.tools or template.traits.tools_in_system)
    tools = (pick(source) if by_template else None) if tool_parser == AUTO else find(tool_parser).name
    name, reasoning = tools or FALLBACK, _reasoning(source, reasoning_parser)
    own = find(name).own_reasoning
    return AnswerFormats(name, by_template, None if own else reasoning, own or reasoning is not None)


def _reasoning(source: str, parser: str) -> str | None:
    if parser == AUTO:
        return pick_reasoning(source)
    if parser != NONE and parser not in MARKERS:
        known = ", ".join((AUTO, NONE, *sorted(MARKERS)))
        raise ConfigError(f"reasoning parser {parser!r} is unknown; there are {known}")
    return None if parser == NONE else parser
