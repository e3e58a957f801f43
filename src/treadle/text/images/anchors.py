"""Images in prompts of token ids: a placeholder's token becomes the tokens that stand for an image."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ...errors import InvalidRequest
from .base import ImageSettings, Layout
from .prompt import PlacedImage


def check_anchors(ids: Sequence[int], settings: ImageSettings, images: int, param: str) -> None:
    """Raise InvalidRequest unless the ids have one placeholder for each image."""
    found = sum(token == settings.placeholder_id for token in ids)
    if found != images:
        raise InvalidRequest(
            f"{param} has {found} placeholders of images (token {settings.placeholder_id}) and {images} images: send "
            "one for each",
            param=param,
        )


def expanded(
    ids: Sequence[int],
    settings: ImageSettings,
    images: Sequence[tuple[bytes, Layout]],
    encode: Callable[[str], list[int]],
) -> tuple[list[int], list[PlacedImage]]:
    """Return the ids with each placeholder as the tokens of its image, and their places. `images` are keys and layouts
    in order; `encode` tokenizes a text without special tokens around it."""
    waiting = iter(images)
    found: list[int] = []
    places: list[PlacedImage] = []
    for token in ids:
        if token != settings.placeholder_id:
            found.append(token)
            continue
        key, layout = next(waiting)
        own = encode(settings.text(layout))
        marks = [place for place, one in enumerate(own) if one == settings.token_id]
        places.append(PlacedImage(key, len(found) + marks[0], marks[-1] + 1 - marks[0]))
        found += own
    return found, places
