"""Output items of an answer: built from its events, and shown in a stream's events as they grow."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from ....text import TextView, TokenEntry
from ....text.events import CallArguments, CallEnd, CallStart, Event, Reasoning, Text
from ..token_logprobs import token_json
from .custom_input import CustomInput
from .items import new_id
from .opaque import REASONING, SUMMARY, wrap
from .tool_names import CallName

IN_PROGRESS, COMPLETED, INCOMPLETE = "in_progress", "completed", "incomplete"
encode = msgspec.json.encode


class Emit(Protocol):
    """Receiver of a stream's events: the part of the type behind "response.", and the other members."""

    def __call__(self, kind: str, **members: Any) -> None: ...


def drop_event(kind: str, **members: Any) -> None:
    """Drop an event, for answers that are sent whole."""


@dataclass(frozen=True)
class OutputForm:
    """Form of the output. `names`: the API's names of tools by those that the model sees. `summarized`: reasoning
    stands in its item's summary; `hidden`: it is left out; `encrypted`: it is added as an opaque text. `logprobs`:
    tokens of the text are listed, with the names of the model's tokens in `model`. `compacts`: the text is a summary,
    which becomes an opaque item."""

    names: Mapping[str, CallName]
    model: TextView
    summarized: bool = False
    hidden: bool = False
    encrypted: bool = False
    logprobs: bool = False
    compacts: bool = False


@dataclass
class Output:
    """Output of one answer. `items` are the JSON of those that have ended, `ids` their ids."""

    form: OutputForm
    emit: Emit = drop_event
    items: list[bytes] = field(default_factory=list)
    ids: list[str] = field(default_factory=list)
    _open: _OpenItem | None = None
    _entries: deque[TokenEntry] = field(default_factory=deque)
    _visible: int = 0  # characters of text so far

    def add(self, events: Iterable[Event], entries: Iterable[TokenEntry] = ()) -> None:
        """Add events, with the log-probabilities of their text."""
        self._entries.extend(entries)
        for event in events:
            self._add(event)

    def finish(self, status: str) -> None:
        """End the output of a response with this status. Its last item is incomplete if the response is, and a call
        also where the model ended its answer within it. An answer of nothing is an empty message; a response that was
        cancelled or failed before its first item has none."""
        complete = status == COMPLETED
        if self.form.compacts and not complete:
            self._open = None  # half a summary is none
            return
        if self._open is None and not self.items and status in (COMPLETED, INCOMPLETE):
            self._in(self._text_kind)
        self._end(COMPLETED if complete and not isinstance(self._open, _Call) else INCOMPLETE)

    def drop_open(self) -> None:
        """Leave out the item that has not ended."""
        self._open = None

    def text_entries(self, text: str) -> list[dict[str, Any]]:
        """Return the log-probabilities of the next characters of the text, `text`."""
        self._visible += len(text)
        found = []
        while self._entries and self._entries[0].text_offset < self._visible:
            found.append(token_json(self._entries.popleft(), self.form.model))
        return found if self.form.logprobs else []

    def _add(self, event: Event) -> None:
        if isinstance(event, Text):
            self._in(self._text_kind).add(event.text)
        elif isinstance(event, Reasoning) and not self.form.hidden:
            self._in(_SummarizedReasoning if self.form.summarized else _ReasoningText).add(event.text)
        elif isinstance(event, CallStart):
            name = self.form.names.get(event.name, CallName(event.name))
            self._end(COMPLETED)
            self._start((_CustomCall if name.custom else _Call)(self, name, event.id or new_id("call")))
        elif isinstance(event, CallArguments) and isinstance(self._open, _Call):
            self._open.add(event.delta)
        elif isinstance(event, CallEnd):
            self._end(COMPLETED)

    @property
    def _text_kind(self) -> type[_OpenItem]:
        return _Compaction if self.form.compacts else _Message

    def _in(self, kind: type[_OpenItem]) -> _OpenItem:
        """Return the open item, of this kind."""
        if self._open is None or type(self._open) is not kind:
            self._end(COMPLETED)
            self._start(kind(self))
        assert self._open is not None
        return self._open

    def _start(self, item: _OpenItem) -> None:
        self._open = item
        self.emit("output_item.added", output_index=item.index, item=item.json(IN_PROGRESS, begun=False))
        item.begin()

    def _end(self, status: str) -> None:
        item, self._open = self._open, None
        if item is None:
            return
        item.end()
        ended = encode(item.json(status))
        self.items.append(ended)
        self.ids.append(item.id)
        self.emit("output_item.done", output_index=item.index, item=msgspec.Raw(ended))


class _OpenItem(ABC):
    """One item that grows. `place`: the members that its events have in common."""

    prefix: str

    def __init__(self, output: Output) -> None:
        self.output = output
        self.index = len(output.items)
        self.id = new_id(self.prefix)
        self.parts: list[str] = []
        self.place: dict[str, Any] = {"item_id": self.id, "output_index": self.index}

    @property
    def text(self) -> str:
        return "".join(self.parts)

    @abstractmethod
    def begin(self) -> None:
        """Emit the events that come before the first piece."""

    @abstractmethod
    def add(self, text: str) -> None:
        """Add a piece, and emit its event."""

    @abstractmethod
    def end(self) -> None:
        """Emit the events that come behind the last piece."""

    @abstractmethod
    def json(self, status: str, *, begun: bool = True) -> dict[str, Any]:
        """Return the item; without `begun` as it is before its first part."""

    def emit(self, kind: str, **members: Any) -> None:
        self.output.emit(kind, **self.place, **members)


class _Message(_OpenItem):
    prefix = "msg"

    def __init__(self, output: Output) -> None:
        super().__init__(output)
        self.place["content_index"] = 0
        self._logprobs: list[dict[str, Any]] = []

    def begin(self) -> None:
        self.emit("content_part.added", part=self._part(""))

    def add(self, text: str) -> None:
        self.parts.append(text)
        new = self.output.text_entries(text)
        self._logprobs += new
        self.emit("output_text.delta", delta=text, logprobs=new)

    def end(self) -> None:
        text = self.text
        self.emit("output_text.done", text=text, logprobs=self._logprobs)
        self.emit("content_part.done", part=self._part(text))

    def json(self, status: str, *, begun: bool = True) -> dict[str, Any]:
        content = [self._part(self.text)] if begun else []
        return {"id": self.id, "type": "message", "status": status, "role": "assistant", "content": content}

    def _part(self, text: str) -> dict[str, Any]:
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": self._logprobs}


class _ReasoningText(_OpenItem):
    """Reasoning in the item's content."""

    prefix = "rs"
    kind = "reasoning_text"
    event, part_event, index_key = "reasoning_text", "content_part", "content_index"

    def __init__(self, output: Output) -> None:
        super().__init__(output)
        self.place[self.index_key] = 0

    def begin(self) -> None:
        self.emit(f"{self.part_event}.added", part=self._part(""))

    def add(self, text: str) -> None:
        self.parts.append(text)
        self.emit(f"{self.event}.delta", delta=text)

    def end(self) -> None:
        text = self.text
        self.emit(f"{self.event}.done", text=text)
        self.emit(f"{self.part_event}.done", part=self._part(text))

    def json(self, status: str, *, begun: bool = True) -> dict[str, Any]:
        item = {
            "id": self.id,
            "type": "reasoning",
            "status": status,
            **self.texts([self._part(self.text)] if begun else []),
        }
        if begun and self.output.form.encrypted:
            item["encrypted_content"] = wrap(REASONING, self.text)
        return item

    def texts(self, parts: list[dict[str, str]]) -> dict[str, Any]:
        """Return the members of the item that hold its text."""
        return {"summary": [], "content": parts}

    def _part(self, text: str) -> dict[str, str]:
        return {"type": self.kind, "text": text}


class _SummarizedReasoning(_ReasoningText):
    """Reasoning in the item's summary, for clients that show no other."""

    kind = "summary_text"
    event, part_event, index_key = "reasoning_summary_text", "reasoning_summary_part", "summary_index"

    def texts(self, parts: list[dict[str, str]]) -> dict[str, Any]:
        return {"summary": parts}


class _Compaction(_OpenItem):
    """Summary of a conversation, which is shown when it is whole."""

    prefix = "cmp"

    def begin(self) -> None:
        pass

    def add(self, text: str) -> None:
        self.parts.append(text)

    def end(self) -> None:
        pass

    def json(self, status: str, *, begun: bool = True) -> dict[str, Any]:
        return {"id": self.id, "type": "compaction", "encrypted_content": wrap(SUMMARY, self.text.strip())}


class _Call(_OpenItem):
    prefix = "fc"

    def __init__(self, output: Output, name: CallName, call_id: str) -> None:
        super().__init__(output)
        self._name = {"name": name.name, **({"namespace": name.namespace} if name.namespace else {})}
        self._call_id = call_id

    def begin(self) -> None:
        pass

    def add(self, text: str) -> None:
        self.parts.append(text)
        self.emit("function_call_arguments.delta", delta=text)

    def end(self) -> None:
        self.emit("function_call_arguments.done", name=self._name["name"], arguments=self.text)

    def json(self, status: str, *, begun: bool = True) -> dict[str, Any]:
        return {**self.call("function_call", status), "arguments": self.text}

    def call(self, kind: str, status: str) -> dict[str, Any]:
        return {"id": self.id, "type": kind, "status": status, "call_id": self._call_id, **self._name}


class _CustomCall(_Call):
    prefix = "ctc"

    def __init__(self, output: Output, name: CallName, call_id: str) -> None:
        super().__init__(output, name, call_id)
        self._input = CustomInput()

    def add(self, text: str) -> None:
        self._show(self._input.push(text))

    def end(self) -> None:
        self._show(self._input.finish())
        self.emit("custom_tool_call_input.done", input=self._input.text)

    def json(self, status: str, *, begun: bool = True) -> dict[str, Any]:
        return {**self.call("custom_tool_call", status), "input": self._input.text}

    def _show(self, text: str) -> None:
        if text:
            self.emit("custom_tool_call_input.delta", delta=text)
