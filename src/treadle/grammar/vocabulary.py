"""Vocabulary of a model for llguidance: its tokenizer as a trie of token bytes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from llguidance import LLTokenizer

from ..errors import ModelError, one_line


def read_vocabulary(path: Path, *, size: int | None = None, eos_token_ids: Sequence[int] = ()) -> LLTokenizer:
    """Read the tokenizer.json at `path`.

    The vocabulary has `size` tokens or, if that is more or `size` is None, as many as the tokenizer. The work holds the
    GIL throughout: 1.4 s for 262,144 tokens. Raises ModelError when llguidance can't use the file.
    """
    try:
        text = path.read_text(encoding="utf-8")
        own = LLTokenizer(text, eos_token=list(eos_token_ids) or None, slices=LLTokenizer.json_slices(), n_vocab=size)
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise ModelError(f"llguidance can't use {path.name}: {one_line(error)}") from error
    return own


class VocabularyThread:
    """Thread that reads a vocabulary beside other work."""

    def __init__(self, read: Callable[[], LLTokenizer]) -> None:
        self.seconds = 0.0
        self._read = read
        self._tokenizer: LLTokenizer | None = None
        self._error: ModelError | None = None
        self._thread = threading.Thread(target=self._run, name="vocabulary", daemon=True)
        self._thread.start()

    def result(self) -> LLTokenizer:
        """Wait for the vocabulary and return it. Raises ModelError when it could not be read."""
        self._thread.join()
        if self._tokenizer is None:
            raise self._error or ModelError("the vocabulary could not be read")
        return self._tokenizer

    def _run(self) -> None:
        began = time.monotonic()
        try:
            self._tokenizer = self._read()
        except ModelError as error:
            self._error = error
        self.seconds = time.monotonic() - began
