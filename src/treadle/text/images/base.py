"""Settings that all families of vision models have, and the layout of a preprocessed image."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

import msgspec
from msgspec import Meta

LARGEST_SIDE = 1 << 14
LARGEST_AREA = 1 << 26
LOW_SIDE = 512
"""Pixels of a side that an image with `detail: low` is shown with at most, where a family has a choice."""

Count = Annotated[int, Meta(gt=0, le=4096)]
Side = Annotated[int, Meta(gt=0, le=LARGEST_SIDE)]
Area = Annotated[int, Meta(gt=0, le=LARGEST_AREA)]
Positive = Annotated[float, Meta(gt=0, le=1e4)]
Channels = tuple[float, float, float]
Deviations = tuple[Positive, Positive, Positive]
Filter = Annotated[int, Meta(ge=0, le=5)]
Token = Annotated[str, Meta(min_length=1, max_length=256)]

HALF: Channels = (0.5, 0.5, 0.5)

# Pillow's numbers of resampling filters, which preprocessor_config.json uses too.
LANCZOS, BILINEAR, BICUBIC = 1, 2, 3


class Layout(msgspec.Struct, frozen=True, array_like=True):
    """What a prompt needs to know of a preprocessed image. `grid` holds the size of each view, as `core.image.Image`
    has it; `tiles` are the rows and columns that the image was cut into (0 for none)."""

    grid: tuple[tuple[int, ...], ...] = ()
    tiles: tuple[int, int] = (0, 0)


class ImageSettings(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Settings of one model's images. `token`: the text of the token that a feature of the tower replaces, with the id
    `token_id`. `placeholder`: the text that the chat template writes for an image, a token too. `of_tower` maps fields
    to those of vision_config, or of config.json itself, that have to be the same."""

    of_tower: ClassVar[Mapping[str, str]] = {}

    token: Token
    token_id: int
    placeholder: Token
    placeholder_id: int
    mean: Channels = HALF
    std: Deviations = HALF
    scale: Positive = 1 / 255
    rescales: bool = True
    normalizes: bool = True
    resample: Filter = BICUBIC

    @property
    def typical_tokens(self) -> int:
        """Tokens of a usual image, for estimates."""
        raise NotImplementedError

    @property
    def least_tokens(self) -> int:
        """Tokens that any image has at least."""
        return 1

    def text(self, layout: Layout) -> str:
        """Return the text that stands for an image, in place of the placeholder."""
        raise NotImplementedError

    def contradiction(self, config: Mapping[str, Any], vision: Mapping[str, Any]) -> str:
        """Return how the tower that `config` makes, with its vision_config `vision`, differs beyond `of_tower`; empty
        where it does not, or where they do not tell."""
        return ""

    @property
    def literal_tokens(self) -> tuple[str, ...]:
        """Tokens of an image's text that a client's text must not contain as tokens, besides special ones."""
        return (self.token, self.placeholder)


def counts(values: Mapping[str, Any], *names: str) -> list[int]:
    """Return the values of these names; none where one is no whole number above zero."""
    found = [values.get(name) for name in names]
    return found if all(type(value) is int and value > 0 for value in found) else []  # type: ignore[return-value]


def other_tokens(features: int, tokens: int) -> str:
    """Return how a tower with `features` for a view differs from `tokens`; empty where it does not."""
    if features == tokens:
        return ""
    return f"a view of an image has {features} features by config.json, and {tokens} tokens by the image settings"


class ClipSettings(ImageSettings, frozen=True, kw_only=True):
    """Settings of a family whose colours are CLIP's, unless its folder has others."""

    mean: Channels = (0.48145466, 0.4578275, 0.40821073)
    std: Deviations = (0.26862954, 0.26130258, 0.27577711)


def common_fields(raw: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of all families in preprocessor_config.json, by our names."""
    names = {
        "image_mean": "mean",
        "image_std": "std",
        "rescale_factor": "scale",
        "do_rescale": "rescales",
        "do_normalize": "normalizes",
        "resample": "resample",
    }
    return {ours: raw[theirs] for theirs, ours in names.items() if raw.get(theirs) is not None}


def given(raw: dict[str, Any], **names: str) -> dict[str, Any]:
    """Return the values of `raw` that are not null, by our names: `given(raw, patch="patch_size")`."""
    return {ours: raw[theirs] for ours, theirs in names.items() if raw.get(theirs) is not None}


def side_of(value: Any) -> Any:
    """Return the side of a square that is given as a number, as a pair, or by its height."""
    if isinstance(value, dict):
        return value.get("height") or value.get("longest_edge") or value.get("shortest_edge")
    return value[0] if isinstance(value, list) and value else value


def size_of(value: Any) -> dict[str, Any]:
    """Return a size as an object, also one that is given as a number."""
    if isinstance(value, dict):
        return value
    return {} if value is None else {"height": side_of(value), "width": side_of(value)}
