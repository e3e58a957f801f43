"""Prompts as text workers return them: token ids, and what the engine and the answer's reader need besides."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import msgspec

from ..core.messages import Constraint, Image, Thinking
from ..text.formats.reader import ReaderSetup
from ..text.images.prompt import PlacedImage


class Prepared(msgspec.Struct, frozen=True, omit_defaults=True):
    """Plain values that a text worker derives from a request: `constraint` and `thinking` of its sequences, and the
    setup of the answers' reader, None where answers are text alone. `optional`: the request can be answered without the
    constraint. `loose_tools` are tools whose arguments are not held to their schema, with the reason. `answering` are
    places of prompts that leave no reasoning open: their sequences have no `thinking`. `prediction` are tokens that the
    client expects in the answers, None where it says nothing."""

    constraint: Constraint | None = None
    thinking: Thinking | None = None
    reader: ReaderSetup | None = None
    loose_tools: dict[str, str] = {}
    optional: bool = False
    answering: tuple[int, ...] = ()
    prediction: tuple[int, ...] | None = None

    def without_constraint(self) -> Prepared:
        """Return the values without the constraint, and without reasoning that only the constraint has to know of."""
        budgeted = self.thinking is not None and self.thinking.budget is not None
        return msgspec.structs.replace(self, constraint=None, thinking=self.thinking if budgeted else None)


NOTHING = Prepared()


class Held(Protocol):
    """Images that a request holds until it has ended, or until all prompts that have them have."""

    def placed(self, places: Sequence[PlacedImage]) -> tuple[Image, ...]: ...

    def spare(self, images: Sequence[Image]) -> None: ...

    def release(self) -> None: ...


@dataclass(frozen=True, slots=True)
class PreparedPrompts:
    """The token ids of each prompt of a request, and the values that all of its sequences share. Where prompts have
    images, `places` are those of each prompt, and in the server `images`, whose pixels are `held`."""

    ids: Sequence[Sequence[int]]
    prepared: Prepared = NOTHING
    places: Sequence[Sequence[PlacedImage]] = ()
    images: Sequence[tuple[Image, ...]] = ()
    held: Held | None = None

    def with_images(self, held: Held | None) -> PreparedPrompts:
        """Return the prompts with the images at their places, and hold these."""
        if held is None:
            return self
        return replace(self, images=[held.placed(places) for places in self.places], held=held)

    def ended(self, place: int) -> None:
        """Let the images of one prompt go, whose sequences have all ended."""
        if self.held is not None:
            self.held.spare(self.images[place])

    def release(self) -> None:
        """Let the images go. Idempotent."""
        if self.held is not None:
            self.held.release()
