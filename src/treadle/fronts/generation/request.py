"""A generation request as a front hands it over: parsed, and not yet checked against a model."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from ...core.virtual_queue import Arrival
from ...engine.reservation import Reservation
from ...telemetry.access_log import RequestRecord
from ..authentication import Caller
from ..cache_salts import Salts
from ..validate import Limits, ValidatedRequest
from .prompts import Prompts

_T = TypeVar("_T")


class Registration(Protocol):
    """A live request that can be aborted by its id."""

    aborted: bool

    async def preparing(self, work: Callable[[], Awaitable[_T]]) -> _T:
        """Return what `work` does, which an abort ends. Raises RequestCancelled."""
        ...

    def hold(self, reservation: Reservation) -> None:
        """From now on cancel `reservation` on an abort."""
        ...


@dataclass(frozen=True, kw_only=True)
class GenerationRequest:
    """One request.

    `kind` is its kind in metrics and in `/v1/status`, `id` its public id. `check` validates the sampling parameters:
    `validate.check` of a `RawParams`, and of what else the dialect has. `spellings` maps the validator's names of
    fields to those that the client used; refusals name the latter.

    `caller` has the tenant, the account and the rights, `arrival` the marks by which a refused client is recognised
    when it returns; prompts are cached under `salts`. `record` is filled with what is known of the request; its
    `started` must be set.

    `stops_of_model`: the model's own stop strings end an answer, as in a chat. With `text` pieces have text; without
    it only stop strings are looked for. `register` makes the request known by its id, for as long as it lives; an
    aborted choice then ends with the finish reason "abort".
    """

    kind: str
    id: str
    prompts: Prompts
    check: Callable[[Limits], ValidatedRequest]
    caller: Caller
    arrival: Arrival
    salts: Salts
    record: RequestRecord
    stops_of_model: bool = False
    text: bool = True
    skip_special_tokens: bool = True
    spellings: Mapping[str, str] = field(default_factory=dict)
    register: Callable[[], AbstractContextManager[Registration]] | None = None
