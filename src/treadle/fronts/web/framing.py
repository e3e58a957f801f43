"""Forms of streams."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Framing:
    """Form of a stream: its content type, and the bytes that keep it alive while nothing is generated (none where the
    form has no such thing)."""

    content_type: bytes
    keep_alive: bytes

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        return [
            (b"content-type", self.content_type),
            (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no"),
        ]


SERVER_SENT_EVENTS = Framing(b"text/event-stream; charset=utf-8", b": keep-alive\n\n")
