"""Environment of processes that this one starts: without the secrets that only this one needs."""

from __future__ import annotations

import os

KEY_VARIABLE = "TREADLE_API_KEY"
KEYS_VARIABLE = "TREADLE_API_KEYS"
SECRETS = frozenset({KEY_VARIABLE, KEYS_VARIABLE, "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"})
"""API keys, where their hashes are, and the hub's token: downloads and the checks of keys happen in the server."""


def without_secrets() -> dict[str, str]:
    """This process's environment but for SECRETS."""
    return {name: value for name, value in os.environ.items() if name not in SECRETS}
