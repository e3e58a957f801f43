"""Answers in Ollama's form: lines of JSON, of which the last has the counts and durations."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, Protocol

import msgspec

from ....errors import TreadleError
from ....text import TextView, TokenEntry
from ....text.events import CallArguments, CallEnd, CallStart, Event, Reasoning, Text
from ...generation.pieces import Piece, Usage
from ..call_arguments import raw_arguments
from ..error_shapes import ollama_error
from ..parsed import Head
from ..token_logprobs import token_json

NS = 1_000_000_000


def encode_line(line: dict[str, Any]) -> bytes:
    return msgspec.json.encode(line) + b"\n"


def timestamp(seconds: float | None = None) -> str:
    """Return a time in RFC 3339, by default now; `seconds` are since 1970."""
    moment = datetime.now(UTC) if seconds is None else datetime.fromtimestamp(seconds, UTC)
    return moment.isoformat(timespec="microseconds").replace("+00:00", "Z")


def parts_of(events: Sequence[Event]) -> dict[str, Any]:
    """Return the content, thinking and complete tool calls of events that belong to one message."""
    calls = Calls()
    found = [call for event in events if (call := calls.add(event)) is not None]
    thinking = "".join(event.text for event in events if isinstance(event, Reasoning))
    parts: dict[str, Any] = {"content": "".join(event.text for event in events if isinstance(event, Text))}
    if thinking:
        parts["thinking"] = thinking
    return parts | ({"tool_calls": found} if found else {})


class Calls:
    """Tool calls whose arguments have begun: this API sends a call when it is complete, with its arguments as an
    object. A call that the limit of tokens cut off is not sent."""

    def __init__(self) -> None:
        self._starts: dict[int, CallStart] = {}
        self._arguments: dict[int, list[str]] = {}

    def add(self, event: Event) -> dict[str, Any] | None:
        """Return a call that `event` completes."""
        if isinstance(event, CallStart):
            self._starts[event.index] = event
            self._arguments[event.index] = []
        elif isinstance(event, CallArguments):
            self._arguments[event.index].append(event.delta)
        elif isinstance(event, CallEnd):
            return self._complete(event.index)
        return None

    def _complete(self, index: int) -> dict[str, Any]:
        start = self._starts[index]
        arguments = raw_arguments("".join(self._arguments.pop(index)))
        call_id = {"id": start.id} if start.id else {}
        return {**call_id, "function": {"index": index, "name": start.name, "arguments": arguments}}


def logprobs_of(entries: Sequence[TokenEntry], text: TextView) -> dict[str, Any]:
    """Return the member `logprobs` of a line; no member for no entries."""
    return {"logprobs": [token_json(entry, text) for entry in entries]} if entries else {}


def last_line(head: Head, reason: str | None, usage: Usage) -> dict[str, Any]:
    """Return the members of the last line except the message's."""
    return {"model": head.model, "created_at": timestamp(), "done": True, "done_reason": reason} | _counts(head, usage)


def _counts(head: Head, usage: Usage) -> dict[str, Any]:
    """Return token counts, and durations in nanoseconds: in all, up to the first token, and from there on."""
    own = {"prompt_eval_count": usage.prompt_tokens, "eval_count": usage.completion_tokens}
    counts = own | usage.prompt_details
    record = head.record
    if record is None:
        return counts
    total = time.monotonic() - record.started
    first = total if record.ttft_s is None else min(record.ttft_s, total)
    waited = min(record.wait_s or 0.0, first)
    return {
        "total_duration": round(total * NS),
        "load_duration": 0,
        "prompt_eval_duration": round((first - waited) * NS),
        "eval_duration": round((total - first) * NS),
        **counts,
    }


class Form(Protocol):
    """Form of the answers of one route."""

    def body(self, parts: dict[str, Any]) -> dict[str, Any]:
        """Return the members of a line that hold `parts` of an answer: content, thinking, tool_calls."""
        ...

    def events_of(self, part: Piece) -> Sequence[Event]: ...


class AnswerLines:
    """Writer of a stream: a line for each event that shows something, and the last with the counts."""

    def __init__(self, request: Form, head: Head, text: TextView) -> None:
        self._request = request
        self._head = head
        self._text = text
        self._calls = Calls()
        self._reason: str | None = None

    def start(self, usage: Usage) -> bytes:
        return b""

    def first(self, index: int, piece: Piece) -> bytes:
        return b""

    def piece(self, index: int, piece: Piece) -> bytes:
        self._reason = piece.finish_reason or self._reason
        lines = b""
        logprobs = logprobs_of(piece.entries, self._text)
        for parts in self._parts(self._request.events_of(piece)):
            lines += self._line(parts, logprobs)
            logprobs = {}
        if logprobs:
            lines += self._line({"content": ""}, logprobs)
        return lines

    def _parts(self, events: Sequence[Event]) -> list[dict[str, Any]]:
        """Return a message for each event that shows something, in order."""
        found: list[dict[str, Any]] = []
        for event in events:
            call = self._calls.add(event)
            if isinstance(event, Text):
                found.append({"content": event.text})
            elif isinstance(event, Reasoning):
                found.append({"content": "", "thinking": event.text})
            elif call is not None:
                found.append({"content": "", "tool_calls": [call]})
        return found

    def _line(self, parts: dict[str, Any], more: dict[str, Any]) -> bytes:
        head = {"model": self._head.model, "created_at": timestamp()}
        return encode_line({**head, **self._request.body(parts), "done": False, **more})

    def end(self, usage: Usage) -> bytes:
        return encode_line(last_line(self._head, self._reason, usage) | self._request.body({"content": ""}))

    def error(self, error: TreadleError, usage: Usage) -> bytes:
        return encode_line(ollama_error(error))
