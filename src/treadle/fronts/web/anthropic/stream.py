"""Writer of a stream of events, as Anthropic's Messages have it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ....errors import TreadleError
from ....text import TextView
from ....text.events import Event
from ...generation.pieces import Piece, Usage
from ..error_shapes import anthropic_error
from ..parsed import Head
from .content import BlockStream
from .options import Display
from .wire import AnswerLimits, encode, end_of, event, message, usage_json

NOT_ENDED: dict[str, str | None] = {"stop_reason": None, "stop_sequence": None}


class MessageStream:
    """Writer of one stream: message_start, its content blocks, message_delta with the end, and message_stop; or an
    error event. Usage is cumulative. `events_of` returns the events of a piece."""

    def __init__(
        self,
        head: Head,
        text: TextView,
        limits: AnswerLimits,
        display: Display,
        events_of: Callable[[Piece], Sequence[Event]],
    ) -> None:
        self._head = head
        self._text = text
        self._limits = limits
        self._events_of = events_of
        self._blocks = BlockStream(display)
        self._last = Piece()

    def start(self, usage: Usage) -> bytes:
        counts = usage_json(usage, self._limits, self._head)
        return event("message_start", message=message(self._head, [], NOT_ENDED, counts))

    def first(self, index: int, piece: Piece) -> bytes:
        return b""

    def piece(self, index: int, piece: Piece) -> bytes:
        self._last = piece
        written = self._blocks.write(self._events_of(piece))
        return written + self._blocks.close() if piece.finish_reason is not None else written

    def end(self, usage: Usage) -> bytes:
        end = end_of(self._last, usage, self._limits, self._text, called=self._blocks.called)
        counts = usage_json(usage, self._limits, self._head)
        return event("message_delta", delta=end, usage=counts) + event("message_stop")

    def error(self, error: TreadleError, usage: Usage) -> bytes:
        record = self._head.record
        return b"event: error\ndata: %s\n\n" % encode(anthropic_error(error, None if record is None else record.id))
