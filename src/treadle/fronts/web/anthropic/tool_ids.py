"""Ids of tool calls. Anthropic's have letters, digits, `_` and `-` only.

Some models write ids of their own with other characters (`functions.weather:0`), and read them in their prompts. Such
an id is spelled in hexadecimal for the client, and as the model wrote it when the client sends it back.
"""

from __future__ import annotations

import re
import secrets

PREFIX = "toolu_"
SPELLED = f"{PREFIX}own_"
_VALID = re.compile("[a-zA-Z0-9_-]+")


def id_for_client(own: str | None) -> str:
    """Return the id of a call for the client: the model's `own`, or a new one."""
    if not own:
        return PREFIX + secrets.token_hex(12)
    return own if _VALID.fullmatch(own) else SPELLED + own.encode("utf-8", "replace").hex()


def id_for_model(given: str) -> str:
    """Return the id that a client sent as the model has it."""
    if not given.startswith(SPELLED):
        return given
    try:
        return bytes.fromhex(given.removeprefix(SPELLED)).decode("utf-8")
    except ValueError:
        return given
