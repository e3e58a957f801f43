"""Tokenizer, chat templates, incremental detokenization, stop strings. Never imports mlx.

`TextModel`, `ChatTemplate` and `TextPool` are imported on first access: not every process needs them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .check import check_text
from .detokenizer import Detokenizer
from .stops import StopMatch, StopSet, StopStrings
from .stream import TextDelta, TextStream, TokenEntry
from .text_view import TextView

if TYPE_CHECKING:
    from .pool import TextPool
    from .templates import ChatTemplate
    from .tokenizer import TextModel

__all__ = [
    "ChatTemplate",
    "Detokenizer",
    "StopMatch",
    "StopSet",
    "StopStrings",
    "TextDelta",
    "TextModel",
    "TextPool",
    "TextStream",
    "TextView",
    "TokenEntry",
    "check_text",
]


def __getattr__(name: str) -> Any:
    if name == "TextModel":
        from .tokenizer import TextModel

        return TextModel
    if name == "ChatTemplate":
        from .templates import ChatTemplate

        return ChatTemplate
    if name == "TextPool":
        from .pool import TextPool

        return TextPool
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
