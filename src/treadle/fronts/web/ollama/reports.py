"""Lines in the log about fields of requests that were ignored: each name once, and a bounded number of them."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from ...log_once import LogOnce

log = logging.getLogger(__name__)
_once = LogOnce(log)


def report_unknown(names: Iterable[str]) -> None:
    """Log fields that this server does not know."""
    for name in names:
        _once.warn(
            name,
            "the field %r of a request to Ollama's API is not known here and was ignored: leave it out, or use a field "
            "of docs/ollama.md",
            name,
        )
