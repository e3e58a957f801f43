"""Markers of a model's reasoning, found in its chat template."""

from __future__ import annotations

import msgspec


class ReasoningMarkers(msgspec.Struct, frozen=True, omit_defaults=True):
    """Texts around a model's reasoning. Reasoning begins at the start of the answer or behind a tool call; with
    `anywhere` also in the middle of the text (markers that are special tokens)."""

    open: str
    close: str
    anywhere: bool = False


MARKERS: dict[str, ReasoningMarkers] = {
    "mistral": ReasoningMarkers("[THINK]", "[/THINK]", anywhere=True),
    "gemma4": ReasoningMarkers("<|channel>thought\n", "<channel|>", anywhere=True),
    "seed": ReasoningMarkers("<seed:think>", "</seed:think>"),
    "exaone": ReasoningMarkers("<thought>", "</thought>"),
    "granite": ReasoningMarkers("Here is my thought process:", "Here is my response:"),
    "command_r": ReasoningMarkers("<|START_THINKING|>", "<|END_THINKING|>"),
    "think": ReasoningMarkers("<think>", "</think>"),
}
"""Markers by name, in the order in which a template is searched for them."""


def pick_reasoning(template: str) -> str | None:
    """Return the name of the markers that a chat template writes or looks for; None if it knows none.

    A template may know the closing marker only: it cuts the reasoning out of past answers, and the model opens it.
    """
    for name, markers in MARKERS.items():
        if markers.open.rstrip() in template or markers.close in template:
            return name
    return None
