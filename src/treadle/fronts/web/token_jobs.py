"""Jobs of text workers that answer `/tokenize` and `/detokenize`, from the body to the answer's JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from ...errors import InvalidRequest, UnsupportedParameter
from ...text import Detokenizer
from ...text.images.prompt import ImagesNeeded
from ...text.work.stages import PARSING, TOKENIZING
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


class TokenAnswer(msgspec.Struct, frozen=True):
    """The name of the model that a request asks for, and the JSON that answers it."""

    model: str | None
    body: bytes


def tokenize_request_job(model: TextModel, params: bytes, payload: bytes, enter: Enter) -> bytes:
    """Tokenize the prompt or the chat of a body."""
    enter(PARSING)
    limits = msgspec.msgpack.decode(params, type=WorkerLimits)
    value = parse_json(payload)
    if ("messages" in value) == ("prompt" in value):
        raise InvalidRequest("give either messages, a chat, or prompt, a text", param="messages")
    tokenize = _chat if "messages" in value else _text
    name, ids, with_strings = tokenize(model, value, limits, enter)
    strings = model.token_strings(ids) if with_strings else None
    return _answer(name, {"count": len(ids), "max_model_len": limits.context, "tokens": ids, "token_strs": strings})


def detokenize_request_job(model: TextModel, params: bytes, payload: bytes, enter: Enter) -> bytes:
    """Return the text of a body's token ids, special tokens included."""
    enter(PARSING)
    limits = msgspec.msgpack.decode(params, type=WorkerLimits).with_model(model)
    request = read(DetokenizeFields, parse_json(payload))
    if request.tokens:
        check_prompt_ids(request.tokens, limits, "tokens")
    enter(TOKENIZING)
    detokenizer = Detokenizer(model, skip_special_tokens=False)
    text = detokenizer.push(request.tokens) + detokenizer.finish()
    return _answer(request.model, {"prompt": text})


JOBS = {"tokenize_request": tokenize_request_job, "detokenize_request": detokenize_request_job}

Tokens = tuple[str | None, Sequence[int], bool]
"""The name of the model, the token ids, and whether their strings are asked for."""


def _text(model: TextModel, value: dict[str, Any], limits: WorkerLimits, enter: Enter) -> Tokens:
    request = read(TokenizeTextFields, value)
    enter(TOKENIZING)
    with about_param("prompt"):
        special = request.add_special_tokens is not False
        ids = model.encode(request.prompt, add_special_tokens=special, most=limits.context)
    return request.model, ids, bool(request.return_token_strs)


def _chat(model: TextModel, value: dict[str, Any], limits: WorkerLimits, enter: Enter) -> Tokens:
    """Tokenize what would be a chat request without the fields of `/tokenize`, as that request does. Its grammar is
    compiled too, to refuse what the chat would."""
    own = read(TokenizeChatFields, {name: value[name] for name in OF_CHATS if name in value})
    refuse_beyond_neutral(value, CHAT_NEUTRAL)
    request = ParsedChat({name: given for name, given in value.items() if name not in OF_CHATS})
    request.check_against(limits.with_model(model))
    try:
        with about_param("messages"):
            (ids,) = request.tokenize(model, enter, limits.context).ids
    except ImagesNeeded as images:
        at = images.sources[0].at
        message = f"{at} is an image: /tokenize takes text, and /v1/messages/count_tokens counts images too"
        raise UnsupportedParameter(message, param=at) from None
    return request.model, ids, bool(own.return_token_strs)


def _answer(name: str | None, answer: dict[str, Any]) -> bytes:
    return msgspec.msgpack.encode(TokenAnswer(name, msgspec.json.encode(answer)))
