"""Images of one conversation: from the parts of its turns to the text and the tokens that stand for them.

A chat template gets an image as a part without content, and writes a placeholder for it. Where it doesn't (it takes
text alone, or has no place for an image in a turn of that role), a random mark in the text becomes the placeholder.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from ...errors import InvalidRequest
from .base import ImageSettings, Layout
from .source import ImageSource

IMAGE = "image"
Turn = Mapping[str, Any]


class ImagesNeeded(Exception):
    """The prompt can't be written before these images are prepared."""

    def __init__(self, sources: Sequence[ImageSource]) -> None:
        super().__init__(f"{len(sources)} images")
        self.sources = sources


class PlacedImage(msgspec.Struct, frozen=True, array_like=True):
    """The image with the key `key` has `count` tokens from `start` on, those between its own included."""

    key: bytes
    start: int
    count: int


def image_part(source: ImageSource) -> dict[str, Any]:
    """Return a part of a turn that is an image."""
    return {"type": IMAGE, IMAGE: source}


def images_of(turns: Sequence[Turn]) -> Iterator[ImageSource]:
    """Yield the images of turns, in order."""
    for turn in turns:
        content = turn.get("content")
        if isinstance(content, list):
            yield from (part[IMAGE] for part in content if part["type"] == IMAGE)


def without_images(content: Any) -> Any:
    """Return a turn's content without its images."""
    if not isinstance(content, list):
        return content
    return [part for part in content if not (isinstance(part, dict) and part.get("type") == IMAGE)]


def with_sources(turn: Turn) -> dict[str, Any]:
    """Return a turn that was encoded and decoded, with images as such."""
    content = turn.get("content")
    if not isinstance(content, list):
        return dict(turn)
    parts = [
        image_part(msgspec.convert(part[IMAGE], ImageSource)) if part["type"] == IMAGE else part for part in content
    ]
    return {**turn, "content": parts}


@dataclass(frozen=True)
class ImageForm:
    """One form of turns with images. `text`: what the mark in them becomes; None where the template writes images."""

    turns: list[dict[str, Any]]
    text: str | None = None


class ImageTexts:
    """Writer of the images of one conversation. `layouts` are those of its images by their keys. Raises ImagesNeeded
    where one is missing."""

    def __init__(self, settings: ImageSettings, layouts: Mapping[bytes, Layout], turns: Sequence[Turn]) -> None:
        self._settings = settings
        self._mark = secrets.token_hex(16)
        sources = {source.key: source for source in images_of(turns)}
        if not sources.keys() <= layouts.keys():
            raise ImagesNeeded(list(sources.values()))
        self._texts = {key: settings.text(layouts[key]) for key in sources}

    def forms(self, turns: Sequence[Turn], marked_text: str, *, by_template: bool) -> Iterator[ImageForm]:
        """Yield the forms of turns to try: images as parts, unless not `by_template`, and as marks in the text that
        become `marked_text`."""
        if by_template:
            yield ImageForm([_with_parts(turn, {"type": IMAGE}) for turn in turns])
        yield ImageForm([_with_parts(turn, {"type": "text", "text": self._mark}) for turn in turns], marked_text)

    def fill(self, rendered: str, form: ImageForm, turns: Sequence[Turn]) -> str | None:
        """Return the rendered form with the text of each image; None where it has not exactly one placeholder for
        each."""
        if form.text is not None:
            rendered = rendered.replace(self._mark, form.text)
        first, *others = rendered.split(self._settings.placeholder)
        texts = [self._texts[source.key] for source in images_of(turns)]
        if len(others) != len(texts):
            return None
        return first + "".join(text + other for text, other in zip(texts, others, strict=True))

    def places(self, ids: Sequence[int], turns: Sequence[Turn]) -> list[PlacedImage]:
        """Return the tokens of each image. Raises InvalidRequest where the ids have other tokens of images too."""
        own = [place for place, token in enumerate(ids) if token == self._settings.token_id]
        found, at = [], 0
        for source in images_of(turns):
            count = self._texts[source.key].count(self._settings.token)
            mine = own[at : at + count]
            at += count
            found.append(PlacedImage(source.key, mine[0], mine[-1] + 1 - mine[0]) if len(mine) == count else None)
        placed = [image for image in found if image is not None]
        if at != len(own) or len(placed) != len(found):
            raise InvalidRequest(
                "the messages hold tokens of images in a way that can't be told from the model's own: remove them",
                param="messages",
            )
        return placed


def _with_parts(turn: Turn, part: dict[str, Any]) -> dict[str, Any]:
    """Return the turn with `part` in place of each image."""
    content = turn.get("content")
    if not isinstance(content, list):
        return dict(turn)
    return {**turn, "content": [part if one["type"] == IMAGE else one for one in content]}
