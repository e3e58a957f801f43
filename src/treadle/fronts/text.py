"""Where the fronts get text from: a model that may still be loading, and a pool that keeps slow work off the loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from ..text import TextModel

Result = TypeVar("Result")


class Pool(Protocol):
    """Runs slow text work off the event loop, a bounded amount at a time."""

    async def run(self, work: Callable[..., Result], /, *args: Any) -> Result: ...


class Texts(Protocol):
    """The text side of one server."""

    @property
    def pool(self) -> Pool: ...

    def model(self) -> TextModel:
        """The text model. Raises EngineUnavailable while it loads."""
        ...
