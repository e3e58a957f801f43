"""Limits of llguidance's parser. Text workers and the owner use the same ones: what one accepts the other accepts."""

from __future__ import annotations

from llguidance import LLParserLimits

LIMITS = LLParserLimits(
    initial_lexer_fuel=500_000,
    step_lexer_fuel=100_000,
    max_lexer_states=100_000,
    max_grammar_size=200_000,
    verbose_errors=False,
)
"""Limits of a grammar, and of the states that its lexer builds while tokens are generated.

They are about half of llguidance's own and leave room above what large schemas need: 1,000 tools need over 50,000
symbols and 100,000 units of initial fuel; bounded strings over a vocabulary of 262,144 tokens up to 20,000 states.
100,000 states take 50 to 80 MB. Verbose errors would repeat the whole grammar to the client.
"""
