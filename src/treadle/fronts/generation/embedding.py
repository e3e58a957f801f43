"""The life of a request for embeddings: check, reserve, tokenize, resize, submit, and one vector for each input.

The order is that of `life.begin`. Inputs are sequences beside those that generate. A request takes as many places as
can run at once at most, whatever its number of inputs: each further input takes the place of one that has ended, and
then waits for its slot like any other sequence, so that long lists delay nobody else's turn.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from ...core.messages import Pooling, Submit
from ...core.pooling import EmbeddingCapabilities
from ...core.virtual_queue import Arrival
from ...engine.generation import Generation
from ...engine.reservation import Reservation
from ...errors import InvalidRequest, RequestCancelled
from ...telemetry.access_log import RequestRecord
from ...text import TextView
from ..authentication import Caller
from ..cache_salts import Salts
from ..prepared import PreparedPrompts
from ..served_models import ServedModel
from ..text_jobs import TextJobRunner
from ..validate import Limits
from .choice import together
from .request import Registration


class EmbeddingInputs(Protocol):
    """The inputs of one request."""

    def __len__(self) -> int: ...

    def size(self, text: TextView, limits: Limits) -> int:
        """Return about how many tokens all inputs have. Raises InvalidRequest for inputs that are wrong, or too long
        beyond doubt."""
        ...

    async def tokenize(self, pool: TextJobRunner, limits: Limits, tenant: str) -> PreparedPrompts:
        """Return the token ids of each input, at least one and within the context, and their images, which the caller
        releases. Raises InvalidRequest with the place of the input at fault, and Busy where the text workers have too
        much to do."""
        ...


@dataclass(frozen=True, kw_only=True)
class EmbeddingRequest:
    """One request. `dimensions` cuts vectors to their first numbers; `pooling` None is the model's own. The other
    fields are those of `GenerationRequest`."""

    kind: str
    id: str
    inputs: EmbeddingInputs
    caller: Caller
    arrival: Arrival
    salts: Salts
    record: RequestRecord
    dimensions: int | None = None
    pooling: Pooling | None = None
    priority: int = 0
    cache_salt: str | None = None
    register: Callable[[], AbstractContextManager[Registration]] | None = None


@dataclass(frozen=True, slots=True)
class Embeddings:
    """Vectors of length 1, in the order of the inputs, as float32 in the machine's byte order; and the tokens of all
    inputs."""

    vectors: Sequence[bytes]
    prompt_tokens: int


async def embed(
    model: ServedModel, request: EmbeddingRequest, *, clock: Callable[[], float] = time.monotonic
) -> Embeddings:
    """Return the embeddings of all inputs. A caller that is cancelled takes its sequences with it.

    Raises like `life.begin`; InvalidRequest also where the model gives no embeddings, and for `dimensions` and
    `pooling` that it does not have.
    """
    text, limits = model.text(), model.limits()
    pooling = check_embedding(model, request.pooling, request.dimensions)
    request.caller.check_priority(request.priority)
    with _reserved(model, request, request.inputs.size(text, limits), clock) as (reservation, registration):
        tokenize = partial(request.inputs.tokenize, model.texts.pool, limits, request.caller.tenant)
        prompts = await (tokenize() if registration is None else registration.preparing(tokenize))
        try:
            request.record.prompt_tokens = sum(map(len, prompts.ids))
            if registration is not None:
                if registration.aborted:
                    raise RequestCancelled("the request was aborted")
                registration.hold(reservation)
            run = _Run(reservation, _submits(request, prompts, pooling), request.record, prompts.ended)
            vectors = await run.vectors(_places(model, request))
        finally:
            prompts.release()
    cut = request.dimensions
    unit = await asyncio.to_thread(lambda: [normalized(vector, cut) for vector in vectors])
    return Embeddings(unit, request.record.prompt_tokens)


def _submits(request: EmbeddingRequest, prompts: PreparedPrompts, pooling: Pooling) -> list[Submit]:
    salt = request.salts.salt(request.caller.tenant_digest, request.cache_salt)
    return [
        Submit(
            id="",
            prompt=tuple(prompt),
            max_tokens=0,
            pooling=pooling,
            salt=salt,
            priority=request.priority,
            images=prompts.images[place] if prompts.images else (),
        )
        for place, prompt in enumerate(prompts.ids)
    ]


def check_embedding(model: ServedModel, pooling: Pooling | None, dimensions: int | None) -> Pooling:
    """Return the pooling to use. Raises InvalidRequest for what the model does not have."""
    can = model.engine.capabilities
    able = EmbeddingCapabilities(poolings=tuple(Pooling)) if can is None else can.embedding  # unknown: it loads
    if able.unavailable:
        raise InvalidRequest(f"the model '{model.name}' gives no embeddings: {able.unavailable}", param="model")
    if dimensions is not None and 0 < able.dimensions < dimensions:
        raise InvalidRequest(
            f"dimensions is {dimensions} and this model's embeddings have {able.dimensions}: ask for at most that",
            param="dimensions",
        )
    if pooling is not None and pooling not in able.poolings:
        known = ", ".join(able.poolings)
        raise InvalidRequest(
            f"pooling is '{pooling.value}' and this model was trained for {known}: leave it out", param="pooling"
        )
    return pooling or able.poolings[0]


def normalized(vector: bytes, dimensions: int | None = None) -> bytes:
    """Return the first `dimensions` numbers of a float32 vector, scaled to length 1. A vector of zeros is left."""
    numbers = array("f", vector)[:dimensions]
    length = math.hypot(*numbers)
    return array("f", [number / length for number in numbers]).tobytes() if length else numbers.tobytes()


def _places(model: ServedModel, request: EmbeddingRequest) -> int:
    """Return how many places the request takes: no more sequences than can run at once, or than its key may run."""
    most = request.caller.account.most_running
    running = model.engine.gate.limits.running
    return min(len(request.inputs), running, running if most is None else most)


@contextlib.contextmanager
def _reserved(
    model: ServedModel, request: EmbeddingRequest, size: int, clock: Callable[[], float]
) -> Iterator[tuple[Reservation, Registration | None]]:
    """The request's registration, charge and places, for as long as the block runs."""
    record, inputs, places = request.record, len(request.inputs), _places(model, request)
    record.public_id, record.rows = request.id, inputs
    register: AbstractContextManager[Registration | None] = (
        contextlib.nullcontext() if request.register is None else request.register()
    )
    with (
        register as registration,
        request.caller.account.serve(record, rows=places, tokens=size, clock=clock, prompts=inputs),
        model.engine.reserve(
            rows=places,
            prompt_tokens=-(-size * places // inputs),
            completion_tokens=0,
            kind=request.kind,
            tag=request.id,
            arrival=request.arrival,
            prompts=inputs,
            upcoming=inputs - places,
        ) as reservation,
    ):
        yield reservation, registration


class _Run:
    """The sequences of one request: some run or wait, the others come in the places of those that have ended. `on_end`
    is called with the place of each input that has its vector."""

    def __init__(
        self,
        reservation: Reservation,
        submits: Sequence[Submit],
        record: RequestRecord,
        on_end: Callable[[int], None],
    ) -> None:
        self._reservation = reservation
        self._submits = submits
        self._record = record
        self._on_end = on_end
        self._vectors = [b""] * len(submits)
        self._rest: Iterator[tuple[int, Submit]] = iter(())

    async def vectors(self, places: int) -> Sequence[bytes]:
        """Return all vectors; `places` sequences at a time."""
        largest = sorted(map(len, (submit.prompt for submit in self._submits)), reverse=True)[:places]
        self._reservation.resize(prompt_tokens=sum(largest), completion_tokens=0)
        first = self._reservation.submit(self._submits[:places])
        self._rest = iter(list(enumerate(self._submits))[places:])
        try:
            await together(self._take_turns(*turn) for turn in enumerate(first))
        finally:
            self._record.ran = any(generation.runs for generation in first)
        self._record.wait_s = first[0].wait_s
        return self._vectors

    async def _take_turns(self, place: int, generation: Generation) -> None:
        """Read the vector of one sequence, then of the next that takes its place."""
        while True:
            self._vectors[place] = await _vector(generation)
            self._on_end(place)
            self._record.cached_tokens += generation.cached_tokens
            following = next(self._rest, None)
            if following is None:
                return
            place, submit = following
            generation = self._reservation.submit_next(submit)


async def _vector(generation: Generation) -> bytes:
    """Wait for the sequence's end. Raises the error that ended it."""
    async with contextlib.aclosing(aiter(generation)) as deltas:
        async for delta in deltas:
            if delta.finish is not None:
                return delta.finish.vector
    raise AssertionError("a sequence ends once")
