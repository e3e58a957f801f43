"""Real text model of one token per byte (see `tiny`), and a text worker pool that runs jobs inline."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.support.tiny import EOS, make_tiny
from treadle.errors import EngineUnavailable
from treadle.fronts.web.body_jobs import JOBS
from treadle.text import TextModel

VOCABULARY = 261
__all__ = ["EOS", "VOCABULARY", "BytesTexts", "InlinePool", "bytes_text"]


@functools.cache
def _loaded() -> TextModel:
    with tempfile.TemporaryDirectory() as folder:
        return TextModel.load(make_tiny(Path(folder) / "bytes"))


def bytes_text(context: int = 4096, default_sampling: Mapping[str, float] | None = None) -> TextModel:
    return replace(_loaded(), context=context, default_sampling=dict(default_sampling or {}))


class InlinePool:
    """Pool that runs jobs at once, unless `gate` holds them up."""

    def __init__(self, texts: BytesTexts) -> None:
        self.gate: Callable[[], Any] | None = None
        self.runs = 0
        self._texts = texts

    async def run(self, job: str, params: bytes, payload: bytes = b"", **bounds: Any) -> bytes:
        self.runs += 1
        if self.gate is not None:
            await self.gate()
        return JOBS[job](self._texts.model(), params, payload, lambda stage: None)


class BytesTexts:
    def __init__(self, model: TextModel | None) -> None:
        self.pool = InlinePool(self)
        self.loaded = model
        self.trouble = ""

    def model(self) -> TextModel:
        if self.loaded is None:
            raise EngineUnavailable("the model is loading", retry_after_s=2.0)
        return self.loaded

    def statistics(self) -> dict[str, Any]:
        return {"workers": 0}
