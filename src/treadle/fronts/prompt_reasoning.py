"""Reasoning that a prompt leaves open, or has ended: the answer begins inside it, or without any."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, auto
from typing import TYPE_CHECKING

from ..text.formats.reasoning import ReasoningMarkers

if TYPE_CHECKING:
    from ..text import TextModel

_LAST_TOKENS = 32


class PromptReasoning(Enum):
    """State of the reasoning at the end of a prompt."""

    AHEAD = auto()  # the answer may begin with it
    OPEN = auto()
    OVER = auto()


def reasoning_after(model: TextModel, markers: ReasoningMarkers, prompt: Sequence[int]) -> PromptReasoning:
    """Return the state of the reasoning behind the tokens of a prompt.

    The last marker of the last turn counts. The turn begins behind the prompt's last special token that belongs to no
    marker. In a prompt without turns only a marker at its very end counts, as its text may be about markers.
    """
    turn = _turn_start(model, markers, prompt)
    text = model.decode(prompt[turn or -_LAST_TOKENS :], skip_special_tokens=False).rstrip()
    opening, closing = markers.open.rstrip(), markers.close.strip()
    if turn is None:
        opened, closed = text.endswith(opening), text.endswith(closing)
    else:
        opened, closed = text.rfind(opening) > text.rfind(closing), closing in text
    return PromptReasoning.OPEN if opened else PromptReasoning.OVER if closed else PromptReasoning.AHEAD


def _turn_start(model: TextModel, markers: ReasoningMarkers, prompt: Sequence[int]) -> int | None:
    """Return the place behind the last special token; None without one, apart from those before every text."""
    own = markers.open + markers.close
    special = model.special_ids
    last = (i for i in reversed(range(len(prompt))) if prompt[i] in special and model.token_text(prompt[i]) not in own)
    found = next(last, -1) + 1
    return found if found > len(model.prefix) else None
