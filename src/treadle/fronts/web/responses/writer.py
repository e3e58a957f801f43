"""Writer of responses: as a stream of events, or whole."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import msgspec

from ....errors import TreadleError
from ...generation.pieces import ABORT, LENGTH, Piece, Usage, WholeChoice
from ..error_shapes import encodable
from ..parsed import ParsedRequest
from .output import COMPLETED, IN_PROGRESS, INCOMPLETE, Output, OutputForm, drop_event
from .response_object import CANCELLED, FAILED, QUEUED, ResponseObject

log = logging.getLogger(__name__)

MAX_OUTPUT_TOKENS = "max_output_tokens"
_STATUS: Mapping[str | None, str] = {LENGTH: INCOMPLETE, ABORT: CANCELLED}
encode = msgspec.json.encode


class Ended(Protocol):
    """Receiver of a response that has ended: its JSON, and its output items with their ids."""

    def __call__(self, response: bytes, items: Sequence[bytes], ids: Sequence[str]) -> None: ...


def drop_response(response: bytes, items: Sequence[bytes], ids: Sequence[str]) -> None:
    """Drop a response that is not stored."""


class ResponseWriter:
    """Writer of one response (`parsed.StreamWriter`). `ended` gets the response when it ends, before its client does.
    `log` gets each event of a stream; the number of an event is its place there."""

    def __init__(
        self,
        request: ParsedRequest,
        response: ResponseObject,
        form: OutputForm,
        *,
        ended: Ended = drop_response,
        log: Callable[[bytes], None] | None = None,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._request = request
        self._response = response
        self._log = log
        self._ended = ended
        self._now = now
        self._number = 0
        self._status = IN_PROGRESS
        self._new: list[bytes] = []
        self._output = Output(form, self._emit)
        self._reason: str | None = None

    def queued(self) -> bytes:
        """Return the beginning of a stream whose request waits."""
        self._status = QUEUED
        response = msgspec.Raw(self._response.json(QUEUED))
        self._emit("created", response=response)
        self._emit("queued", response=response)
        return self._take()

    def start(self, usage: Usage) -> bytes:
        self._status = IN_PROGRESS
        response = msgspec.Raw(self._response.json(IN_PROGRESS))
        if not self._number:
            self._emit("created", response=response)
        self._emit("in_progress", response=response)
        return self._take()

    def first(self, index: int, piece: Piece) -> bytes:
        return b""

    def piece(self, index: int, piece: Piece) -> bytes:
        self._output.add(self._request.events_of(piece), piece.entries)
        self._reason = piece.finish_reason
        return self._take()

    def end(self, usage: Usage) -> bytes:
        status = _STATUS.get(self._reason, COMPLETED)
        self._output.finish(status)
        self._terminal(COMPLETED if status == COMPLETED else INCOMPLETE, self._final(status, usage))
        return self._take()

    def error(self, error: TreadleError, usage: Usage | None) -> bytes:
        self._cut(FAILED)
        param = None if error.param is None else encodable(error.param)
        self._send("error", code=error.code, message=encodable(error.message), param=param)
        self._terminal(FAILED, self._final(FAILED, usage, error))
        return self._take()

    def cancel(self, usage: Usage | None) -> None:
        """End a response that its client cancelled; `usage` is None before it was admitted."""
        self._cut(CANCELLED)
        self._terminal(INCOMPLETE, self._final(CANCELLED, usage))

    def whole(self, choice: WholeChoice, usage: Usage) -> bytes:
        """Return a whole response."""
        self._output.emit = drop_event
        self._output.add(self._request.events_of(choice), choice.entries)
        status = _STATUS.get(choice.finish_reason, COMPLETED)
        self._output.finish(status)
        return self._final(status, usage)

    def snapshot(self) -> bytes:
        """Return the response as it is while it is generated."""
        return self._response.json(self._status, self._output.items)

    def _cut(self, status: str) -> None:
        """End the output of a response that is not whole, without its last item if that is what failed: the response
        ends in any case."""
        try:
            self._output.finish(status)
        except Exception:
            log.exception("the last item of a response can't be written: it is left out")
            self._output.drop_open()

    def _final(self, status: str, usage: Usage | None, error: TreadleError | None = None) -> bytes:
        output, incomplete = self._output, MAX_OUTPUT_TOKENS if status == INCOMPLETE else None
        completed = int(self._now())
        response = self._response.json(
            status, output.items, usage=usage, error=error, incomplete=incomplete, completed=completed
        )
        self._ended(response, output.items, output.ids)
        return response

    def _terminal(self, kind: str, response: bytes) -> None:
        self._emit(kind, response=msgspec.Raw(response))

    def _emit(self, kind: str, **members: Any) -> None:
        self._send(f"response.{kind}", **members)

    def _send(self, kind: str, **members: Any) -> None:
        data = encode({"type": kind, "sequence_number": self._number, **members})
        self._number += 1
        event = b"event: " + kind.encode() + b"\ndata: " + data + b"\n\n"
        self._new.append(event)
        if self._log is not None:
            self._log(event)

    def _take(self) -> bytes:
        events, self._new = b"".join(self._new), []
        return events
