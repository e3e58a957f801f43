"""Grammars of structured output: their limits, their compiler, and the vocabulary that they are compiled for."""
