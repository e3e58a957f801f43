"""Vocabulary of a model for llguidance: its tokenizer as a trie of token bytes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import msgspec
from llguidance import LLTokenizer

from ..errors import ModelError, one_line
from .tokenizer_json import AddedToken, for_llguidance


def read_vocabulary(
    path: Path, *, size: int | None = None, eos_token_ids: Sequence[int] = (), added: Iterable[AddedToken] = ()
) -> LLTokenizer:
    """Read the tokenizer.json at `path`, with the tokens in `added` that it lacks.

    The vocabulary has `size` tokens, or as many as the tokenizer if those are more. Without `eos_token_ids` the
    tokenizer's own one is taken. For 262,144 tokens this takes 1.5 s of one core, most of which holds the GIL, and
    230 MB. Raises ModelError when llguidance can't use the file.
    """
    try:
        text = for_llguidance(path.read_bytes(), added)
        try:
            return _tokenizer(text, size, eos_token_ids)
        except ValueError as error:
            if size is None or "vocab size too small" not in str(error):
                raise
        return _tokenizer(text, None, eos_token_ids)
    except (OSError, ValueError, msgspec.MsgspecError) as error:
        raise ModelError(f"llguidance can't use {path.name}: {one_line(error)}") from error


class VocabularyThread:
    """Thread that reads a vocabulary beside other work. `seconds` is how long that took."""

    def __init__(self, read: Callable[[], LLTokenizer]) -> None:
        self.seconds = 0.0
        self._read = read
        self._tokenizer: LLTokenizer | None = None
        self._error: ModelError | None = None
        self._thread = threading.Thread(target=self._run, name="vocabulary", daemon=True)
        self._thread.start()

    def join(self) -> None:
        """Wait until the thread has ended."""
        self._thread.join()

    def result(self) -> LLTokenizer:
        """Wait for the vocabulary and return it. Raises ModelError when it could not be read."""
        self._thread.join()
        if self._tokenizer is None:
            raise self._error or ModelError("llguidance failed on the tokenizer: see the log")
        return self._tokenizer

    def _run(self) -> None:
        began = time.monotonic()
        try:
            self._tokenizer = self._read()
        except ModelError as error:
            self._error = error
        self.seconds = time.monotonic() - began


def _tokenizer(text: str, size: int | None, eos_token_ids: Sequence[int]) -> LLTokenizer:
    slices = LLTokenizer.json_slices()  # 0.4 s; without them the first mask inside a JSON string takes 2 ms
    return LLTokenizer(text, n_vocab=size, eos_token=list(eos_token_ids) or None, slices=slices)
