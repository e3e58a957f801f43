"""Reader of the options of an answer: its text, its reasoning's summary, additions to it, truncation and metadata."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ....errors import InvalidRequest, UnsupportedParameter
from ...field_checks import checked, one_of, quoted, require_type
from .field_types import INCLUDABLE, MAX_KEY_CHARS, MAX_PAIRS, MAX_VALUE_CHARS, SUMMARIES, TRUNCATIONS, VERBOSITIES


def text_options(value: Any) -> Mapping[str, Any]:
    """Return the members of `text`. Raises InvalidRequest with the place."""
    given: Mapping[str, Any] = {} if value is None else value
    require_type(given, Mapping, "an object with a format", "text")
    one_of(given, "verbosity", VERBOSITIES, "text")
    checked(given, "format", Mapping, "an object with a type", "text")
    return given


def read_summary(reasoning: Any) -> str | None:
    """Return the form of summary that `reasoning` asks for; `generate_summary` is its older name. Raises
    InvalidRequest."""
    given = reasoning if isinstance(reasoning, Mapping) else {}
    newer, older = (one_of(given, key, SUMMARIES, "reasoning") for key in ("summary", "generate_summary"))
    return newer or older


def read_truncation(value: Any) -> str:
    """Return the form of truncation. Raises InvalidRequest."""
    return one_of({"truncation": value}, "truncation", TRUNCATIONS, "") or "disabled"


def read_include(value: Any) -> Sequence[str]:
    """Return the names of additions to the answer. Raises InvalidRequest, and UnsupportedParameter for unknown ones."""
    names: Sequence[Any] = () if value is None else value
    require_type(names, (list, tuple), "an array of names", "include")
    for i, name in enumerate(names):
        if name not in INCLUDABLE:
            place = f"include[{i}]"
            raise UnsupportedParameter(
                f"{place} is {quoted(name, 80)}, which is not supported here: leave it out", param=place
            )
    return names


def read_metadata(value: Any) -> Mapping[str, str]:
    """Return the texts by name that the answer repeats. Raises InvalidRequest."""
    given: Mapping[str, str] = {} if value is None else value
    if not isinstance(given, Mapping) or not all(isinstance(text, str) for text in given.values()):
        raise InvalidRequest("metadata must be an object of texts", param="metadata")
    if len(given) > MAX_PAIRS:
        raise InvalidRequest(f"metadata has {len(given)} keys: give at most {MAX_PAIRS}", param="metadata")
    for key, text in given.items():
        if len(key) > MAX_KEY_CHARS or len(text) > MAX_VALUE_CHARS:
            raise InvalidRequest(
                f"metadata.{key[:MAX_KEY_CHARS]} is too long: keys have at most {MAX_KEY_CHARS} characters, values "
                f"{MAX_VALUE_CHARS}",
                param="metadata",
            )
    return given
