"""Formats in which models write tool calls and reasoning: parsers to events, and grammars that force calls."""
