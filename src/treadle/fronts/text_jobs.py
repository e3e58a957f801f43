"""Text work of the fronts, as text workers do it: jobs by name, and the calls that ask for them.

A job takes and gives bytes, so that nothing of a request's content becomes Python objects on the event loop: a large
body is parsed in the worker, once to be checked and once to be tokenized, and only its parameters come back.
"""

from __future__ import annotations

import contextlib
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from ..errors import ContextLengthExceeded
from ..text.work.stages import PARSING, RENDERING, TOKENIZING
from .strict_json import parse_json
from .validate import Limits, ValidatedRequest, completion_budget
from .web.openai.chat import ChatAsk
from .web.openai.completions import CompletionAsk
from .web.openai.dialect import Ask
from .web.openai.echo import Echo

if TYPE_CHECKING:
    from ..text import TextModel

Enter = Callable[[int], None]
Shape = type[ChatAsk] | type[CompletionAsk]
SHAPES: Mapping[str, Shape] = {ChatAsk.kind: ChatAsk, CompletionAsk.kind: CompletionAsk}
BUNDLE_CPU_S = 60.0


class Pool(Protocol):
    """Does text work off the event loop, a bounded amount at a time, each within a bound."""

    async def run(
        self,
        job: str,
        params: bytes,
        payload: bytes = b"",
        *,
        tenant: str = "",
        parsed: int = 0,
        tokenized: int = 0,
        least_cpu_s: float = 0.0,
    ) -> bytes:
        """The result of a job of `JOBS`. `parsed` and `tokenized` are the bytes of JSON and of text that it reads."""
        ...


# What crosses


class ReadParams(msgspec.Struct, frozen=True):
    """Which shape a body should have, and the limits it is checked against."""

    kind: str
    vocabulary: int
    context: int
    max_tokens: int | None


class Outline(msgspec.Struct, frozen=True):
    """A checked request without its content: the other fields, and the size of the prompts in tokens, about."""

    value: dict[str, Any]
    prompts: int
    size: int


class TokenizeParams(msgspec.Struct, frozen=True):
    """Prompts of over `context` tokens are counted, not sent back."""

    kind: str
    context: int


class Echoed(msgspec.Struct, frozen=True, array_like=True):
    """An `Echo` without its tokens; `scored`: it has them."""

    text: str
    scored: bool
    offsets: bytes


class Tokenized(msgspec.Struct, frozen=True):
    """Each prompt's number of tokens, their ids (four bytes each; none where they are too many), and echoes."""

    counts: list[int]
    ids: list[bytes]
    echoes: list[Echoed] = []


_encode = msgspec.msgpack.Encoder().encode


# In the worker


def read_body(model: TextModel, params: bytes, payload: bytes, enter: Enter) -> bytes:
    """Parse and check a body."""
    enter(PARSING)
    wanted = msgspec.msgpack.decode(params, type=ReadParams)
    limits = Limits(
        vocabulary=wanted.vocabulary,
        context=wanted.context,
        max_tokens=wanted.max_tokens,
        eos_token_ids=model.eos_token_ids,
        sampling=model.default_sampling,
    )
    value = parse_json(payload)
    ask = SHAPES[wanted.kind](value)
    ask.check_against(limits)
    return _encode(Outline(ask.outline(value), ask.prompts, ask.size(model)))


def tokenize_body(model: TextModel, params: bytes, payload: bytes, enter: Enter) -> bytes:
    """The token ids of a body's prompts. The body was checked before."""
    enter(PARSING)
    wanted = msgspec.msgpack.decode(params, type=TokenizeParams)
    ask = SHAPES[wanted.kind](parse_json(payload))
    enter(RENDERING if ask.kind == ChatAsk.kind else TOKENIZING)
    with _about(ask.prompt_param):
        prompts = ask.tokenize(model, lambda: enter(TOKENIZING), wanted.context)
    echoes = [Echoed(echo.text, bool(echo.tokens), array("I", echo.offsets).tobytes()) for echo in ask.echoes]
    return _tokenized(prompts, wanted.context, echoes)


def tokenize_text(model: TextModel, params: bytes, payload: bytes, enter: Enter) -> bytes:
    """The token ids of one text in UTF-8."""
    enter(TOKENIZING)
    wanted = msgspec.msgpack.decode(params, type=TokenizeParams)
    with _about("input"):
        ids = model.encode(payload.decode("utf-8"), most=wanted.context)
    return _tokenized([ids], wanted.context, [])


def bundle(model: TextModel, params: bytes, payload: bytes, enter: Enter) -> bytes:
    """The model's text side as a zip."""
    from .rpc.bundle import bundle_of

    return bundle_of(model.folder, model.chat_template)


@contextlib.contextmanager
def _about(param: str) -> Iterator[None]:
    """Prompts that are too long are the fault of the field `param`."""
    try:
        yield
    except ContextLengthExceeded as error:
        error.param = param
        raise


def _tokenized(prompts: Sequence[Sequence[int]], context: int, echoes: list[Echoed]) -> bytes:
    ids = [array("I", prompt).tobytes() if len(prompt) <= context else b"" for prompt in prompts]
    return _encode(Tokenized([len(prompt) for prompt in prompts], ids, echoes))


JOBS = {"read": read_body, "tokenize": tokenize_body, "text": tokenize_text, "bundle": bundle}


# On the event loop


async def read_aside(pool: Pool, kind: str, body: bytes, limits: Limits, tenant: str) -> Ask:
    """A large body as a request, without its content. Raises what is wrong with it."""
    params = ReadParams(kind, limits.vocabulary, limits.context, limits.max_tokens)
    data = await pool.run("read", _encode(params), body, tenant=tenant, parsed=len(body))
    outline = msgspec.msgpack.decode(data, type=Outline)
    ask: Ask = SHAPES[kind](outline.value)
    ask.outlined = outline.size
    return ask


async def tokenize(
    pool: Pool, ask: Ask, body: bytes, checked: ValidatedRequest, limits: Limits, tenant: str
) -> list[Sequence[int]]:
    """The request's prompts as token ids. Raises ContextLengthExceeded for one that is too long, and the template's
    and tokenizer's own refusals."""
    params = _encode(TokenizeParams(ask.kind, limits.context))
    size = len(body)
    data = await pool.run("tokenize", params, body, tenant=tenant, parsed=size, tokenized=size)
    found = msgspec.msgpack.decode(data, type=Tokenized)
    prompts = _prompts(found, checked, limits, ask.prompt_param)
    ask.echoes = [_echo(*both) for both in zip(found.echoes, prompts, strict=False)]
    return prompts


async def tokenize_alone(
    pool: Pool, text: str, checked: ValidatedRequest, limits: Limits, tenant: str
) -> Sequence[int]:
    """One text's token ids."""
    data = text.encode("utf-8")
    params = _encode(TokenizeParams("", limits.context))
    data = await pool.run("text", params, data, tenant=tenant, tokenized=len(data))
    return _prompts(msgspec.msgpack.decode(data, type=Tokenized), checked, limits, "input")[0]


async def bundled(pool: Pool) -> bytes:
    """The model's text side as a zip."""
    return await pool.run("bundle", b"", least_cpu_s=BUNDLE_CPU_S)


def _prompts(found: Tokenized, checked: ValidatedRequest, limits: Limits, param: str) -> list[Sequence[int]]:
    for count in found.counts:
        if count > limits.context:
            completion_budget(checked, count, limits, param)
    return [_ids(data) for data in found.ids]


def _ids(data: bytes) -> tuple[int, ...]:
    ids = array("I")
    ids.frombytes(data)
    return tuple(ids)


def _echo(echoed: Echoed, prompt: Sequence[int]) -> Echo:
    if not echoed.scored:
        return Echo(echoed.text)
    return Echo(echoed.text, prompt, _ids(echoed.offsets))
