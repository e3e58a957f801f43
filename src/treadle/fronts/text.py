"""What the fronts need of `text/`, and no more: any object with these methods will do."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol, TypeVar

Result = TypeVar("Result")


class TextModel(Protocol):
    """A model's tokenizer, template and what its files say about generation. `encode*` are slow: run them in a pool."""

    @property
    def vocabulary(self) -> int: ...
    @property
    def context(self) -> int: ...
    @property
    def eos_token_ids(self) -> Collection[int]: ...
    @property
    def default_sampling(self) -> Mapping[str, float]: ...
    @property
    def bytes_per_token(self) -> float: ...

    def encode(self, text: str, *, add_special_tokens: bool = True) -> Sequence[int]: ...

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> Sequence[int]: ...

    def decode(self, ids: Sequence[int]) -> str: ...

    def token_text(self, token: int) -> str: ...

    def token_bytes(self, token: int) -> bytes: ...

    def stream(self, *, stop: Sequence[str] = (), skip_special_tokens: bool = True) -> TextStream: ...


class TextStream(Protocol):
    """One sequence's text as its tokens come, with stop strings held back."""

    @property
    def stopped(self) -> bool:
        """A stop string was completed: nothing more is shown."""
        ...

    @property
    def held(self) -> int:
        """Characters that are known and not yet shown, as they may begin a stop string."""
        ...

    def feed(self, token: int) -> str:
        """The text that this token makes certain."""
        ...

    def finish(self) -> str:
        """What was held back, at the end of the sequence."""
        ...


class Pool(Protocol):
    """Runs slow text work off the event loop, a bounded amount at a time."""

    async def run(self, work: Callable[..., Result], *args: Any) -> Result: ...


class Texts(Protocol):
    """Where fronts get the text model from: `model` raises EngineUnavailable while it loads."""

    @property
    def pool(self) -> Pool: ...

    def model(self) -> TextModel: ...
