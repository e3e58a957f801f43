"""Limits of llguidance's parser. Text workers and the owner use the same ones: what one accepts the other accepts."""

from __future__ import annotations

from llguidance import LLParserLimits

LIMITS = LLParserLimits(verbose_errors=False)
"""llguidance's own limits. Its verbose errors would repeat the whole grammar to the client."""
