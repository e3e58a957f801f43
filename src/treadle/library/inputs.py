"""Arguments of `Engine.embed`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..core.messages import Pooling
from ..errors import InvalidRequest
from ..fronts.generation.embedding import MAX_INPUTS
from ..fronts.generation.embedding_inputs import Input, place_of


def read_inputs(given: Any) -> list[Input]:
    """Return the inputs, however they were given. Raises InvalidRequest with the place."""
    inputs: Any = [given] if isinstance(given, str) or _are_ids(given) else given
    if not isinstance(inputs, Sequence) or isinstance(inputs, bytes) or not inputs:
        raise InvalidRequest("inputs is a text, a list of token ids, or a list of either: give one", param="inputs")
    if len(inputs) > MAX_INPUTS:
        raise InvalidRequest(f"inputs has {len(inputs)} inputs: give at most {MAX_INPUTS}", param="inputs")
    for place, one in enumerate(inputs):
        if not one or not (isinstance(one, str) or _are_ids(one)):
            param = place_of("inputs", place, len(inputs))
            raise InvalidRequest(f"{param} is {one!r:.80}: it must be text or a list of token ids", param=param)
    return list(inputs)


def read_pooling(given: Any) -> Pooling | None:
    """Return the pooling. Raises InvalidRequest for one that is not known."""
    if given is None or given in list(Pooling):
        return None if given is None else Pooling(given)
    raise InvalidRequest(f"pooling is {given!r:.80}: it must be last, mean or cls", param="pooling")


def _are_ids(given: Any) -> bool:
    return (
        isinstance(given, Sequence)
        and not isinstance(given, bytes)
        and bool(given)
        and all(type(one) is int for one in given)
    )
