"""Lines in the log about parts of requests that were left out: each part once, and a bounded number of them."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from ...log_once import LogOnce
from ..unknown_fields import report_unknown_fields

log = logging.getLogger(__name__)


class Reports:
    """Log of the parts that were left out so far. Lives on the event loop."""

    def __init__(self) -> None:
        self._once = LogOnce(log)

    def unknown_fields(self, names: Iterable[str]) -> None:
        """Log fields that this server does not know."""
        report_unknown_fields(self._once, names, "Anthropic's Messages", "docs/anthropic.md")

    def left_out_tools(self, kinds: Iterable[str]) -> None:
        """Log searches among tools."""
        for kind in kinds:
            self._once.warn(
                kind,
                "the tool %r was left out of a request to Anthropic's Messages: this server has no search among tools, "
                "and describes all of them in the prompt, deferred ones too",
                kind,
            )


REPORTS = Reports()
"""Log of this process."""
