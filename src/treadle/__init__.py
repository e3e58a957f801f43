"""Treadle serves language models on MLX to many clients at once, on an engine that never wedges.

`treadle.Engine` is the engine for your own asyncio program; `treadle serve` is the server.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .library import Completion, Engine, ToolCall

    __version__: str

__all__ = ["Completion", "Engine", "ToolCall", "__version__"]


def __getattr__(name: str) -> Any:
    """Load the library on first use: `import treadle` alone stays cheap."""
    if name == "__version__":
        from .installation import version

        return version()
    if name in __all__:
        from . import library

        return getattr(library, name)
    raise AttributeError(f"module 'treadle' has no attribute '{name}'")
