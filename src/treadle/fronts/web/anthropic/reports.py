"""Lines in the log about parts of requests that were left out: each part once, and a bounded number of them."""

from __future__ import annotations

import logging
from collections.abc import Iterable

log = logging.getLogger(__name__)

MOST = 64


class Reports:
    """Log of the parts that were left out so far. Lives on the event loop."""

    def __init__(self) -> None:
        self._reported: set[str] = set()

    def unknown_fields(self, names: Iterable[str]) -> None:
        """Log fields that this server does not know."""
        for name in names:
            if self._is_new(name):
                log.warning(
                    "the field %r of a request to Anthropic's Messages is not known here and was ignored: leave it "
                    "out, or use a field of docs/anthropic.md",
                    name,
                )

    def left_out_tools(self, kinds: Iterable[str]) -> None:
        """Log searches among tools."""
        for kind in kinds:
            if self._is_new(kind):
                log.warning(
                    "the tool %r was left out of a request to Anthropic's Messages: this server has no search among "
                    "tools, and describes all of them in the prompt, deferred ones too",
                    kind,
                )

    def _is_new(self, part: str) -> bool:
        if part in self._reported or len(self._reported) >= MOST:
            return False
        self._reported.add(part)
        return True


REPORTS = Reports()
"""Log of this process."""
