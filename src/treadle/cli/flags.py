"""Names of the settings as command-line flags, for messages."""

from __future__ import annotations

from ..config import Settings

FLAGS = {name: f"--{name.replace('_', '-')}" for name in Settings.names()} | {
    "model": "MODEL",
    "api_key": "--api-key (or TREADLE_API_KEY)",
    "api_keys": "--api-keys (or TREADLE_API_KEYS)",
}
