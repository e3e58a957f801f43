"""Faults of matchers: tokens that do not follow a grammar, and failures of llguidance itself.

A failure of llguidance leaves the lexer unusable, and matchers that are copies of one another share it. So the grammar
is then compiled anew for later sequences.
"""

from __future__ import annotations

import logging
import re

from llguidance import LLMatcher

from ..errors import one_line

log = logging.getLogger(__name__)

FAILED = "llguidance itself fails on it: use a simpler schema or grammar"
"""What a client is told of a failure of llguidance, whose own text is of use to developers alone."""
_FAILURE = re.compile(r"\bpanic\b|PoisonError")


def fault_of_matcher(matcher: LLMatcher) -> str:
    """Return why a matcher can't go on, as one line."""
    text = one_line(matcher.get_error().partition("<backtrace>")[0])
    if not _FAILURE.search(text):
        return text
    log.error("llguidance failed on a grammar, and its request fails; report it with the request: %s", text)
    return FAILED


def has_failed(fault: str) -> bool:
    """Whether a fault, or a message with it, is a failure of llguidance."""
    return FAILED in fault
