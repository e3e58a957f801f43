"""Where the fronts get text from: a model that may still be loading, and the processes that do text work."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

from ..core.messages import Capabilities
from ..engine.client import EngineClient, Health
from ..errors import EngineUnavailable, ServerStopping
from ..text import TextView
from .validate import Limits, ValidatedRequest

if TYPE_CHECKING:
    from .text_jobs import Pool

STOPPING = ("draining", "stopping", "stopped")
BLOCKED = "blocked"


class Texts(Protocol):
    """The text side of one server."""

    @property
    def pool(self) -> Pool: ...

    def model(self) -> TextView:
        """The text model. Raises EngineUnavailable while it loads."""
        ...

    @property
    def trouble(self) -> str:
        """Why no text work can be done now, though the model is loaded; empty while some can."""
        ...

    def statistics(self) -> dict[str, Any]:
        """Plain values for `/v1/status`."""
        ...


def health_of(engine: EngineClient, texts: Texts) -> Health:
    """The engine's, and not ready before the text side is, nor while no text worker takes work: until then requests
    are refused (C4)."""
    health = engine.health()
    if health.ready:
        try:
            texts.model()
        except EngineUnavailable as error:
            return replace(health, ready=False, state="starting", reason=error.message)
        if texts.trouble:
            return replace(health, ready=False, state=BLOCKED, reason=texts.trouble)
    return health


class ServerHealth:
    """`health_of` a server, for metrics."""

    def __init__(self, engine: EngineClient, texts: Texts) -> None:
        self._engine = engine
        self._texts = texts

    def health(self) -> Health:
        return health_of(self._engine, self._texts)


def unready_error(health: Health) -> EngineUnavailable:
    """The error with which a server in this state refuses requests."""
    reason = health.reason or f"the engine is {health.state}"
    if health.state in STOPPING:
        return ServerStopping(reason, retry_after_s=5.0)
    return EngineUnavailable(reason, retry_after_s=2.0 if health.retry_after_s is None else health.retry_after_s)


def limits_of(model: TextView, can: Capabilities | None, max_tokens: int | None) -> Limits:
    """What a request is checked against: the text model's word, the runner's once it is known, and the cap."""
    return Limits(
        vocabulary=model.vocabulary if can is None else min(model.vocabulary, can.vocabulary),
        context=model.context if can is None else min(model.context, can.context),
        max_tokens=max_tokens,
        eos_token_ids=model.eos_token_ids,
        sampling=model.default_sampling,
    )


def with_stops(
    checked: ValidatedRequest, model: TextView, *, chat: bool, hide_special: bool = True
) -> ValidatedRequest:
    """With the model's own stop strings in a chat, and stop strings that are special tokens as tokens: where text
    hides these, they would never be found in it."""
    own = model.stop_strings if chat and not checked.ignore_eos else ()
    stop = tuple(dict.fromkeys((*checked.stop, *own)))
    tokens = model.stop_tokens(stop) if hide_special else ()
    return replace(checked, stop=stop, stop_token_ids=tuple(dict.fromkeys((*checked.stop_token_ids, *tokens))))
