"""Treadle without a server: one engine in your own asyncio program."""

from __future__ import annotations

from .completion import Completion, ToolCall
from .engine import Engine

__all__ = ["Completion", "Engine", "ToolCall"]
