"""The reason why a model or a machine cannot have something faster."""

from __future__ import annotations


class Unsupported(Exception):
    """A KV backend or a kernel cannot serve this model on this machine. The message is the reason, in words for an
    operator."""
