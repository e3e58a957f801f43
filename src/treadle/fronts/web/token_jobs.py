"""Jobs of text workers that answer `/tokenize`, `/detokenize` and `/tokenizer_info`, from the body to the answer's
JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from ...errors import InvalidRequest
from ...text import Detokenizer
from ...text.images import Layout
from ...text.images.prompt import ImagesNeeded
from ...text.work.stages import PARSING, TOKENIZING
from ..media.needed import NeededImage, needed_image
from ..media.parts import check_images
from ..strict_json import parse_json
from ..text_jobs import Enter, about_param
from ..validate import check_prompt_ids
from .neutral_fields import refuse_beyond_neutral
from .openai.chat import ParsedChat
from .openai.schema import DetokenizeFields, TokenizeChatFields, TokenizeTextFields
from .parsing import read
from .worker_limits import WorkerLimits

if TYPE_CHECKING:
    from ...text import TextModel

CHAT_NEUTRAL: dict[str, tuple[Any, ...]] = {"add_special_tokens": (False,), "mm_processor_kwargs": ()}
OF_CHATS = frozenset(TokenizeChatFields.model_fields)
_encode = msgspec.msgpack.Encoder().encode


class TokenParams(msgspec.Struct, frozen=True):
    """Parameters of the jobs: the limits of requests, and the layouts of a chat's images."""

    limits: WorkerLimits
    layouts: dict[bytes, Layout] = {}


class TokenAnswer(msgspec.Struct, frozen=True):
    """The name of the model that a request asks for, and the JSON that answers it. `needed`: there is none yet, as the
    layouts of these images are needed for it."""

    model: str | None = None
    body: bytes = b""
    needed: list[NeededImage] = []


def tokenize_request_job(model: TextModel, params: bytes, payload: bytes, enter: Enter) -> bytes:
    """Tokenize the prompt or the chat of a body."""
    enter(PARSING)
    given = msgspec.msgpack.decode(params, type=TokenParams)
    value = parse_json(payload)
    if ("messages" in value) == ("prompt" in value):
        raise InvalidRequest("give either messages, a chat, or prompt, a text", param="messages")
    tokenize = _chat if "messages" in value else _text
    try:
        name, ids, with_strings = tokenize(model, value, given, enter)
    except ImagesNeeded as images:
        needed = [needed_image(source) for source in images.sources]
        return _encode(TokenAnswer(value.get("model"), needed=needed))
    strings = model.token_strings(ids) if with_strings else None
    counts = {"count": len(ids), "max_model_len": given.limits.context}
    return _answer(name, {**counts, "tokens": ids, "token_strs": strings})


def detokenize_request_job(model: TextModel, params: bytes, payload: bytes, enter: Enter) -> bytes:
    """Return the text of a body's token ids, special tokens included."""
    enter(PARSING)
    limits = msgspec.msgpack.decode(params, type=TokenParams).limits.with_model(model)
    request = read(DetokenizeFields, parse_json(payload))
    if request.tokens:
        check_prompt_ids(request.tokens, limits, "tokens")
    enter(TOKENIZING)
    detokenizer = Detokenizer(model, skip_special_tokens=False)
    text = detokenizer.push(request.tokens) + detokenizer.finish()
    return _answer(request.model, {"prompt": text})


def tokenizer_info_job(model: TextModel, params: bytes, payload: bytes, enter: Enter) -> bytes:
    """Return what clients need of the tokenizer to write prompts of chats themselves."""
    named = {name: model.special_tokens.get(name) for name in ("bos_token", "eos_token", "pad_token")}
    source = None if model.chat_template is None else model.chat_template.source
    template = None if source is None else source.encode("utf-8", "replace").decode()  # JSON has no lone surrogates
    return msgspec.json.encode({"tokenizer_class": model.tokenizer_class, **named, "chat_template": template})


JOBS = {
    "tokenize_request": tokenize_request_job,
    "detokenize_request": detokenize_request_job,
    "tokenizer_info": tokenizer_info_job,
}

Tokens = tuple[str | None, Sequence[int], bool]
"""The name of the model, the token ids, and whether their strings are asked for."""


def _text(model: TextModel, value: dict[str, Any], given: TokenParams, enter: Enter) -> Tokens:
    request = read(TokenizeTextFields, value)
    enter(TOKENIZING)
    with about_param("prompt", given.limits.context):
        special = request.add_special_tokens is not False
        ids = model.encode(request.prompt, add_special_tokens=special, most=given.limits.context)
    return request.model, ids, bool(request.return_token_strs)


def _chat(model: TextModel, value: dict[str, Any], given: TokenParams, enter: Enter) -> Tokens:
    """Tokenize what would be a chat request without the fields of `/tokenize`, as that request does. Its grammar is
    compiled too, to refuse what the chat would. Raises ImagesNeeded for images without a layout."""
    own = read(TokenizeChatFields, {name: value[name] for name in OF_CHATS if name in value})
    refuse_beyond_neutral(value, CHAT_NEUTRAL)
    request = ParsedChat({name: given for name, given in value.items() if name not in OF_CHATS})
    limits = given.limits.with_model(model)
    request.check_against(limits)
    check_images(request.image_places, model.images, model.no_images, limits.countable.context)
    request.layouts = given.layouts
    with about_param("messages", given.limits.context):
        (ids,) = request.tokenize(model, enter, given.limits.context).ids
    return request.model, ids, bool(own.return_token_strs)


def _answer(name: str | None, answer: dict[str, Any]) -> bytes:
    return _encode(TokenAnswer(name, msgspec.json.encode(answer)))
