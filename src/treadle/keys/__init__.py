"""API keys: who may call the server, as what, and how much. No key is kept in clear."""

from __future__ import annotations

from .ring import ALL, SINGLE, Key, KeyLimits, Keyring, Scope, digest, new_key, single_key
from .source import KeySource

__all__ = ["ALL", "SINGLE", "Key", "KeyLimits", "KeySource", "Keyring", "Scope", "digest", "new_key", "single_key"]
