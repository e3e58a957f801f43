"""Lines in the log about fields of requests that were ignored: each name once, and a bounded number of them."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from ...log_once import LogOnce
from ..unknown_fields import report_unknown_fields

log = logging.getLogger(__name__)
_once = LogOnce(log)


def report_unknown(names: Iterable[str]) -> None:
    """Log fields that this server does not know."""
    report_unknown_fields(_once, names, "Ollama's API", "docs/ollama.md")
