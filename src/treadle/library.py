"""Treadle without a server: one engine in your own asyncio program."""

from __future__ import annotations

import difflib
import secrets
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, cast

from .compose import LocalTexts, aside, engine_for, require_installed
from .config import Settings
from .core.virtual_queue import Arrival
from .engine.client import EngineClient
from .engine.status import status_of
from .errors import InvalidRequest, spelled
from .fronts.chat_messages import asks_to_continue, read_turns
from .fronts.rows import Piece, Row
from .fronts.text import limits_of, with_stops
from .fronts.validate import RawParams, build_submits, check
from .models.resolve import resolve
from .text import TextModel, TextStream

ONE_PROGRAM = 1
"""The fingerprint of all calls: a place that was promised to one of them is any other's too."""

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]
"""Text, token ids, or chat messages with `role` and `content`, as the HTTP API reads them: unknown keys are ignored."""


@dataclass(frozen=True)
class Completion:
    """A finished generation. `finish_reason` is "stop" or "length"; counts are in tokens. `cached_tokens` of the
    prompt's were reused; equal answers may differ in it."""

    text: str
    tokens: tuple[int, ...]
    finish_reason: str
    prompt_tokens: int
    cached_tokens: int = field(default=0, compare=False)


class Engine:
    """One model and its owner, on a thread of its own unless `in_process=False` asks for a child process.

        async with Engine("demo") as engine:
            print((await engine.generate("Water boils at", max_tokens=20)).text)
            async for text in engine.stream("The capital of France is", max_tokens=20):
                print(text, end="")

    Keyword arguments are settings by the names of the settings file. Calls may run at the same time: they are batched.
    Leaving a stream early cancels it. Sampling arguments are those of the HTTP API (`temperature`, `top_p`, `stop`,
    `seed`, `max_tokens`, ...) and raise InvalidRequest out of range; a full engine raises Busy. With `prompt_logprobs`
    the first piece scores the prompt, and `max_tokens=0` does nothing else. Prompts are cached for others that begin
    alike; those with a `cache_salt` for others with the same one.
    """

    def __init__(
        self,
        model: str | Path = "demo",
        *,
        in_process: bool = True,
        progress: Callable[[str], None] = lambda stage: None,
        **settings: Any,
    ) -> None:
        where = model if isinstance(model, str) else str(model.expanduser().absolute())
        values = {"model": where, "in_process": in_process, **settings}
        self.settings = Settings.from_mapping(values, source="treadle.Engine")
        self._progress = progress
        self._client: EngineClient | None = None
        self._texts = LocalTexts()
        self._begun = False

    async def start(self) -> Engine:
        """Find, load and warm up the model. An engine starts once. Raises ModelError, ConfigError or StartFailed."""
        if self._begun:
            raise RuntimeError("an engine starts once: make another")
        self._begun = True
        with spelled(self.settings.spelling):
            await self._start()
        return self

    async def _start(self) -> None:
        await aside(lambda: require_installed(self.settings.model))
        folder = await aside(lambda: resolve(self.settings, self._progress))
        await self._texts.load(folder, self.settings)
        client = engine_for(self.settings, lambda: folder)
        client.supervisor.on_stage = self._progress
        try:
            await client.start()
        except BaseException:
            await client.stop()
            raise
        self._client = client

    async def stop(self) -> None:
        """End the engine; what still runs gets an error. Idempotent."""
        if self._client is not None:
            await self._client.stop()
        self._texts.close()

    async def __aenter__(self) -> Engine:
        return await self.start()

    async def __aexit__(self, *error: object) -> None:
        await self.stop()

    @property
    def client(self) -> EngineClient:
        """The client beneath: admission, jobs, status. Raises RuntimeError before `start`."""
        if self._client is None:
            raise RuntimeError("the engine is not started: use `async with Engine(...)`, or await start()")
        return self._client

    def status(self) -> dict[str, Any]:
        """Return the status that `/v1/status` shows."""
        return status_of(self.client)

    async def generate(self, prompt: Prompt, **sampling: Any) -> Completion:
        """Generate to the end."""
        texts: list[str] = []
        tokens: list[int] = []
        finish_reason = ""
        prompt_tokens = cached_tokens = 0
        async with aclosing(self._answer(prompt, sampling)) as answer:
            async for row, piece in answer:
                texts.append(piece.text)
                tokens.extend(piece.token_ids)
                finish_reason = piece.finish_reason or finish_reason
                prompt_tokens, cached_tokens = len(row.generation.request.prompt), row.cached_tokens
        return Completion("".join(texts), tuple(tokens), finish_reason, prompt_tokens, cached_tokens)

    async def stream(self, prompt: Prompt, **sampling: Any) -> AsyncGenerator[str, None]:
        """Text, as soon as it is certain."""
        async with aclosing(self.pieces(prompt, **sampling)) as pieces:
            async for piece in pieces:
                if piece.text:
                    yield piece.text

    async def tokens(self, prompt: Prompt, **sampling: Any) -> AsyncGenerator[int, None]:
        """Token ids, as they come; the stop token that ends a sequence is not among them."""
        async with aclosing(self.pieces(prompt, **sampling)) as pieces:
            async for piece in pieces:
                for token in piece.token_ids:
                    yield token

    async def pieces(self, prompt: Prompt, **sampling: Any) -> AsyncGenerator[Piece, None]:
        """Text and token ids together; the last piece says how it ended."""
        async with aclosing(self._answer(prompt, sampling)) as answer:
            async for _, piece in answer:
                yield piece

    async def _answer(self, prompt: Prompt, sampling: Mapping[str, Any]) -> AsyncGenerator[tuple[Row, Piece], None]:
        """The row with each of its pieces. Room is asked for before anything is tokenized, as in HTTP."""
        client, model = self.client, self._texts.model()
        limits = limits_of(model, client.capabilities, self.settings.max_tokens)
        wanted = _wanted(sampling)
        least_tokens = 1 if wanted.prompt_logprobs is None else 0
        checked = with_stops(check(wanted, limits, least_tokens=least_tokens), model, chat=_is_chat(prompt))
        if checked.n != 1:
            raise InvalidRequest("n must be 1 here: call again for more", param="n")
        with client.reserve(
            rows=1,
            prompt_tokens=_estimate(prompt, model),
            completion_tokens=checked.max_tokens,
            least_tokens=checked.least_tokens,
            kind="library",
            tag="library",
            arrival=Arrival(fingerprint=ONE_PROGRAM, repeat=True),
        ) as reservation:
            ids = await self._texts.pool.run(_token_ids, model, prompt)
            salt = checked.cache_salt or ""
            (request,) = build_submits(checked, [ids], limits, lambda: secrets.randbits(63), salt=salt)
            reservation.resize(prompt_tokens=len(ids), completion_tokens=request.max_tokens)
            (generation,) = reservation.submit([request])
            row = Row(generation, TextStream(model, checked.stop, min_tokens=checked.min_tokens))
            async with aclosing(row.pieces()) as pieces:
                async for piece in pieces:
                    yield row, piece


def _estimate(prompt: Prompt, model: TextModel) -> int:
    """About how many tokens `prompt` has; what it is not is found out later."""
    if isinstance(prompt, str):
        return 1 + int(len(prompt.encode("utf-8", "replace")) / model.bytes_per_token)
    if _is_chat(prompt):
        texts = (str(message.get("content", "")) for message in prompt if isinstance(message, Mapping))
        return sum(_estimate(text, model) for text in texts)
    return len(prompt) if isinstance(prompt, Sequence) else 1


def _wanted(sampling: Mapping[str, Any]) -> RawParams:
    stop = sampling.get("stop")
    wanted = {**sampling, "stop": [stop] if isinstance(stop, str) else stop}
    known = [one.name for one in fields(RawParams)]
    if unknown := wanted.keys() - set(known):
        name = min(unknown)
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"; did you mean '{near[0]}'?" if near else f"; known: {', '.join(known)}"
        raise InvalidRequest(f"unknown sampling argument '{name}'{hint}", param=name)
    return RawParams(**wanted)


def _is_chat(prompt: Prompt) -> bool:
    return isinstance(prompt, Sequence) and bool(prompt) and isinstance(prompt[0], Mapping)


def _token_ids(text: TextModel, prompt: Prompt) -> Sequence[int]:
    if isinstance(prompt, str):
        return text.encode(prompt)
    if isinstance(prompt, Sequence) and all(type(item) is int for item in prompt):
        return cast("Sequence[int]", prompt)
    if _is_chat(prompt):
        turns = read_turns(prompt, "prompt")
        return text.chat_ids(turns, continue_final_message=asks_to_continue(prompt))
    raise InvalidRequest("a prompt is text, a list of token ids (ints) or a list of chat messages", param="prompt")
