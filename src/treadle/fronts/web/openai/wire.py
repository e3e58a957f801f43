"""What answers look like: choices, log-probabilities and usage, as JSON built with little work per token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from ....core.messages import TokenLogprob
from ....text import TextView, TokenEntry
from ...rows import Piece

LOWEST_LOGPROB = -9999.0  # what clients know as "never": JSON has no -inf

encode = msgspec.json.encode


@dataclass(slots=True)
class Usage:
    """Token counts of a whole request: every prompt once, every choice's completion."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0

    def as_json(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


@dataclass(frozen=True)
class Head:
    """What every chunk and answer of one request repeats."""

    id: str
    created: int
    model: str
    fingerprint: str

    def fields(self, kind: str) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
        }


class ChunkWriter:
    """Events of one stream: the parts that never change are encoded once."""

    def __init__(self, head: Head, kind: str, *, with_usage: bool) -> None:
        self._start = b"data: " + encode(head.fields(kind))[:-1] + b',"choices":['
        self._end = b'],"usage":null}\n\n' if with_usage else b"]}\n\n"

    def choice(self, choice: dict[str, Any]) -> bytes:
        return self._start + encode(choice) + self._end

    def usage(self, usage: Usage) -> bytes:
        return self._start + b'],"usage":' + encode(usage.as_json()) + b"}\n\n"


@dataclass(slots=True)
class Choice:
    """One choice as far as it has come, for answers that are sent whole."""

    text: list[str] = field(default_factory=list)
    entries: list[TokenEntry] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    prompt_logprobs: tuple[TokenLogprob, ...] = ()

    def add(self, piece: Piece) -> None:
        self.prompt_logprobs += piece.prompt_logprobs
        self.text.append(piece.text)
        self.entries.extend(piece.entries)
        self.token_ids.extend(piece.token_ids)
        self.finish_reason = piece.finish_reason


def chat_logprobs(entries: Sequence[TokenEntry], model: TextView) -> dict[str, Any]:
    """The chat format: one object per token, with its bytes."""
    return {"content": [_chat_entry(entry, model) for entry in entries], "refusal": None}


def _chat_entry(entry: TokenEntry, model: TextView) -> dict[str, Any]:
    top = [_token(token, logprob, model) for token, logprob in entry.logprob.top]
    return {**_token(entry.token, entry.logprob.logprob, model), "top_logprobs": top}


def _token(token: int, logprob: float, model: TextView) -> dict[str, Any]:
    return {
        "token": model.token_text(token),
        "logprob": max(logprob, LOWEST_LOGPROB),
        "bytes": list(model.token_bytes(token)),
    }


def legacy_logprobs(entries: Sequence[TokenEntry], model: TextView, *, top: bool, offset: int = 0) -> dict[str, Any]:
    """The completions format: four parallel lists; `offset` is where the answer begins in the text."""
    return {
        "tokens": [model.token_text(entry.token) for entry in entries],
        "token_logprobs": [max(entry.logprob.logprob, LOWEST_LOGPROB) for entry in entries],
        "top_logprobs": [_legacy_top(entry, model) for entry in entries] if top else None,
        "text_offset": [offset + entry.text_offset for entry in entries],
    }


def _legacy_top(entry: TokenEntry, model: TextView) -> dict[str, float]:
    """Best first; the chosen token is always in it."""
    found: dict[str, float] = {}
    for token, logprob in (*entry.logprob.top, (entry.token, entry.logprob.logprob)):
        found.setdefault(model.token_text(token), max(logprob, LOWEST_LOGPROB))
    return found
