"""The stages of one piece of text work: a number while it is done, and its name in messages."""

from __future__ import annotations

STAGES = ("", "reading the request's JSON", "the model's chat template", "the model's tokenizer")
IDLE, PARSING, RENDERING, TOKENIZING = range(len(STAGES))
