"""Reads a stream of server-sent events as a strict client would."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx


class Stream:
    """`errors` are the error events and `tokens` all token ids; `done` says whether [DONE] has come."""

    def __init__(self, response: httpx.Response) -> None:
        self.response = response
        self.tokens: list[int] = []
        self.errors: list[dict[str, Any]] = []
        self.done = False
        self.finish_reason: str | None = None
        self._lines = response.iter_lines()

    def next(self) -> None:
        """Take in one event. Raises StopIteration at the end of the stream."""
        for data in self._data():
            assert not self.done, f"an event after [DONE]: {data}"
            assert not self.errors, f"an event after an error: {data}"
            self._take(data)
            return
        raise StopIteration

    def rest(self) -> Stream:
        """Read to the end."""
        while True:
            try:
                self.next()
            except StopIteration:
                return self

    def _data(self) -> Iterator[str]:
        for line in self._lines:
            if line.startswith("data: "):
                yield line.removeprefix("data: ")
            else:
                assert not line or line.startswith(":"), line

    def _take(self, data: str) -> None:
        if data == "[DONE]":
            self.done = True
            return
        event = json.loads(data)
        if "error" in event:
            self.errors.append(event["error"])
            return
        for choice in event["choices"]:
            self.tokens += choice["token_ids"]
            self.finish_reason = choice["finish_reason"] or self.finish_reason
