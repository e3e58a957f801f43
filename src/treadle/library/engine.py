"""`treadle.Engine`: one model and its owner in your own asyncio program."""

from __future__ import annotations

import time
from array import array
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, cast

from ..compose.checks import require_installed
from ..compose.engine import engine_for
from ..compose.images import check_image_hosts, image_service, warn_of_long_images
from ..compose.texts import LocalTexts
from ..compose.waiting import aside
from ..config import Settings
from ..core.refusals import Refusal
from ..core.virtual_queue import Arrival
from ..engine.client import EngineClient
from ..engine.status import status_of
from ..errors import ConfigError, InvalidRequest, StartFailed, spelled
from ..fronts.accounts import Account
from ..fronts.authentication import Caller
from ..fronts.cache_salts import Salts, check_cache_salt
from ..fronts.generation.choice import Choice
from ..fronts.generation.embedding import EmbeddingRequest, embed
from ..fronts.generation.embedding_inputs import ListedInputs
from ..fronts.generation.life import begin
from ..fronts.generation.pieces import STOP, Piece, WholeChoice
from ..fronts.generation.prompts import IdsPrompt, MessagesPrompt, Prompts, TextPrompt
from ..fronts.generation.request import GenerationRequest
from ..fronts.media.service import RequestImages
from ..fronts.served_models import ServedModel, model_names
from ..fronts.validate import Limits, RawParams, ValidatedRequest, check
from ..fronts.value_checks import check_whole
from ..keys import ALL
from ..models.resolve import resolve
from ..telemetry.access_log import RequestRecord
from ..text.events import Event, Text, ends_with_call
from .arguments import Arguments, read_arguments
from .completion import TOOL_CALLS, Completion, calls_of, reasoning_of
from .images import needs_reading, with_sources
from .inputs import RAW, holds_images, read_inputs, read_pooling

ONE_PROGRAM = 1
"""The fingerprint of all calls: a ticket of one of them is valid for any other."""

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]
"""Text, token ids, or chat messages with `role` and `content`, as the HTTP API reads them: unknown keys are ignored. An
image is a part `{"type": "image", "image": ...}`: of Pillow, bytes, a Path, or a URL; `detail` is its third key."""
Item = str | Sequence[int] | Mapping[str, Any]
"""An input of embeddings: text, token ids, or a dict with `text`, `image` or both."""


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

    One of `json_schema` (a schema, or a type that Pydantic knows), `json_object`, `regex`, `choice` and `grammar` gives
    the form of the answer. Chats take `tools` and `tool_choice` in OpenAI's form, and `enable_thinking`,
    `reasoning_effort` and `thinking_budget` (tokens). `Completion` has the reasoning, the calls and the parsed answer.
    """

    def __init__(
        self,
        model: str | Path = "demo",
        *,
        in_process: bool = True,
        progress: Callable[[str], None] = lambda stage: None,
        **settings: Any,
    ) -> None:
        if not isinstance(model, str | Path):
            raise ConfigError(f"model must be text or a Path, not {model!r:.80}", param="model")
        where = model if isinstance(model, str) else str(model.expanduser().absolute())
        values = {"model": where, "in_process": in_process, **settings}
        self.settings = Settings.from_mapping(values, source="treadle.Engine")
        self._progress = progress
        self._model: ServedModel | None = None
        self._texts = LocalTexts()
        self._caller = Caller(b"", "127.0.0.1", ALL, Account())
        self._salts = Salts()
        self._begun = False
        self._stopped = False
        self._client: EngineClient | None = None

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
        self._check_wanted()
        await self._texts.load(folder, self.settings)
        self._check_wanted()
        self._client = client = engine_for(self.settings, lambda: folder)
        client.supervisor.on_stage = self._progress
        images = image_service(self.settings, lambda: client.gate.refuse(Refusal.IMAGE_BUSY))
        names, most = model_names(self.settings), self.settings.max_tokens
        steps = self.settings.prefill_tokens
        model = ServedModel(names, client, self._texts, most, images=images, prefill_tokens=steps)
        check_image_hosts(self.settings, model)
        try:
            await client.start()
            self._check_wanted()
            check_image_hosts(self.settings, model)
            warn_of_long_images(model)
        except BaseException:
            await client.stop()
            raise
        self._model = model

    def _check_wanted(self) -> None:
        if self._stopped:
            self._texts.close()
            raise StartFailed("the engine was stopped before it was ready")

    async def stop(self) -> None:
        """End the engine; what still runs gets an error, and so does a `start` that still loads. Idempotent."""
        self._stopped = True
        if self._client is not None:
            await self._client.stop()
        if self._model is not None and self._model.images is not None:
            await self._model.images.close()
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

    async def generate(self, prompt: Prompt, **arguments: Any) -> Completion:
        """Generate to the end."""
        whole, read = WholeChoice(), read_arguments(arguments)
        async with self._begin(prompt, read) as choice:
            async with aclosing(choice.pieces()) as pieces:
                async for piece in pieces:
                    whole.add(piece)
            called = whole.finish_reason == STOP and ends_with_call(whole.events)
            return Completion(
                text="".join(whole.text),
                tokens=tuple(whole.token_ids),
                finish_reason=TOOL_CALLS if called else whole.finish_reason or "",
                prompt_tokens=len(choice.prompt),
                cached_tokens=choice.cached_tokens,
                kept_tokens=choice.sparse_tokens[1],
                reasoning=reasoning_of(whole.events),
                tool_calls=calls_of(whole.events),
                parse=read.parse,
            )

    async def embed(
        self,
        inputs: Item | Sequence[Item],
        *,
        dimensions: int | None = None,
        pooling: str | None = None,
        cache_salt: str | None = None,
    ) -> list[array[float]]:
        """Return one vector of length 1, as an array of float32 numbers, for each input: texts, lists of token ids, or
        dicts with `text`, `image` (as in a chat) or both, which are rendered as a message of the user.

        `dimensions` cuts vectors to their first numbers. `pooling` is "last", "mean" or "cls"; by default the model's
        own. Raises InvalidRequest with the place, and Busy.
        """
        read = await aside(lambda: read_inputs(inputs)) if holds_images(inputs) else read_inputs(inputs)
        salt = check_cache_salt(cache_salt)
        request = EmbeddingRequest(
            kind="library",
            id="library",
            inputs=ListedInputs(read, "inputs", partial(self._images, salt)),
            caller=self._caller,
            arrival=Arrival(fingerprint=ONE_PROGRAM, repeat=True),
            salts=self._salts,
            record=RequestRecord(id="", method="", path="", started=time.monotonic()),
            dimensions=check_whole("dimensions", dimensions, 1, 2**31 - 1),
            pooling=read_pooling(pooling),
            cache_salt=salt,
        )
        found = await embed(self._served, request)
        return [array("f", vector) for vector in found.vectors]

    async def stream(self, prompt: Prompt, **arguments: Any) -> AsyncGenerator[str, None]:
        """Text, as soon as it is certain, without reasoning and tool calls."""
        async with aclosing(self.pieces(prompt, **arguments)) as pieces:
            async for piece in pieces:
                if piece.text:
                    yield piece.text

    async def events(self, prompt: Prompt, **arguments: Any) -> AsyncGenerator[Event, None]:
        """Text, reasoning and tool calls (`treadle.text.events`), each as soon as it is certain."""
        async with aclosing(self.pieces(prompt, **arguments)) as pieces:
            async for piece in pieces:
                for event in _events_of(piece):
                    yield event

    async def tokens(self, prompt: Prompt, **arguments: Any) -> AsyncGenerator[int, None]:
        """Token ids, as they come; the stop token that ends a sequence is not among them."""
        async with aclosing(self.pieces(prompt, **arguments)) as pieces:
            async for piece in pieces:
                for token in piece.token_ids:
                    yield token

    async def pieces(self, prompt: Prompt, **arguments: Any) -> AsyncGenerator[Piece, None]:
        """Text, events and token ids together; the last piece has the finish reason."""
        async with self._begin(prompt, read_arguments(arguments)) as choice, aclosing(choice.pieces()) as pieces:
            async for piece in pieces:
                yield piece

    @asynccontextmanager
    async def _begin(self, prompt: Prompt, arguments: Arguments) -> AsyncIterator[Choice]:
        """Admit one request and give its choice."""
        if _is_chat(prompt) and needs_reading(cast("Sequence[Any]", prompt)):
            messages = cast("Sequence[Any]", prompt)
            prompt = await aside(lambda: with_sources(messages, "prompt"))
        request = GenerationRequest(
            kind="library",
            id="library",
            prompts=_prompts(prompt, arguments, self._images),
            check=partial(_check, arguments.params),
            caller=self._caller,
            arrival=Arrival(fingerprint=ONE_PROGRAM, repeat=True),
            salts=self._salts,
            record=RequestRecord(id="", method="", path="", started=time.monotonic()),
            stops_of_model=_is_chat(prompt),
        )
        async with begin(self._served, request) as choices:
            (choice,) = choices
            yield choice

    def _images(self, cache_salt: str | None) -> RequestImages | None:
        """Return what prepares the images of a call; None where none are read."""
        salt = self._salts.salt(self._caller.tenant_digest, cache_salt)
        return self._served.images_for(self._caller.tenant, salt)


def _events_of(piece: Piece) -> Sequence[Event]:
    """Return the events of a piece, also where nothing but text is read from the answer."""
    return piece.events or ((Text(piece.text),) if piece.text else ())


def _check(params: RawParams, limits: Limits) -> ValidatedRequest:
    """Validate the parameters. Raises InvalidRequest, also for more than one choice."""
    validated = check(params, limits, least_tokens=1 if params.prompt_logprobs is None else 0)
    if validated.n != 1:
        raise InvalidRequest("n must be 1 here: call again for more", param="n")
    return validated


def _is_chat(prompt: Prompt) -> bool:
    return isinstance(prompt, Sequence) and bool(prompt) and isinstance(prompt[0], Mapping)


def _prompts(prompt: Prompt, arguments: Arguments, images: Callable[[str | None], RequestImages | None]) -> Prompts:
    options = arguments.options
    if _is_chat(prompt):
        messages = cast("Sequence[Mapping[str, Any]]", prompt)
        return MessagesPrompt(messages, "prompt", options, arguments.variables, images)
    if (name := arguments.for_chats) is not None:
        raise InvalidRequest(f"{name} needs a prompt of chat messages", param=name)
    if isinstance(prompt, str):
        return TextPrompt(prompt, options=options)
    if isinstance(prompt, RAW):
        raise InvalidRequest(
            f"a prompt is text, not {type(prompt).__name__}: decode it, or give list(prompt) for token ids",
            param="prompt",
        )
    if isinstance(prompt, Sequence) and all(type(item) is int for item in prompt):
        return IdsPrompt(cast("Sequence[int]", prompt), options=options)
    raise InvalidRequest("a prompt is text, a list of token ids (ints) or a list of chat messages", param="prompt")
