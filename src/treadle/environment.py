"""Environment variables for child processes, without the secrets of this process."""

from __future__ import annotations

import os

KEY_VARIABLE = "TREADLE_API_KEY"
KEYS_VARIABLE = "TREADLE_API_KEYS"
SECRETS = frozenset({KEY_VARIABLE, KEYS_VARIABLE, "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"})
"""API keys, the path of the keys file, and the hub's token. Only the server downloads and checks keys."""


def without_secrets() -> dict[str, str]:
    """Return this process's environment without the variables in SECRETS."""
    return {name: value for name, value in os.environ.items() if name not in SECRETS}
