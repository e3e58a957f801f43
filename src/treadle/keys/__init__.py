"""API keys: names, hashes, scopes and limits. No key is stored in clear text."""

from __future__ import annotations

from .ring import ALL, SINGLE, Key, KeyLimits, Keyring, Scope, digest, new_key, single_key
from .source import KeySource

__all__ = ["ALL", "SINGLE", "Key", "KeyLimits", "KeySource", "Keyring", "Scope", "digest", "new_key", "single_key"]
