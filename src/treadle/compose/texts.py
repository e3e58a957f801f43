"""The text side of a model: in text workers of a server, or on threads of a program of one's own."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..config import Settings
from ..errors import EngineUnavailable
from .waiting import aside

if TYPE_CHECKING:
    from ..models.folder import ModelFolder
    from ..telemetry.metrics import Metrics
    from ..text.text_view import TextView
    from ..text.tokenizer import TextModel

FOLDER_CHECK = "treadle.models.folder_checks:check"
TEXT_JOBS = "treadle.fronts.web.body_jobs:JOBS"
LOADING_BYTES = 4 << 30
WORKER_BYTES = 1 << 30


class LocalTexts:
    """The text side of one model on threads of this process, for programs that chose the model themselves. A hostile
    folder or prompt can take any time and memory of this process."""

    trouble = ""
    restarting = False

    def __init__(self) -> None:
        self.pool = LocalPool(self.model)
        self._model: TextModel | None = None

    def model(self) -> TextModel:
        """The text model. Raises EngineUnavailable while it loads."""
        if self._model is None:
            raise EngineUnavailable("the model's tokenizer is still loading", retry_after_s=2.0)
        return self._model

    async def load(self, folder: ModelFolder, settings: Settings) -> TextModel:
        """Read tokenizer, template and generation settings from `folder`, off the event loop. Raises ModelError."""
        from ..text.tokenizer import TextModel

        self._model = await aside(
            lambda: TextModel.load(
                folder.path,
                chat_template=settings.chat_template,
                context=settings.context,
                tool_parser=settings.tool_parser,
                reasoning_parser=settings.reasoning_parser,
            )
        )
        return self._model

    def statistics(self) -> dict[str, Any]:
        return asdict(self.pool.threads.statistics())

    def close(self) -> None:
        self.pool.threads.close()


class LocalPool:
    """Text jobs on threads, without limits of time and memory (`fronts.text_jobs.TextJobRunner`)."""

    def __init__(self, model: Callable[[], TextModel]) -> None:
        from ..text.pool import TextPool

        self.threads: TextPool = TextPool()
        self._model = model

    async def run(self, job: str, params: bytes, payload: bytes = b"", **bounds: Any) -> bytes:
        """Return the result of a job. `bounds`, those of a worker, are ignored."""
        from ..fronts.text_jobs import JOBS

        return await self.threads.run(JOBS[job], self._model(), params, payload, lambda stage: None)


class TextWorkers:
    """The text side of a server: processes that may be killed, each with limits of time and memory."""

    def __init__(self, settings: Settings, on_refused: Callable[[], None], metrics: Metrics) -> None:
        from ..text.work.worker_pool import WorkerPool

        self.pool = WorkerPool(
            workers=text_workers(),
            max_wait_s=settings.max_wait_s,
            on_refused=on_refused,
            on_killed=metrics.text_killed,
            on_restart=metrics.text_restarted,
        )

    def model(self) -> TextView:
        """Facts about the model's text. Raises EngineUnavailable while it loads."""
        return self.pool.view()

    @property
    def trouble(self) -> str:
        return self.pool.unavailable_reason

    @property
    def restarting(self) -> bool:
        return self.pool.is_restarting

    def statistics(self) -> dict[str, Any]:
        return self.pool.statistics()

    async def load(self, folder: Path, settings: Settings, checked: Callable[[], None]) -> TextView:
        """Check `folder`, say so, and read its tokenizer and template. Raises ModelError or ConfigError in bounded
        time."""
        from ..text.work.messages import Load

        template = None if settings.chat_template is None else str(settings.chat_template)
        order = Load(
            folder=str(folder),
            chat_template=template,
            context=settings.context,
            check=FOLDER_CHECK,
            jobs=TEXT_JOBS,
            memory_bytes=LOADING_BYTES,
            worker_bytes=WORKER_BYTES,
            tool_parser=settings.tool_parser,
            reasoning_parser=settings.reasoning_parser,
        )
        return await self.pool.load(order, checked)


def text_workers() -> int:
    """The number of processes that render and tokenize: a prompt takes milliseconds, and each costs 2 to 5 MB."""
    return min(4, max(2, (os.cpu_count() or 1) // 4))
