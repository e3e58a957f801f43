"""Wire format of the two generation routes: encodes requests, and reads answers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
from msgspec import UNSET

from .pictures import data_url
from .plan import PromptMessage, Request

Endpoint = Literal["chat", "completions"]
PATHS: dict[Endpoint, str] = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}
CONTENT_FIELDS = ("content", "reasoning_content", "reasoning", "tool_calls")


def body_of(request: Request, model: str, endpoint: Endpoint, extra: dict[str, Any]) -> bytes:
    """Encode a request as JSON: greedy, with usage at the end of a stream. `extra` fields win. The request's own fields
    take their place: a structured answer ends by itself."""
    body: dict[str, Any] = {"model": model, "max_tokens": request.max_tokens, "temperature": 0}
    if endpoint == "chat":
        body["messages"] = [_message(message) for message in request.messages]
    else:
        body["prompt"] = as_text(request.messages)
    if request.stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    return msgspec.json.encode(body | (extra if request.fields is UNSET else request.fields))


def _message(message: PromptMessage) -> dict[str, Any]:
    """Return a turn as OpenAI's API writes it."""
    if message.pictures is UNSET:
        return _object(msgspec.to_builtins(message))
    urls = (data_url(picture) for picture in message.pictures)
    content: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return {"role": message.role, "content": [*content, {"type": "text", "text": message.content}]}


def as_text(messages: Sequence[PromptMessage]) -> str:
    """Flatten a conversation for a route that takes text alone."""
    if len(messages) == 1:
        return messages[0].content
    return "\n\n".join(f"{message.role}: {message.content}" for message in messages) + "\n\nassistant:"


@dataclass
class ReceivedCall:
    """A tool call of an answer, as far as it came."""

    name: str = ""
    arguments: str = ""


class AnswerReader:
    """Incremental reader of an answer. `pieces` counts the pieces with content; `error` is one that came inside the
    answer. `content` and `calls` are those of all choices together: the workloads ask for one."""

    def __init__(self, *, stream: bool) -> None:
        self._stream = stream
        self._rest = b""
        self.pieces = 0
        self.finish_reason = ""
        self.done = False
        self.error = ""
        self.usage: dict[str, Any] = {}
        self.content = ""
        self.calls: dict[int, ReceivedCall] = {}

    def feed(self, data: bytes) -> int:
        """Return the number of pieces of the answer that `data` completes."""
        before = self.pieces
        self._rest += data
        if self._stream and not self._rest.lstrip().startswith(b"{"):
            for line in self._lines():
                self._line(line)
        return self.pieces - before

    def end(self) -> None:
        """End the body: an answer that is not a stream, or was not one though it was requested, is parsed now."""
        rest, self._rest = self._rest.strip(), b""
        if rest == b"data: [DONE]":
            self.done = True
        elif rest and (rest.startswith(b"{") or not self._stream):
            self._event(rest)

    @property
    def whole(self) -> bool:
        """Whether the answer came to its end."""
        return bool(self.finish_reason) or self.done

    def _lines(self) -> Iterator[bytes]:
        *lines, self._rest = self._rest.split(b"\n")
        return (line.rstrip(b"\r") for line in lines)

    def _line(self, line: bytes) -> None:
        if not line.startswith(b"data:"):
            return
        data = line[5:].strip()
        if data == b"[DONE]":
            self.done = True
        elif data:
            self._event(data)

    def _event(self, data: bytes) -> None:
        try:
            event = msgspec.json.decode(data)
        except msgspec.DecodeError:
            self.error = self.error or "not JSON"
            return
        if not isinstance(event, dict):
            self.error = self.error or "not an object"
            return
        if event.get("error"):
            self.error = self.error or error_name(event)
        self.usage = _object(event.get("usage")) or self.usage
        choices = event.get("choices")
        for choice in choices if isinstance(choices, list) else ():
            self._choice(_object(choice))

    def _choice(self, choice: dict[str, Any]) -> None:
        message = _object(choice.get("delta")) or _object(choice.get("message"))
        if choice.get("text") or any(message.get(key) for key in CONTENT_FIELDS):
            self.pieces += 1
        self.content += _text(message.get("content"))
        calls = message.get("tool_calls")
        for i, call in enumerate(calls if isinstance(calls, list) else ()):
            self._call(i, _object(call))
        self.finish_reason = str(choice.get("finish_reason") or self.finish_reason)

    def _call(self, position: int, call: dict[str, Any]) -> None:
        index, function = call.get("index"), _object(call.get("function"))
        received = self.calls.setdefault(index if isinstance(index, int) else position, ReceivedCall())
        received.name += _text(function.get("name"))
        received.arguments += _text(function.get("arguments"))

    def count(self, name: str) -> int | None:
        """Return a count from the usage: "prompt_tokens", "completion_tokens" or "cached_tokens"."""
        if name == "cached_tokens":
            value = _object(self.usage.get("prompt_tokens_details")).get(name)
        else:
            value = self.usage.get(name)
        return value if isinstance(value, int) else None


def _object(value: Any) -> dict[str, Any]:
    """Return `value`, or an empty object if it is none: a broken server may send anything."""
    return value if isinstance(value, dict) else {}


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def error_name(body: Any) -> str:
    """Return a short name of an error body: its code, its type, or the beginning of its message."""
    error = body.get("error", body) if isinstance(body, dict) else body
    if isinstance(error, dict):
        error = error.get("code") or error.get("type") or error.get("message") or error.get("detail") or "error"
    return str(error)[:80]


def error_of(body: bytes) -> str:
    """Return the same, from the bytes of a refusal."""
    try:
        return error_name(msgspec.json.decode(body))
    except msgspec.DecodeError:
        return body[:80].decode("utf-8", "replace").strip()
