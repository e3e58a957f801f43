"""Real text model of one token per byte (see `tiny`), and a text worker pool that runs jobs inline."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.support.tiny import CHATML, EOS, make_tiny
from treadle.errors import EngineUnavailable
from treadle.fronts.web.body_jobs import JOBS
from treadle.text import TextModel

VOCABULARY = 261
__all__ = ["EOS", "VOCABULARY", "BytesTexts", "InlinePool", "bytes_text"]


_FOLDERS = tempfile.TemporaryDirectory(prefix="treadle-bytes-")


@functools.cache
def _loaded(added: tuple[str, ...], special: tuple[str, ...], chat_template: str | None) -> TextModel:
    folder = Path(tempfile.mkdtemp(dir=_FOLDERS.name))
    return TextModel.load(make_tiny(folder / "bytes", added=added, special=special, chat_template=chat_template))


def bytes_text(
    context: int = 4096,
    default_sampling: Mapping[str, float] | None = None,
    *,
    added: tuple[str, ...] = (),
    special: tuple[str, ...] = (),
    chat_template: str | None = CHATML,
) -> TextModel:
    """Return a text model whose vocabulary ends with `added` and `special` tokens, see `make_tiny`."""
    model = _loaded(added, special, chat_template)
    return replace(model, context=context, default_sampling=dict(default_sampling or {}))


class InlinePool:
    """Pool that runs jobs at once, unless `gate` holds them up. `grammars` are those that the jobs were said to
    check."""

    def __init__(self, texts: BytesTexts) -> None:
        self.gate: Callable[[], Any] | None = None
        self.runs = 0
        self.grammars: list[bytes] = []
        self._texts = texts

    async def run(self, job: str, params: bytes, payload: bytes = b"", **bounds: Any) -> bytes:
        self.runs += 1
        self.grammars.append(bounds.get("grammar", b""))
        if self.gate is not None:
            await self.gate()
        return JOBS[job](self._texts.model(), params, payload, lambda stage: None)


class BytesTexts:
    def __init__(self, model: TextModel | None) -> None:
        self.pool = InlinePool(self)
        self.loaded = model
        self.trouble = ""
        self.restarting = False
        self.back_s = 2.0

    def model(self) -> TextModel:
        if self.loaded is None:
            raise EngineUnavailable("the model is loading", retry_after_s=self.back_s)
        return self.loaded

    def statistics(self) -> dict[str, Any]:
        return {"workers": 0}
