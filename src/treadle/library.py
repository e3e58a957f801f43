"""Treadle without a server: one engine in your own asyncio program."""

from __future__ import annotations

import difflib
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any, cast

from .compose.checks import require_installed
from .compose.engine import engine_for
from .compose.texts import LocalTexts
from .compose.waiting import aside
from .config import Settings
from .core.virtual_queue import Arrival
from .engine.client import EngineClient
from .engine.status import status_of
from .errors import InvalidRequest, spelled
from .fronts.accounts import Account
from .fronts.authentication import Caller
from .fronts.cache_salts import Salts
from .fronts.generation.choice import Choice
from .fronts.generation.life import begin
from .fronts.generation.pieces import Piece, WholeChoice
from .fronts.generation.prompts import IdsPrompt, MessagesPrompt, Prompts, TextPrompt
from .fronts.generation.request import GenerationRequest
from .fronts.served_models import ServedModel, model_names
from .fronts.validate import Limits, RawParams, ValidatedRequest, check
from .keys import ALL
from .models.resolve import resolve
from .telemetry.access_log import RequestRecord

ONE_PROGRAM = 1
"""The fingerprint of all calls: a ticket of one of them is valid for any other."""

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
        self._model: ServedModel | None = None
        self._texts = LocalTexts()
        self._caller = Caller(b"", "127.0.0.1", ALL, Account())
        self._salts = Salts()
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
        self._model = ServedModel(model_names(self.settings), client, self._texts, self.settings.max_tokens)

    async def stop(self) -> None:
        """End the engine; what still runs gets an error. Idempotent."""
        if self._model is not None:
            await self._model.engine.stop()
        self._texts.close()

    async def __aenter__(self) -> Engine:
        return await self.start()

    async def __aexit__(self, *error: object) -> None:
        await self.stop()

    @property
    def client(self) -> EngineClient:
        """The client beneath: admission, jobs, status. Raises RuntimeError before `start`."""
        return self._served.engine

    @property
    def _served(self) -> ServedModel:
        if self._model is None:
            raise RuntimeError("the engine is not started: use `async with Engine(...)`, or await start()")
        return self._model

    def status(self) -> dict[str, Any]:
        """Return the status that `/v1/status` shows."""
        return status_of(self.client)

    async def generate(self, prompt: Prompt, **sampling: Any) -> Completion:
        """Generate to the end."""
        whole = WholeChoice()
        async with self._begin(prompt, sampling) as choice:
            async with aclosing(choice.pieces()) as pieces:
                async for piece in pieces:
                    whole.add(piece)
            text, tokens = "".join(whole.text), tuple(whole.token_ids)
            return Completion(text, tokens, whole.finish_reason or "", len(choice.prompt), choice.cached_tokens)

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
        """Text and token ids together; the last piece has the finish reason."""
        async with self._begin(prompt, sampling) as choice, aclosing(choice.pieces()) as pieces:
            async for piece in pieces:
                yield piece

    @asynccontextmanager
    async def _begin(self, prompt: Prompt, sampling: Mapping[str, Any]) -> AsyncIterator[Choice]:
        """Admit one request and give its choice."""
        request = GenerationRequest(
            kind="library",
            id="library",
            prompts=_prompts(prompt),
            check=partial(_check, _raw_params(sampling)),
            caller=self._caller,
            arrival=Arrival(fingerprint=ONE_PROGRAM, repeat=True),
            salts=self._salts,
            record=RequestRecord(id="", method="", path="", started=time.monotonic()),
            stops_of_model=_is_chat(prompt),
        )
        async with begin(self._served, request) as choices:
            (choice,) = choices
            yield choice


def _check(params: RawParams, limits: Limits) -> ValidatedRequest:
    """Validate the parameters. Raises InvalidRequest, also for more than one choice."""
    validated = check(params, limits, least_tokens=1 if params.prompt_logprobs is None else 0)
    if validated.n != 1:
        raise InvalidRequest("n must be 1 here: call again for more", param="n")
    return validated


def _raw_params(sampling: Mapping[str, Any]) -> RawParams:
    stop = sampling.get("stop")
    given = {**sampling, "stop": [stop] if isinstance(stop, str) else stop}
    known = [one.name for one in fields(RawParams)]
    if unknown := given.keys() - set(known):
        name = min(unknown)
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"; did you mean '{near[0]}'?" if near else f"; known: {', '.join(known)}"
        raise InvalidRequest(f"unknown sampling argument '{name}'{hint}", param=name)
    return RawParams(**given)


def _is_chat(prompt: Prompt) -> bool:
    return isinstance(prompt, Sequence) and bool(prompt) and isinstance(prompt[0], Mapping)


def _prompts(prompt: Prompt) -> Prompts:
    if isinstance(prompt, str):
        return TextPrompt(prompt)
    if isinstance(prompt, Sequence) and all(type(item) is int for item in prompt):
        return IdsPrompt(cast("Sequence[int]", prompt))
    if _is_chat(prompt):
        return MessagesPrompt(cast("Sequence[Mapping[str, Any]]", prompt), "prompt")
    raise InvalidRequest("a prompt is text, a list of token ids (ints) or a list of chat messages", param="prompt")
