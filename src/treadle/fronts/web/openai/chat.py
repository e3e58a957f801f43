"""POST /v1/chat/completions: its fields, prompt and answers."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ....errors import InvalidRequest
from ....text import TextView
from ...chat_messages import asks_to_continue, read_turns
from ...generation.pieces import Piece, Usage, WholeChoice
from .field_aliases import Renamed
from .ignored_fields import CHAT_NEUTRAL, NOT_THINKING, refuse_beyond_neutral
from .parsed import ParsedRequest, outline_of, raw_params_of
from .parsing import read
from .schema import KWARG_NAME, MAX_KWARG_CHARS, MAX_TEMPLATE_KWARGS, RESERVED_KWARGS, ChatFields, ChatRequest
from .wire import ChunkWriter, Head, chat_logprobs, encode, usage_json

if TYPE_CHECKING:
    from ....text import TextModel

MESSAGE_OVERHEAD_BYTES = 16
CONTENT = ("messages", "chat_template_kwargs", "continue_final_message", "add_generation_prompt")
ACTED_ON = frozenset(ChatFields.model_fields) - {*CONTENT}
KWARG = re.compile(KWARG_NAME)


class ParsedChat(ParsedRequest):
    """One chat request, parsed."""

    kind = "chat"
    id_prefix = "chatcmpl-"
    prompt_param = "messages"
    stops_of_model = True

    def __init__(self, value: dict[str, Any]) -> None:
        refuse_beyond_neutral(value, CHAT_NEUTRAL)
        body = read(ChatRequest, value)
        super().__init__(body)
        given = self.given = Renamed(body)
        self.messages = read_turns(body.messages)
        self.continues = _continues(body)
        self.template_kwargs = _template_kwargs(body)
        self.add_generation_prompt = body.add_generation_prompt is not False
        max_tokens, limited_by = _max_tokens(body, given)
        self.params = raw_params_of(body, given, max_tokens=max_tokens, logprobs=_logprobs(body))
        self.spellings = {**given.names, "max_tokens": limited_by, "logprobs": "top_logprobs"}

    @property
    def prompts(self) -> int:
        return 1

    def _size(self, model: TextView) -> int:
        text = sum(len(str(part).encode()) for message in self.messages for part in message.values())
        return self.tokens_of(text + MESSAGE_OVERHEAD_BYTES * len(self.messages), model)

    def tokenize(self, model: TextModel, rendered: Callable[[], None], most: int) -> list[Sequence[int]]:
        ids = model.chat_ids(
            self.messages,
            add_generation_prompt=self.add_generation_prompt,
            continue_final_message=self.continues,
            extra=self.template_kwargs,
            rendered=rendered,
            most=most,
        )
        return [ids]

    def outline(self, value: dict[str, Any]) -> dict[str, Any]:
        return outline_of(value, ACTED_ON, {"messages": [{"role": "user", "content": ""}]})

    # Answers -----------------------------------------------------------------------------------------------------

    def chunks(self, head: Head) -> ChunkWriter:
        return ChunkWriter(head, "chat.completion.chunk", with_usage=self.include_usage)

    def first_events(self, writer: ChunkWriter, index: int, piece: Piece, model: TextView) -> bytes:
        delta = {"role": "assistant", "content": ""}
        return writer.choice({"index": index, "delta": delta, "logprobs": None, "finish_reason": None})

    def events(self, writer: ChunkWriter, index: int, piece: Piece, model: TextView) -> bytes:
        events = b""
        if piece.text or piece.entries or (self.return_token_ids and piece.token_ids):
            choice = self._choice(index, piece, model, finish_reason=None)
            choice["delta"] = {"content": piece.text}
            events = writer.choice(choice)
        if piece.finish_reason is not None:
            last = {"index": index, "delta": {}, "logprobs": None, "finish_reason": piece.finish_reason}
            events += writer.choice(last)
        return events

    def whole(self, head: Head, choices: Sequence[WholeChoice], usage: Usage, model: TextView) -> bytes:
        answer = head.fields("chat.completion")
        answer["choices"] = [self._whole_choice(i, choice, model) for i, choice in enumerate(choices)]
        answer["usage"] = usage_json(usage)
        return encode(answer)

    def _whole_choice(self, index: int, choice: WholeChoice, model: TextView) -> dict[str, Any]:
        found = self._choice(index, choice, model, finish_reason=choice.finish_reason)
        found["message"] = {"role": "assistant", "content": "".join(choice.text), "refusal": None}
        return found

    def _choice(
        self, index: int, part: Piece | WholeChoice, model: TextView, finish_reason: str | None
    ) -> dict[str, Any]:
        logprobs = None if self.params.logprobs is None else chat_logprobs(part.entries, model)
        choice: dict[str, Any] = {"index": index, "logprobs": logprobs, "finish_reason": finish_reason}
        if self.return_token_ids:
            choice["token_ids"] = part.token_ids
        return choice


def _max_tokens(body: ChatFields, given: Renamed) -> tuple[int | None, str]:
    """The smaller of both limits, and the name it was given by."""
    limits = [(given["max_tokens"], given.names.get("max_tokens", "max_tokens"))]
    limits.append((body.max_completion_tokens, "max_completion_tokens"))
    smaller, *larger = sorted(limit for limit in limits if limit[0] is not None) or [(None, "max_tokens")]
    given.unused += [("max_tokens", name, most) for most, name in larger]
    return smaller


def _logprobs(body: ChatFields) -> int | None:
    """The number of likely tokens to list with each token; None without log-probabilities."""
    requested = bool(body.top_logprobs) if body.logprobs is None else body.logprobs
    return (body.top_logprobs or 0) if requested else None


def _continues(body: ChatFields) -> bool:
    """Whether the answer continues the last message."""
    if not body.continue_final_message:
        return asks_to_continue(body.messages)
    if body.add_generation_prompt:
        raise InvalidRequest(
            "continue_final_message and add_generation_prompt are both true: the last message can't be left open and "
            "be followed by a new one; leave out one of them",
            param="continue_final_message",
        )
    return True


def _template_kwargs(body: ChatFields) -> dict[str, Any]:
    """Variables for the template. Those in `chat_template_kwargs` win over what other fields say about thinking."""
    thinking: dict[str, Any] = {}
    if any(getattr(body, name) is not None for name in NOT_THINKING):
        thinking["enable_thinking"] = False
    if body.enable_thinking is not None:
        thinking["enable_thinking"] = body.enable_thinking
    return thinking | _checked_kwargs(body.chat_template_kwargs or {})


def _checked_kwargs(given: Mapping[str, Any]) -> dict[str, Any]:
    if len(given) > MAX_TEMPLATE_KWARGS:
        raise InvalidRequest(
            f"chat_template_kwargs has {len(given)} keys: give at most {MAX_TEMPLATE_KWARGS}",
            param="chat_template_kwargs",
        )
    for key, value in given.items():
        where = f"chat_template_kwargs.{key[:64]}"
        if not KWARG.fullmatch(key) or key in RESERVED_KWARGS:
            raise InvalidRequest(f"chat_template_kwargs may not set '{key[:64]}'", param=where)
        if not isinstance(value, (str, int, float, bool, type(None))):
            raise InvalidRequest(f"{where} must be a string, a number, true, false or null", param=where)
        if isinstance(value, str) and len(value) > MAX_KWARG_CHARS:
            raise InvalidRequest(f"{where} has {len(value)} characters: give at most {MAX_KWARG_CHARS}", param=where)
    return dict(given)
