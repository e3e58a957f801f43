"""The engine from the fronts' side: a client whose owner is a child process or a thread."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import msgspec

from .. import output_streams
from ..config import Settings
from ..engine.admission import AdmissionLimits
from ..engine.client import EngineClient
from ..engine.handle import OwnerHandle
from ..engine.observer import Observer
from ..engine.process import ProcessOwner
from ..engine.thread import ThreadOwner
from ..engine.timeouts import Timeouts
from ..file_descriptors import DescriptorReserve
from .owner import owner_spec, runner_factory

if TYPE_CHECKING:
    from ..models.folder import ModelFolder

OWNER_ENTRY = "treadle.compose.owner:owner_of"


def engine_for(
    settings: Settings,
    folder: Callable[[], ModelFolder],
    observers: Sequence[Observer] = (),
    spare: DescriptorReserve | None = None,
) -> EngineClient:
    """Return an engine client whose owner is a child process, or a thread with `in_process`. Nothing is started.
    `folder` is called at each start of the owner; `spare` lends the descriptors for it."""

    def launch() -> OwnerHandle:
        spec = owner_spec(settings, folder())
        if settings.in_process:
            return ThreadOwner(runner_factory(spec), spec.limits)
        return ProcessOwner(OWNER_ENTRY, msgspec.to_builtins(spec), spare, relay=_relay(settings.log_format))

    return EngineClient(
        launch,
        AdmissionLimits(
            settings.max_running,
            settings.waiting_places,
            settings.max_wait_s,
            by_forecast=settings.max_waiting is None,
        ),
        Timeouts(settings.hang_after_s, settings.start_timeout_s),
        observers=observers,
    )


def _relay(form: str) -> Callable[[bytes], None] | None:
    """Return the writer of the engine process's output: this process's queued standard error, if it has one."""
    from ..telemetry.logs import reformat_engine_lines

    writer = output_streams.own()
    return None if writer is None else lambda data: writer.put(reformat_engine_lines(data, form))
