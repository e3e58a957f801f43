"""Treadle without a server: one engine in your own asyncio program."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, fields
from typing import Any

from .compose import Texts, engine_for
from .config import Settings
from .core.messages import CancelReason, FinishReason
from .engine.client import EngineClient
from .errors import InvalidRequest
from .fronts.validate import Checked, Limits, Wanted, check, submits
from .models.resolve import resolve
from .text import TextModel, TextStream

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]
"""Text, token ids, or chat messages with `role` and `content`."""


@dataclass(frozen=True)
class Completion:
    """A finished generation. `finish_reason` is "stop" or "length"; counts are in tokens."""

    text: str
    tokens: tuple[int, ...]
    finish_reason: str
    prompt_tokens: int


@dataclass(frozen=True)
class Part:
    """What is new: text that is certain, the tokens it came with, and on the last part how it ended."""

    text: str
    tokens: tuple[int, ...]
    finish_reason: str | None = None


class Engine:
    """One model and its owner, on a thread of its own unless `in_process=False` asks for a child process.

        async with Engine("demo") as engine:
            print((await engine.generate("Water boils at", max_tokens=20)).text)
            async for text in engine.stream("The capital of France is", max_tokens=20):
                print(text, end="")

    Keyword arguments are settings by the names of the settings file. Calls may run at the same time: they are batched.
    Leaving a stream early cancels it. Sampling arguments are those of the HTTP API (`temperature`, `top_p`, `stop`,
    `seed`, `max_tokens`, ...) and raise InvalidRequest out of range; a full engine raises Busy.
    """

    def __init__(
        self,
        model: str = "demo",
        *,
        in_process: bool = True,
        progress: Callable[[str], None] = lambda stage: None,
        **settings: Any,
    ) -> None:
        values = {"model": model, "in_process": in_process, **settings}
        self.settings = Settings.from_mapping(values, source="treadle.Engine")
        self._progress = progress
        self._client: EngineClient | None = None
        self._texts = Texts()

    async def start(self) -> Engine:
        """Find, load and warm up the model. Raises ModelError or StartFailed."""
        folder = await asyncio.to_thread(resolve, self.settings, self._progress)
        await self._texts.load(folder, self.settings)
        client = engine_for(self.settings, lambda: folder)
        client.supervisor.on_stage = self._progress
        try:
            await client.start()
        except BaseException:
            await client.stop()
            raise
        self._client = client
        return self

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
        """What `/v1/status` shows."""
        return self.client.status()

    async def generate(self, prompt: Prompt, **sampling: Any) -> Completion:
        """Generate to the end."""
        texts: list[str] = []
        tokens: list[int] = []
        finish_reason = ""
        prompt_tokens = await self._tokenized(prompt)
        async for part in self._parts(prompt_tokens, sampling):
            texts.append(part.text)
            tokens.extend(part.tokens)
            finish_reason = part.finish_reason or finish_reason
        return Completion("".join(texts), tuple(tokens), finish_reason, len(prompt_tokens))

    async def stream(self, prompt: Prompt, **sampling: Any) -> AsyncGenerator[str, None]:
        """Text, as soon as it is certain."""
        async with aclosing(self.parts(prompt, **sampling)) as parts:
            async for part in parts:
                if part.text:
                    yield part.text

    async def tokens(self, prompt: Prompt, **sampling: Any) -> AsyncGenerator[int, None]:
        """Token ids, as they come; a stop token is the last of them."""
        async with aclosing(self.parts(prompt, **sampling)) as parts:
            async for part in parts:
                for token in part.tokens:
                    yield token

    async def parts(self, prompt: Prompt, **sampling: Any) -> AsyncGenerator[Part, None]:
        """Text and tokens together."""
        async with aclosing(self._parts(await self._tokenized(prompt), sampling)) as parts:
            async for part in parts:
                yield part

    async def _tokenized(self, prompt: Prompt) -> Sequence[int]:
        return await self._texts.pool.run(_token_ids, self._texts.model(), prompt)

    async def _parts(self, prompt: Sequence[int], sampling: Mapping[str, Any]) -> AsyncGenerator[Part, None]:
        checked, limits = self._checked(sampling)
        (request,) = submits(checked, [prompt], limits, lambda: secrets.randbits(63))
        with self.client.reserve(
            rows=1, prompt_tokens=len(prompt), completion_tokens=request.max_tokens, kind="library", tag="library"
        ) as reservation:
            (generation,) = reservation.submit([request])
            stream = TextStream(self._texts.model(), checked.stop, min_tokens=checked.min_tokens)
            async with aclosing(aiter(generation)) as deltas:
                async for delta in deltas:
                    finish = delta.finish
                    by_token = finish is not None and finish.stop_token_id is not None
                    new = stream.push(delta.tokens, stop_token=by_token)
                    tokens = delta.tokens[: new.tokens]
                    if new.stop is not None:
                        generation.cancel(CancelReason.STOP)
                        yield Part(new.text, tokens, FinishReason.STOP.value)
                        return
                    if finish is None:
                        yield Part(new.text, tokens)
                    else:
                        yield Part(new.text + stream.finish().text, tokens, finish.reason.value)

    def _checked(self, sampling: Mapping[str, Any]) -> tuple[Checked, Limits]:
        text = self._texts.model()
        can = self.client.capabilities
        assert can is not None
        limits = Limits(
            vocabulary=min(text.vocabulary, can.vocabulary),
            context=min(text.context, can.context),
            max_tokens=self.settings.max_tokens,
            eos_token_ids=text.eos_token_ids,
            sampling=text.default_sampling,
        )
        stop = sampling.get("stop")
        wanted = {**sampling, "stop": [stop] if isinstance(stop, str) else stop}
        if unknown := wanted.keys() - {field.name for field in fields(Wanted)}:
            raise InvalidRequest(f"unknown sampling argument '{min(unknown)}'", param=min(unknown))
        return check(Wanted(**wanted), limits), limits


def _token_ids(text: TextModel, prompt: Prompt) -> Sequence[int]:
    if isinstance(prompt, str):
        return text.encode(prompt)
    if prompt and isinstance(prompt[0], Mapping):
        return text.encode_chat(text.render_chat(prompt))  # type: ignore[arg-type]
    return prompt  # type: ignore[return-value]
