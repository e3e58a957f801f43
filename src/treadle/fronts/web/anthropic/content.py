"""Content blocks of answers: from the events of an answer to the blocks of a whole message, or of a stream."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from ....text.events import CallArguments, CallEnd, CallStart, Event, Reasoning, Text, ends_with_call
from ..call_arguments import raw_arguments
from .options import Display
from .signatures import sealed, signature_of
from .tool_ids import id_for_client
from .wire import event


class BlockStream:
    """Writer of the content blocks of one stream, one after the other. `called`: the last call of a tool is
    complete."""

    def __init__(self, display: Display) -> None:
        self.called = False
        self._display = display
        self._index = -1
        self._open: type[Event] | None = None
        self._reasoning: list[str] = []

    def write(self, events: Sequence[Event]) -> bytes:
        """Return the stream's events for some events of the answer."""
        self.called = ends_with_call(events, self.called)
        return b"".join(map(self._write, events))

    def close(self) -> bytes:
        """Return the end of the open block; nothing where none is open."""
        if self._open is None:
            return b""
        last = self._delta("signature_delta", signature=self._signature()) if self._open is Reasoning else b""
        self._open = None
        return last + event("content_block_stop", index=self._index)

    def _write(self, of: Event) -> bytes:
        if isinstance(of, Text):
            return self._opened(Text, text_block()) + self._delta("text_delta", text=of.text)
        if isinstance(of, Reasoning):
            return b"" if self._display is Display.HIDDEN else self._reason(of.text)
        if isinstance(of, CallStart):
            return self.close() + self._opened(CallStart, tool_use(of))
        if isinstance(of, CallArguments):
            return self._delta("input_json_delta", partial_json=of.delta)
        return self.close() if isinstance(of, CallEnd) else b""

    def _reason(self, text: str) -> bytes:
        opened = self._opened(Reasoning, {"type": "thinking", "thinking": "", "signature": ""})
        self._reasoning.append(text)
        return opened + (self._delta("thinking_delta", thinking=text) if self._display is Display.SHOWN else b"")

    def _signature(self) -> str:
        text, self._reasoning = "".join(self._reasoning), []
        return signature_of(text) if self._display is Display.SHOWN else sealed(text)

    def _opened(self, kind: type[Event], block: dict[str, Any]) -> bytes:
        """Return the beginning of a block, behind the end of another one; nothing where one of this kind is open."""
        if self._open is kind:
            return b""
        ended = self.close()
        self._open = kind
        self._index += 1
        return ended + event("content_block_start", index=self._index, content_block=block)

    def _delta(self, kind: str, **fields: Any) -> bytes:
        return event("content_block_delta", index=self._index, delta={"type": kind, **fields})


def content_of(events: Sequence[Event], display: Display) -> list[dict[str, Any]]:
    """Return the content blocks of a whole answer."""
    blocks: list[dict[str, Any]] = []
    arguments: dict[int, list[str]] = {}
    complete: set[int] = set()
    for of in events:
        if isinstance(of, CallStart):
            arguments[len(blocks)] = []
            blocks.append(tool_use(of))
        elif isinstance(of, CallArguments):
            arguments[len(blocks) - 1].append(of.delta)
        elif isinstance(of, CallEnd):
            complete.add(len(blocks) - 1)
        elif isinstance(of, (Text, Reasoning)):
            _add_text(blocks, of, display)
    for place, parts in arguments.items():
        blocks[place]["input"] = _input("".join(parts), place in complete)
    return [_signed(block, display) for block in blocks]


def _add_text(blocks: list[dict[str, Any]], of: Text | Reasoning, display: Display) -> None:
    kind = "text" if isinstance(of, Text) else "thinking"
    if kind == "thinking" and display is Display.HIDDEN:
        return
    if not blocks or blocks[-1]["type"] != kind:
        blocks.append(text_block() if kind == "text" else {"type": kind, kind: ""})
    blocks[-1][kind] += of.text


def _signed(block: dict[str, Any], display: Display) -> dict[str, Any]:
    if block["type"] != "thinking":
        return block
    text = block["thinking"]
    if display is Display.OMITTED:
        return {"type": "thinking", "thinking": "", "signature": sealed(text)}
    return {**block, "signature": signature_of(text)}


def _input(text: str, complete: bool) -> Any:
    """Return the arguments of a call; {} for those that a limit has cut off."""
    is_object = text.lstrip().startswith("{") and (complete or _is_json(text))
    return raw_arguments(text) if is_object else {}


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def text_block() -> dict[str, Any]:
    """Return the beginning of a block of text. Its citations are an empty array: Vercel's AI SDK takes no null."""
    return {"type": "text", "text": "", "citations": []}


def tool_use(start: CallStart) -> dict[str, Any]:
    """Return the block of a call without its arguments."""
    call_id = id_for_client(start.id)
    return {"type": "tool_use", "id": call_id, "name": start.name, "input": {}, "caller": {"type": "direct"}}
