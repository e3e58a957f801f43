"""Stages of a text job: numbers in shared memory, names in messages."""

from __future__ import annotations

STAGES = ("", "reading the request's JSON", "the model's chat template", "the model's tokenizer")
IDLE, PARSING, RENDERING, TOKENIZING = range(len(STAGES))
