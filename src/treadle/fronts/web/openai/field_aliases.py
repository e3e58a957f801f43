"""Aliases of fields in other servers, such as Ollama's `options`, mapped to the names that the validator knows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ....errors import InvalidRequest
from ..neutral_fields import refuse_beyond_neutral
from .ignored_fields import OPTIONS_NEUTRAL
from .schema import UNLIMITED, Generate

OTHER_NAMES: Mapping[str, tuple[str, ...]] = {
    "temperature": ("options.temperature",),
    "top_p": ("options.top_p",),
    "top_k": ("options.top_k",),
    "min_p": ("options.min_p",),
    "seed": ("options.seed",),
    "stop": ("options.stop",),
    "presence_penalty": ("options.presence_penalty",),
    "frequency_penalty": ("options.frequency_penalty",),
    "repetition_penalty": ("repeat_penalty", "options.repeat_penalty"),
    "max_tokens": ("max_new_tokens", "num_predict", "n_predict", "options.num_predict"),
    "num_ctx": ("options.num_ctx",),
    "repeat_last_n": ("options.repeat_last_n",),
}
"""Precedence of names: a field's own, then other servers', then those in `options`."""

LIMITS_THAT_MAY_BE_OFF = ("num_predict", "n_predict", "options.num_predict")


class Renamed:
    """Values of a request's shared fields. `names` maps a field to the name that the request used for it, if that
    differs; `unused` holds overridden values, as (field, name, value): they must be in range all the same.

    Raises InvalidRequest for a limit of zero under a name that has other values for no limit, UnsupportedParameter for
    what is not served in `options`.
    """

    def __init__(self, body: Generate) -> None:
        if body.options is not None:
            refuse_beyond_neutral(body.options.model_dump(), OPTIONS_NEUTRAL, "options.")
        self._body = body
        self.names: dict[str, str] = {}
        self.unused: list[tuple[str, str, Any]] = []
        self._values = {field: self._chosen(field) for field in OTHER_NAMES}

    def __getitem__(self, field: str) -> Any:
        return self._values[field]

    def _chosen(self, field: str) -> Any:
        (name, value), *rest = [*self._values_given(field), (field, None)]
        if name != field:
            self.names[field] = name
        self.unused += [(field, name, value) for name, value in rest if value is not None]
        return value

    def _values_given(self, field: str) -> Iterator[tuple[str, Any]]:
        for name in (field, *OTHER_NAMES[field]):
            parent, _, key = name.rpartition(".")
            holder = getattr(self._body, parent) if parent else self._body
            value = getattr(holder, key, None)
            if name in LIMITS_THAT_MAY_BE_OFF:
                value = _limit(name, value)
            if value is not None:
                yield name, value


def _limit(name: str, value: int | None) -> int | None:
    if value in UNLIMITED:
        return None
    if value is not None and value < 1:
        raise InvalidRequest(f"{name} is {value}: it must be at least 1, or -1 for no limit", param=name)
    return value
