"""Responses in the making: their place in the store, the stored items that they go on from, and background runs."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import msgspec

from ....errors import InvalidRequest, RequestCancelled, TreadleError
from ...generation.life import Choices
from ...generation.pieces import Usage
from ..errors import internal_error
from .parsed import Carried, ParsedResponse
from .store import Chunk, ResponseStore, StoredResponse
from .writer import ResponseWriter

log = logging.getLogger(__name__)

BASE64 = b";base64,"


class Sessions:
    """Responses of one server: those in `store`, and those that run in the background. Lives on the event loop."""

    def __init__(self, store: ResponseStore) -> None:
        self.store = store
        self.runs: dict[str, BackgroundRun] = {}

    @contextlib.contextmanager
    def begin(self, parsed: ParsedResponse, response_id: str, tenant: bytes) -> Iterator[StoredResponse | None]:
        """Give the request the stored items that it needs, and a place in the store where it asks for one. A response
        that has not ended within the block is removed, unless it runs in the background.

        Raises ResponseNotFound, and InvalidRequest for what needs a store where there is none.
        """
        facts, store = parsed.facts, self.store
        history, references = self._history(parsed, tenant)
        if facts.background and not store.limit:
            raise InvalidRequest(
                "background is true and this server stores no responses: leave it out, or start the server with a "
                "--response-store",
                param="background",
            )
        if not facts.store or not store.limit:
            yield None
            return
        items = [references.get(name, item) for name, item in zip(facts.ids, facts.items, strict=True)]
        stored = store.add(tenant, response_id, history, facts.ids, items)
        parsed.ended = partial(self._end, stored)
        facts.items, facts.ids = [], []
        try:
            yield stored
        finally:
            if not stored.ended and stored.id not in self.runs:
                store.remove(stored)

    def _end(self, stored: StoredResponse, response: bytes, items: Sequence[bytes], ids: Sequence[str]) -> None:
        self.store.end(stored, response, ids, items)

    def _history(self, parsed: ParsedResponse, tenant: bytes) -> tuple[list[Chunk], dict[str, bytes]]:
        """Return the items of the previous response, and those that the request refers to; let it carry both."""
        facts = parsed.facts
        history: list[Chunk] = []
        if facts.previous is not None:
            previous = self.store.get(tenant, facts.previous, "previous_response_id")
            if not previous.ended:
                raise InvalidRequest(
                    f"the response '{previous.id}' is still generated: wait for its end before continuing it",
                    param="previous_response_id",
                )
            history = list(previous.chunks)
        references = self.store.items(tenant, facts.references)
        if history or references:
            items = [item for chunk in history for item in chunk.items]
            parsed.carried_bytes = sum(map(_text_bytes, (*items, *references.values())))
            parsed.carry = partial(_carried, items, references)
        return history, references

    def run(self, parsed: ParsedResponse, stored: StoredResponse) -> BackgroundRun:
        """Return a new run of a stored response."""
        run = self.runs[stored.id] = BackgroundRun(stored)
        parsed.log = run.add_event
        return run

    def finish(self, run: BackgroundRun) -> None:
        """Forget a run that has ended, and its response if that has not: a response without an end is never evicted."""
        self.runs.pop(run.stored.id, None)
        if not run.stored.ended:
            self.store.remove(run.stored)
        run.close()


def _text_bytes(item: bytes) -> int:
    """Return the bytes of an item's JSON without its images in base64, whose tokens are others."""
    size, end = len(item), 0
    while (start := item.find(BASE64, end)) >= 0:
        end = item.find(b'"', start)
        if end < 0:
            break
        size -= end - start
    return size


def _carried(items: Sequence[bytes], references: dict[str, bytes]) -> bytes:
    raw = {name: msgspec.Raw(item) for name, item in references.items()}
    return msgspec.json.encode(Carried([msgspec.Raw(item) for item in items], raw))


@dataclass(eq=False)
class BackgroundRun:
    """A response that is generated without a connection. `queued` is set once its prompt is tokenized, so that it can
    no longer be refused for its content; it has the error of a request that is refused. `error`: what ended it, if
    anything did."""

    stored: StoredResponse
    queued: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    task: asyncio.Task[None] | None = None
    cancelled: bool = False
    error: TreadleError | None = None
    _news: asyncio.Event = field(default_factory=asyncio.Event)
    _closed: bool = False

    def add_event(self, event: bytes) -> None:
        self.stored.events.append(event)
        self._wake()

    def close(self) -> None:
        """Let readers of the events end."""
        self._closed = True
        self._wake()

    def _wake(self) -> None:
        self._news.set()
        self._news = asyncio.Event()

    async def events(self, start: int) -> AsyncIterator[bytes]:
        """Yield the events from number `start` on, until the response has ended. Several come as one."""
        while True:
            news, events = self._news, self.stored.events
            if start < len(events):
                new, start = events[start:], len(events)
                yield b"".join(new)
            elif self._closed:
                return
            else:
                await news.wait()

    def accept(self) -> None:
        """Mark the request as one that can no longer be refused."""
        if not self.queued.done():
            self.queued.set_result(None)

    @property
    def accepted(self) -> bool:
        """Whether its request was not refused."""
        return self.queued.done() and not self.queued.cancelled() and self.queued.exception() is None

    async def cancel(self) -> None:
        """End the response as cancelled, and return when it has."""
        self.cancelled = True
        await self.stop()

    async def stop(self) -> None:
        """End the run, and return when it has."""
        if self.task is not None:
            self.task.cancel()
            await asyncio.wait([self.task])

    async def work(
        self, admitted: Callable[[], contextlib.AbstractAsyncContextManager[Choices]], writer: ResponseWriter
    ) -> None:
        """Generate the response, from admission to its end; never raises after `queued`."""
        usage: Usage | None = None
        try:
            async with admitted() as choices:
                usage = choices.usage
                writer.start(usage)
                for choice in choices:
                    async for piece in choice.pieces():
                        usage = choices.usage
                        writer.piece(0, piece)
                writer.end(choices.usage)
        except asyncio.CancelledError:
            self.error = RequestCancelled("the response was cancelled")
            if not self.cancelled:
                raise
            writer.cancel(usage)
        except TreadleError as error:
            self._fail(error, writer, usage)
        except Exception:
            log.exception("%s failed in the background", self.stored.id)
            self._fail(internal_error(), writer, usage)

    def _fail(self, error: TreadleError, writer: ResponseWriter, usage: Usage | None) -> None:
        self.error = error
        if not self.queued.done():
            self.queued.set_exception(error)
            return
        try:
            writer.error(error, usage)
        except Exception:
            log.exception("%s can't be ended: it is removed", self.stored.id)
