"""Text work of the fronts in text workers: jobs by name, and the calls that ask for them.

A job takes and returns bytes, so that no part of a request's content becomes Python objects on the event loop.
"""

from __future__ import annotations

import contextlib
import logging
from array import array
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from ..errors import ContextLengthExceeded, InvalidRequest
from ..text.formats.base import NONE
from ..text.images import ImageSource, Layout
from ..text.images.anchors import expanded
from ..text.images.prompt import ImagesNeeded, PlacedImage, with_sources
from ..text.work.stages import COMPILING, RENDERING, STAGES, TOKENIZING
from .answer_options import NO_OPTIONS, AnswerOptions, tool_definitions
from .log_once import LogOnce
from .media.needed import NeededImage, needed_image
from .prediction_field import PARAM as PREDICTION
from .prepared import NOTHING, Prepared, PreparedPrompts
from .validate import Limits, ValidatedRequest, completion_budget, prompt_beyond

if TYPE_CHECKING:
    from ..text import TextModel

log = logging.getLogger(__name__)
_loose_tools = LogOnce(log)

Enter = Callable[[int], None]
BUNDLE_CPU_S = 60.0
IMAGE_BYTES = 4096
"""Bytes of text that an image stands for, for the limits of a text worker."""


class TextJobRunner(Protocol):
    """Workers that do text work off the event loop, a bounded amount at a time, each piece within bounds."""

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
        grammar: bytes = b"",
    ) -> bytes:
        """Return the result of a job, by its name. `parsed` and `tokenized` are the bytes of JSON and of text that it
        reads; `grammar` is that of `grammar_of`."""
        ...


# Messages


class TextParams(msgspec.Struct, frozen=True, omit_defaults=True):
    """Parameters of `text`, `messages` and `options`: a prompt of over `context` tokens is counted, not sent back.
    `param` is the field that refusals name. A chat's answer `continues` its last message, or gets a turn of its own,
    which `opens_answer` opens; `variables` are for the template, and `layouts` those of images."""

    context: int
    param: str
    continues: bool = False
    options: AnswerOptions = NO_OPTIONS
    variables: dict[str, Any] = {}
    opens_answer: bool = True
    layouts: dict[bytes, Layout] = {}


class Echoed(msgspec.Struct, frozen=True, array_like=True):
    """An `Echo` without its tokens; `scored`: it has them."""

    text: str
    scored: bool
    offsets: bytes


class Tokenized(msgspec.Struct, frozen=True, omit_defaults=True):
    """Each prompt's number of tokens, their ids (four bytes each; empty for prompts over the limit), and echoes; the
    values that the request's sequences share; and the places of each prompt's images. `needed`: nothing was tokenized,
    as the layouts of these images are needed for that."""

    counts: list[int] = []
    ids: list[bytes] = []
    echoes: list[Echoed] = []
    prepared: Prepared = NOTHING
    places: list[list[PlacedImage]] = []
    needed: list[NeededImage] = []


_encode = msgspec.msgpack.Encoder().encode


# Jobs in the worker


def text_job(model: TextModel, params: bytes, payload: bytes, enter: Enter) -> bytes:
    """Tokenize one text in UTF-8."""
    enter(TOKENIZING)
    given = msgspec.msgpack.decode(params, type=TextParams)
    with about_param(given.param, given.context):
        ids = model.encode(payload.decode("utf-8", "surrogatepass"), most=given.context)
    prepared = prepared_text(model, given.options, enter, [ids])
    return tokenized([ids], given.context, prepared=with_prediction(model, given.options, prepared, given.context))


def messages_job(model: TextModel, params: bytes, payload: bytes, enter: Enter) -> bytes:
    """Render and tokenize one chat, given as turns in msgpack."""
    enter(RENDERING)
    given = msgspec.msgpack.decode(params, type=TextParams)
    turns = [with_sources(turn) for turn in msgspec.msgpack.decode(payload)]
    try:
        with about_param(given.param, given.context):
            prompt = model.chat_prompt(
                turns,
                tools=tool_definitions(given.options),
                extra=given.variables,
                add_generation_prompt=given.opens_answer,
                continue_final_message=given.continues,
                rendered=lambda: enter(TOKENIZING),
                most=given.context,
                images=given.layouts,
            )
    except ImagesNeeded as images:
        return needs_images(images.sources)
    prepared = prepared_chat(model, given.options, prompt.ids, enter)
    prepared = with_prediction(model, given.options, prepared, given.context)
    return tokenized([prompt.ids], given.context, prepared=prepared, places=[prompt.images])


def options_job(model: TextModel, params: bytes, payload: bytes, enter: Enter) -> bytes:
    """Prepare the answer to a prompt of token ids."""
    given = msgspec.msgpack.decode(params, type=TextParams)
    prepared = prepared_text(model, given.options, enter, [ids_of(payload)])
    return tokenized([], given.context, prepared=with_prediction(model, given.options, prepared, given.context))


class ExpandParams(msgspec.Struct, frozen=True):
    """Parameters of `expand`: keys and layouts of the images whose placeholders are in the ids."""

    context: int
    images: list[tuple[bytes, Layout]]


def expand_job(model: TextModel, params: bytes, payload: bytes, enter: Enter) -> bytes:
    """Put the tokens of images in place of their placeholders in token ids."""
    enter(TOKENIZING)
    given = msgspec.msgpack.decode(params, type=ExpandParams)
    assert model.images is not None
    encode = partial(model.encode, add_special_tokens=False)
    ids, places = expanded(ids_of(payload), model.images, given.images, encode)
    return tokenized([ids], given.context, places=[places])


def rendered_job(model: TextModel, params: bytes, payload: bytes, enter: Enter) -> bytes:
    """Prepare the answer to a prompt that another server has rendered."""
    from .prepare import prepare_rendered

    enter(COMPILING)
    given = msgspec.msgpack.decode(params, type=TextParams)
    return tokenized([], given.context, prepared=prepare_rendered(model, given.options, ids_of(payload)))


def prepared_text(model: TextModel, options: AnswerOptions, enter: Enter, prompts: Sequence[Sequence[int]]) -> Prepared:
    """Return what `prepare.prepare_text` does. Its imports, of the grammar engine, wait for the first grammar."""
    if options.output is None:
        return NOTHING
    from .prepare import prepare_text

    enter(COMPILING)
    return prepare_text(model, options, prompts)


def prepared_chat(model: TextModel, options: AnswerOptions, prompt: Sequence[int], enter: Enter) -> Prepared:
    """Return what `prepare.prepare_chat` does, with its imports as late."""
    if options == NO_OPTIONS and not model.formats.always_read:
        return NOTHING
    from .prepare import prepare_chat

    enter(COMPILING)
    return prepare_chat(model, options, prompt)


def with_prediction(model: TextModel, options: AnswerOptions, prepared: Prepared, most: int) -> Prepared:
    """Return `prepared` with the tokens of the prediction. Raises InvalidRequest for more than `most`."""
    if options.prediction is None:
        return prepared
    try:
        ids = model.encode(options.prediction, add_special_tokens=False, most=most)
    except ContextLengthExceeded:
        raise _long_prediction(f"over {most}", most) from None
    except InvalidRequest as error:
        error.param = PREDICTION
        raise
    if len(ids) > most:
        raise _long_prediction(str(len(ids)), most)
    return msgspec.structs.replace(prepared, prediction=tuple(ids))


def _long_prediction(count: str, most: int) -> InvalidRequest:
    message = f"{PREDICTION} has {count} tokens and the model's context is {most}: shorten it"
    return InvalidRequest(message, param=PREDICTION)


def bundle_job(model: TextModel, params: bytes, payload: bytes, enter: Enter) -> bytes:
    """Pack the model's text side as a zip."""
    from .rpc.bundle import bundle_of

    return bundle_of(model.folder, model.chat_template)


@contextlib.contextmanager
def about_param(param: str, context: int) -> Iterator[None]:
    """Refuse prompts of which a part is already longer than `context` in the words of other refusals of prompts, with
    the field `param` unless a part of it is named."""
    try:
        yield
    except ContextLengthExceeded as error:
        raise prompt_beyond(context, f"more than {context}", error.param or param) from None


def grammar_of(options: AnswerOptions) -> bytes:
    """Return a digest of what a request's grammar is made from; b"" where it has none."""
    if options.output is None and (not options.tools or options.choice.mode == NONE):
        return b""
    return blake2b(_encode(msgspec.structs.replace(options, prediction=None)), digest_size=16).digest()


@contextlib.contextmanager
def about_grammar(options: AnswerOptions | None) -> Iterator[None]:
    """Name the field that asks for a grammar in refusals of one that broke a limit of its worker. None: the request's
    content, and that field with it, stayed in the worker."""
    try:
        yield
    except InvalidRequest as error:
        if options is not None and error.param is None and error.message.startswith(STAGES[COMPILING]):
            error.param = options.tools_param if options.output is None else options.output.param
        raise


def tokenized(
    prompts: Sequence[Sequence[int]],
    context: int,
    echoes: Sequence[Echoed] = (),
    prepared: Prepared = NOTHING,
    places: Sequence[Sequence[PlacedImage]] = (),
) -> bytes:
    """Encode the result of a tokenizing job."""
    ids = [array("I", prompt).tobytes() if len(prompt) <= context else b"" for prompt in prompts]
    return _encode(
        Tokenized([len(prompt) for prompt in prompts], ids, list(echoes), prepared, [list(own) for own in places])
    )


def needs_images(sources: Sequence[ImageSource]) -> bytes:
    """Encode the result of a tokenizing job that needs images first. Raises InvalidRequest for one that is not
    base64."""
    return _encode(Tokenized(needed=[needed_image(source) for source in sources]))


JOBS = {
    "text": text_job,
    "messages": messages_job,
    "options": options_job,
    "rendered": rendered_job,
    "expand": expand_job,
    "bundle": bundle_job,
}


# Calls on the event loop


async def tokenize_text(
    pool: TextJobRunner,
    text: str,
    params: ValidatedRequest,
    limits: Limits,
    tenant: str,
    param: str,
    options: AnswerOptions = NO_OPTIONS,
) -> PreparedPrompts:
    """Return one text's token ids. Raises ContextLengthExceeded for one that is too long, InvalidRequest for a grammar,
    and the tokenizer's own refusals."""
    payload = text.encode("utf-8", "surrogatepass")
    given = _encode(TextParams(limits.context, param, options=options))
    with about_grammar(options):
        checked = grammar_of(options)
        data = await pool.run("text", given, payload, tenant=tenant, tokenized=len(payload), grammar=checked)
    return prompts_of(decode_tokenized(data), params, limits, param)


async def text_counted(pool: TextJobRunner, text: str, limits: Limits, tenant: str, param: str) -> Tokenized:
    """Return one text's number of tokens, and their ids unless they are more than the context. Raises
    ContextLengthExceeded for a text of which that is certain, and the tokenizer's own refusals."""
    payload = text.encode("utf-8", "surrogatepass")
    given = _encode(TextParams(limits.context, param))
    return decode_tokenized(await pool.run("text", given, payload, tenant=tenant, tokenized=len(payload)))


async def tokenize_messages(
    pool: TextJobRunner, turns: Sequence[dict[str, Any]], given: TextParams, tenant: str
) -> Tokenized:
    """Return the tokens of a chat, or the images that are needed for them. Raises ContextLengthExceeded for one that is
    too long, InvalidRequest for a grammar, and the template's and tokenizer's own refusals."""
    payload = _encode(turns)
    size = len(payload) + len(given.options.prediction or ()) + IMAGE_BYTES * len(given.layouts)
    with about_grammar(given.options):
        checked = grammar_of(given.options)
        return decode_tokenized(
            await pool.run(
                "messages", _encode(given), payload, tenant=tenant, parsed=size, tokenized=size, grammar=checked
            )
        )


async def prepare_options(
    pool: TextJobRunner,
    options: AnswerOptions,
    limits: Limits,
    tenant: str,
    prompt: Sequence[int] = (),
    *,
    rendered: bool = False,
) -> Prepared:
    """Return the values of a request whose prompt is token ids. The grammar begins behind reasoning that `prompt`
    leaves open; where another server `rendered` it, in the channel of the answer. Raises InvalidRequest for a
    grammar."""
    if options.output is None and options.prediction is None:
        return NOTHING
    given = _encode(TextParams(limits.context, "", options=options))
    with about_grammar(options):
        job, ids = "rendered" if rendered else "options", array("I", prompt).tobytes()
        data = await pool.run(job, given, ids, tenant=tenant, parsed=len(given), grammar=grammar_of(options))
    return decode_tokenized(data).prepared


async def expand_images(
    pool: TextJobRunner, ids: Sequence[int], images: Sequence[tuple[bytes, Layout]], limits: Limits, tenant: str
) -> Tokenized:
    """Return token ids with the tokens of images in place of their placeholders, and their places."""
    given = _encode(ExpandParams(limits.context, list(images)))
    payload = array("I", ids).tobytes()
    return decode_tokenized(
        await pool.run("expand", given, payload, tenant=tenant, tokenized=len(payload) + IMAGE_BYTES * len(images))
    )


async def bundled(pool: TextJobRunner) -> bytes:
    """Return the model's text side as a zip."""
    return await pool.run("bundle", b"", least_cpu_s=BUNDLE_CPU_S)


def decode_tokenized(data: bytes) -> Tokenized:
    """Decode the result of a tokenizing job."""
    return msgspec.msgpack.decode(data, type=Tokenized)


def prompts_of(found: Tokenized, params: ValidatedRequest, limits: Limits, param: str) -> PreparedPrompts:
    """Return each prompt's ids. Raises ContextLengthExceeded for prompts that were too long to be sent back."""
    for count in found.counts:
        if count > limits.context:
            completion_budget(params, count, limits, param)
    for name, reason in found.prepared.loose_tools.items():
        _report_loose_tool(name, reason)
    return PreparedPrompts([ids_of(data) for data in found.ids], found.prepared, found.places)


def _report_loose_tool(name: str, reason: str) -> None:
    """Log once that a tool's arguments are not held to its schema."""
    _loose_tools.warn(
        (name, reason),
        "calls of the tool %s may have any arguments, as its schema can't be enforced (%s): change the schema, or ask "
        "for strict to have such a schema refused",
        name,
        reason,
    )


def ids_of(data: bytes) -> tuple[int, ...]:
    """Decode numbers of four bytes each."""
    ids = array("I")
    ids.frombytes(data)
    return tuple(ids)
