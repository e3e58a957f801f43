"""Rows without drafts, as work on them failed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from ..base import RunnerBroken
from ..device.owner_thread import mlx_runtime
from ..forward.segments import KvSequence
from ..kv.backend import KvBackend
from .draft_passes import DraftPasses

_log = logging.getLogger(__name__)


class FailedRows:
    """Ids of rows on which `passes` over `backend` failed, until they are released. `forget` drops the drafter's record
    of one, and `what` names the drafter in the log."""

    def __init__(self, passes: DraftPasses, backend: KvBackend, forget: Callable[[str], None], what: str) -> None:
        self._passes = passes
        self._backend = backend
        self._forget = forget
        self._what = what
        self._ids: set[str] = set()
        self._told = False

    def __contains__(self, row_id: str) -> bool:
        return row_id in self._ids

    def release(self, row_id: str) -> None:
        self._ids.discard(row_id)

    @contextmanager
    def on_failure(self, sequences: Sequence[KvSequence]) -> Iterator[None]:
        """Turn the drafts of `sequences` off where work on them raises. A fault of MLX's runtime comes through: nothing
        can be trusted then."""
        try:
            with mlx_runtime(f"drafting by {self._what}"):
                yield
        except RunnerBroken:
            raise
        except Exception as error:  # of a model's code, whatever it raises
            self._turn_off(sequences)
            self._tell(error)

    def _turn_off(self, sequences: Sequence[KvSequence]) -> None:
        self._passes.forget()
        self._backend.invalidate(sequences)
        for sequence in sequences:
            self._ids.add(sequence.id)
            self._forget(sequence.id)

    def _tell(self, error: Exception) -> None:
        if not self._told:
            self._told = True
            _log.warning(
                "%s failed (%s: %s): requests that it failed on go on without drafts, and this is not told again; "
                "lower --max-running or --memory if memory is short",
                self._what,
                type(error).__name__,
                error,
            )
