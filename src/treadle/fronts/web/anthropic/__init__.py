"""Anthropic's dialect: Messages, the counting of their tokens, and models in its shape."""
