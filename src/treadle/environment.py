"""Environment variables: those of child processes, without secrets of this process, and the user's cache folder."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

KEY_VARIABLE = "TREADLE_API_KEY"
KEYS_VARIABLE = "TREADLE_API_KEYS"
SECRETS = frozenset({KEY_VARIABLE, KEYS_VARIABLE, "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"})
"""API keys, the path of the keys file, and the hub's token. Only the server downloads and checks keys."""


def without_secrets() -> dict[str, str]:
    """Return this process's environment without the variables in SECRETS."""
    return {name: value for name, value in os.environ.items() if name not in SECRETS}


def cache_folder(environment: Mapping[str, str]) -> Path:
    """Return this program's folder in the user's cache."""
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "treadle"
    return Path(environment.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "treadle"
