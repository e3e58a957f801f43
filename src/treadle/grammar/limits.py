"""Limits of llguidance's parser. Text workers and the owner use the same ones: what one accepts the other accepts."""

from __future__ import annotations

from llguidance import LLParserLimits


def _limits(max_grammar_size: int) -> LLParserLimits:
    return LLParserLimits(
        max_items_in_row=2_500,
        step_max_items=200_000,
        initial_lexer_fuel=500_000,
        step_lexer_fuel=100_000,
        max_lexer_states=100_000,
        max_grammar_size=max_grammar_size,
        verbose_errors=False,
    )


LIMITS = _limits(200_000)
"""Limits of a grammar, and of the states that its lexer builds while tokens are generated.

Items are what the parser follows at once: 500 optional properties need up to 200,000 in one bitmask, which takes 5 to
10 ms; llguidance's own limit ends at 250. The time of a row grows with the square of its items: 2,500 take 10 ms. The
other limits are about half of llguidance's own and leave room above what large schemas need: 1,000 tools need over
50,000 symbols and 100,000 units of initial fuel; bounded strings over a vocabulary of 262,144 tokens up to 20,000
states. 100,000 states take 50 to 80 MB. Verbose errors would repeat the whole grammar to the client.
"""

WRITTEN = _limits(20_000)
"""Limits of grammars that are not made from schemas: one of 20,000 optional parts takes seconds."""
