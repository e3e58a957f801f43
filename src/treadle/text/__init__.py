"""Text at the edge: tokenizer, chat templates, incremental detokenization, stop strings. Never imports mlx."""

from __future__ import annotations

from .check import check_text
from .detokenizer import Detokenizer
from .pool import TextPool
from .stops import StopMatch, StopSet, StopStrings
from .stream import TextDelta, TextStream, TokenEntry
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
    "TokenEntry",
    "check_text",
]
