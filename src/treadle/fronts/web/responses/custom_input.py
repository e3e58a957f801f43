"""Reader of a custom tool's input: models write it as the JSON arguments `{"input": "text"}`, clients get the text."""

from __future__ import annotations

import json
import re

from ....text.json_escapes import with_whole_pairs

_START = re.compile(r'\s*\{\s*"input"\s*:\s*"')
_WHOLE = re.compile(
    r'(?:[^"\\]'
    r"|\\[^u]"
    r"|\\u(?![dD][89abAB])[0-9a-fA-F]{4}"
    r"|\\u[dD][89abAB][0-9a-fA-F]{2}(?:\\u[0-9a-fA-F]{4}|(?=[^\\]|\\[^u]))"
    r")*"
)
"""Characters of a JSON string up to its end, or to an escape that is not whole: one of a surrogate pair has two
halves."""


class CustomInput:
    """The text in a call's arguments, as they come."""

    def __init__(self) -> None:
        self._unread = ""
        self._begun = False  # the beginning of the object has been read
        self._texts: list[str] = []

    @property
    def text(self) -> str:
        return "".join(self._texts)

    def push(self, delta: str) -> str:
        """Read a piece of the arguments. Return the text that it completes."""
        self._unread += delta
        if not self._begun and (start := _START.match(self._unread)) is not None:
            self._begun, self._unread = True, self._unread[start.end() :]
        return self._read() if self._begun else ""

    def finish(self) -> str:
        """Return the rest of the text. Arguments of another form are its text as they stand, or their one string."""
        if self._begun:
            return ""
        self._texts = [_other_form(self._unread)]
        return self.text

    def _read(self) -> str:
        whole = _WHOLE.match(self._unread)
        assert whole is not None
        new: str = json.loads(f'"{with_whole_pairs(whole.group())}"', strict=False)
        self._unread = self._unread[whole.end() :]
        self._texts.append(new)
        return new


def _other_form(arguments: str) -> str:
    try:
        value = json.loads(with_whole_pairs(arguments))
    except (ValueError, RecursionError):
        return arguments
    if isinstance(value, str):
        return value
    values = list(value.values()) if isinstance(value, dict) else []
    return values[0] if len(values) == 1 and isinstance(values[0], str) else arguments
