"""Inputs of a request for embeddings that are in memory: texts, token ids, and messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from ...errors import ContextLengthExceeded, InvalidRequest, beyond_context
from ...text import TextView
from ...text.images.prompt import PlacedImage, images_of, without_images
from ..media.needed import NeededImage, needed_image
from ..media.parts import check_images, size_with_images
from ..media.tokenizing import ImagesOf, Layouts, no_images, with_images
from ..prepared import PreparedPrompts
from ..text_jobs import TextJobRunner, TextParams, ids_of, text_counted, tokenize_messages
from ..validate import Limits, check_prompt_ids

MAX_INPUTS = 2048

Turn = Mapping[str, Any]
Input = str | Sequence[int] | Turn


@dataclass(frozen=True)
class ListedInputs:
    """Texts, for which special tokens are added as the tokenizer does, lists of token ids, and turns of the user as
    `read_turns` returns them. `param` is the field that refusals name. `images` returns what prepares images."""

    inputs: Sequence[Input]
    param: str = "input"
    images: ImagesOf = no_images

    def __len__(self) -> int:
        return len(self.inputs)

    def size(self, text: TextView, limits: Limits) -> int:
        size = images = 0
        for place, one in enumerate(self.inputs):
            if isinstance(one, str):
                size += max(1, int(len(one.encode("utf-8", "surrogatepass")) / text.bytes_per_token))
            elif isinstance(one, Mapping):
                places = [source.at for source in images_of([one])]
                check_images(places, text.images, limits.no_images or text.no_images, limits.context)
                size += _size_of_turn(one, text)
                images += len(places)
            else:
                check_prompt_ids(one, limits, place_of(self.param, place, len(self)))
                size += len(one)
        return size_with_images(size, images, text.images, limits, self.param, len(self))

    async def tokenize(self, pool: TextJobRunner, limits: Limits, tenant: str) -> PreparedPrompts:
        async with with_images(partial(self._all, pool, limits, tenant), self.images, limits, len(self)) as (
            all_,
            held,
        ):
            return PreparedPrompts(all_.ids, places=all_.places).with_images(held)

    async def _all(self, pool: TextJobRunner, limits: Limits, tenant: str, layouts: Layouts) -> _Tokens:
        """Return the tokens of all inputs, or the images that are needed for them."""
        sources = {source.key: source for source in images_of([one for one in self.inputs if isinstance(one, Mapping)])}
        if not sources.keys() <= layouts.keys():
            return _Tokens(needed=[needed_image(source) for source in sources.values()])
        found = [
            await self._one(one, place_of(self.param, place, len(self)), pool, limits, tenant, layouts)
            for place, one in enumerate(self.inputs)
        ]
        return _Tokens([ids for ids, _ in found], [places for _, places in found])

    async def _one(
        self, one: Input, param: str, pool: TextJobRunner, limits: Limits, tenant: str, layouts: Layouts
    ) -> tuple[Sequence[int], Sequence[PlacedImage]]:
        if isinstance(one, Mapping):
            given = TextParams(limits.context, param, layouts=layouts)
            found = await tokenize_messages(pool, [dict(one)], given, tenant)
        elif isinstance(one, str):
            found = await text_counted(pool, one, limits, tenant, param)
        else:
            check_count(len(one), limits, param)
            return one, ()
        check_count(found.counts[0], limits, param)
        return ids_of(found.ids[0]), found.places[0] if found.places else ()


@dataclass(frozen=True)
class _Tokens:
    """Token ids and places of images of all inputs, or the images that are needed for them (`NeedsImages`)."""

    ids: Sequence[Sequence[int]] = ()
    places: Sequence[Sequence[PlacedImage]] = ()
    needed: Sequence[NeededImage] = ()


def _size_of_turn(turn: Turn, text: TextView) -> int:
    """Return about how many tokens a turn has, without its images."""
    written = str(without_images(turn["content"])).encode("utf-8", "surrogatepass")
    return 1 + int(len(written) / text.bytes_per_token)


def place_of(param: str, place: int, inputs: int) -> str:
    """Return the name of an input in refusals."""
    return param if inputs == 1 else f"{param}[{place}]"


def check_count(count: int, limits: Limits, param: str) -> None:
    """Raise InvalidRequest for an input of no tokens, ContextLengthExceeded for one beyond the context."""
    if not count:
        raise InvalidRequest(f"{param} has no tokens: give text that has some", param=param)
    if count > limits.context:
        excess = f"{param} has {count} tokens. Please reduce its length."
        raise ContextLengthExceeded(beyond_context(limits.context, excess), param=param)
