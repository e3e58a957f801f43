"""Arguments of `Engine.embed`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from ..core.messages import Pooling
from ..errors import InvalidRequest
from ..fronts.embedding_items import read_item
from ..fronts.generation.embedding_inputs import MAX_INPUTS, Input, place_of
from .images import read_message, source_of

ITEM = ("text", "image", "content")
RAW = (bytes, bytearray, memoryview)
"""Sequences of ints that are no token ids: text in these must be decoded first."""


def read_inputs(given: Any) -> list[Input]:
    """Return the inputs, however they were given. Raises InvalidRequest with the place."""
    inputs: Any = [given] if isinstance(given, str | Mapping) or _are_ids(given) else given
    if not isinstance(inputs, Sequence) or isinstance(inputs, RAW) or not inputs:
        raise InvalidRequest(
            "inputs is a text, a list of token ids, a dict with text or image, or a list of these: give one",
            param="inputs",
        )
    if len(inputs) > MAX_INPUTS:
        raise InvalidRequest(f"inputs has {len(inputs)} inputs: give at most {MAX_INPUTS}", param="inputs")
    return [_input(one, place_of("inputs", place, len(inputs))) for place, one in enumerate(inputs)]


def holds_images(given: Any) -> bool:
    """Whether some inputs may hold images, whose reading takes time."""
    return isinstance(given, Mapping) or (
        isinstance(given, list | tuple) and any(isinstance(one, Mapping) for one in given)
    )


def _input(one: Any, at: str) -> Input:
    if isinstance(one, Mapping):
        if unknown := one.keys() - set(ITEM):
            name = min(map(str, unknown))
            raise InvalidRequest(f"{at} has the key {name!r:.80}: known are {', '.join(ITEM)}", param=at)
        return read_item(read_message(one, at), at, source_of)
    if one and (isinstance(one, str) or _are_ids(one)):
        return cast("Input", one)
    raise InvalidRequest(
        f"{at} is {one!r:.80}: it must be text, a list of token ids, or a dict with text or image", param=at
    )


def read_pooling(given: Any) -> Pooling | None:
    """Return the pooling. Raises InvalidRequest for one that is not known."""
    if given is None or given in list(Pooling):
        return None if given is None else Pooling(given)
    raise InvalidRequest(f"pooling is {given!r:.80}: it must be last, mean or cls", param="pooling")


def _are_ids(given: Any) -> bool:
    return (
        isinstance(given, Sequence)
        and not isinstance(given, RAW)
        and bool(given)
        and all(type(one) is int for one in given)
    )
