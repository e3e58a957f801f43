"""A prompt of token ids with images, as gateways send it (`generation.prompts.Prompts`)."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from ...text import TextView
from ...text.images import ImageSource
from ...text.images.anchors import check_anchors
from ...text.images.families import NO_TOWER
from ..prepared import PreparedPrompts
from ..text_jobs import TextJobRunner, expand_images, prompts_of
from ..validate import Limits, ValidatedRequest, check_prompt_ids
from .needed import needed_image
from .parts import check_images, size_with_images
from .service import RequestImages


@dataclass(frozen=True)
class MediaPrompt:
    """Token ids with one placeholder for each of `sources`, which `images` prepares."""

    ids: Sequence[int]
    sources: Sequence[ImageSource]
    images: RequestImages | None
    param: str = "input"

    def __len__(self) -> int:
        return 1

    def size(self, text: TextView, limits: Limits) -> int:
        places = [source.at for source in self.sources]
        check_images(places, text.images, limits.no_images or ("" if self.images else NO_TOWER), limits.context)
        assert text.images is not None
        check_prompt_ids(self.ids, limits, self.param)
        check_anchors(self.ids, text.images, len(places), self.param)
        return size_with_images(len(self.ids) - len(places), len(places), text.images, limits, self.param)

    async def tokenize(
        self, pool: TextJobRunner, params: ValidatedRequest, limits: Limits, tenant: str
    ) -> PreparedPrompts:
        assert self.images is not None
        needed = await asyncio.to_thread(lambda: [needed_image(source) for source in self.sources])
        held = await self.images.prepare(needed, limits.context)
        try:
            layouts = held.layouts
            images = [(source.key, layouts[source.key]) for source in self.sources]
            found = await expand_images(pool, self.ids, images, limits, tenant)
            return prompts_of(found, params, limits, self.param).with_images(held)
        except BaseException:
            held.release()
            raise
