"""Names of tools: as the model sees them, and as the API has them."""

from __future__ import annotations

import msgspec


class CallName(msgspec.Struct, frozen=True, omit_defaults=True):
    """Name of a tool in the API. `custom`: its calls have a text instead of arguments."""

    name: str
    namespace: str | None = None
    custom: bool = False


def prompt_name(name: str, namespace: str | None) -> str:
    """Return the name that the model sees: a tool of a namespace has that before its own."""
    if not namespace:
        return name
    return namespace + name if namespace.endswith("__") else f"{namespace}__{name}"
