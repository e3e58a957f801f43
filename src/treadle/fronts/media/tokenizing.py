"""Tokenizing of prompts with images: once to learn which are needed, and again with the layouts of those."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Protocol, TypeVar

from ...text.images import Layout
from ...text.images.families import NO_TOWER
from ..validate import Limits
from .needed import NeededImage
from .parts import check_images

if TYPE_CHECKING:
    from .service import HeldImages, RequestImages

Layouts = dict[bytes, Layout]
ImagesOf = Callable[[], "RequestImages | None"]
"""Returns what prepares the images of a request; None where none are read."""


class NeedsImages(Protocol):
    """Result of a text worker. `needed`: it is none yet, as the layouts of these images are needed for it."""

    @property
    def needed(self) -> Sequence[NeededImage]: ...


Result = TypeVar("Result", bound=NeedsImages)


def no_images() -> None:
    """Prepare no images (`ImagesOf`)."""


@asynccontextmanager
async def with_images(
    tokenize: Callable[[Layouts], Awaitable[Result]], images: ImagesOf, limits: Limits, prompts: int = 1
) -> AsyncIterator[tuple[Result, HeldImages | None]]:
    """Give what `tokenize` returns of `prompts` prompts with the layouts of all images; and the images, None where
    there are none. The caller releases them; where the block raises, they are released.

    Raises UnsupportedParameter where no images are read, and as `RequestImages.prepare` and `tokenize` do.
    """
    found = await tokenize({})
    if not found.needed:
        yield found, None
        return
    source = images()
    if source is None or limits.no_images:
        check_images([found.needed[0].at], None, limits.no_images or NO_TOWER, limits.context)
    assert source is not None
    held = await source.prepare(found.needed, limits.context, prompts)
    try:
        yield await tokenize(held.layouts), held
    except BaseException:
        held.release()
        raise
