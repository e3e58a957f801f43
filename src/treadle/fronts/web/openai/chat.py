"""POST /v1/chat/completions: what is particular to chat."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ....errors import InvalidRequest, UnsupportedParameter
from ....text import TextModel
from ...rows import Piece
from ...validate import MAX_TOP_LOGPROBS
from .dialect import Ask, wanted_of
from .neutral import CHAT_NEUTRAL, refuse_beyond_neutral
from .schema import ChatFields, ChatRequest, Message, read
from .wire import Choice, ChunkWriter, Head, Usage, chat_logprobs, encode

ROLES = ("system", "developer", "user", "assistant")
MESSAGE_OVERHEAD_BYTES = 16
MAX_TEMPLATE_KWARGS = 64
RESERVED_KWARGS = ("messages", "tools", "documents", "add_generation_prompt", "chat_template", "conversation")


class ChatAsk(Ask):
    """One chat request, read and within its shape."""

    kind = "chat"
    id_prefix = "chatcmpl-"
    prompt_param = "messages"

    def __init__(self, value: dict[str, Any]) -> None:
        refuse_beyond_neutral(value, CHAT_NEUTRAL)
        body = read(ChatRequest, value)
        super().__init__(body)
        if body.continue_final_message:
            raise UnsupportedParameter("continue_final_message is not supported here", param="continue_final_message")
        self.messages = _messages(body.messages)
        self.template_kwargs = _template_kwargs(body.chat_template_kwargs or {})
        self.add_generation_prompt = body.add_generation_prompt is not False
        self.wanted = wanted_of(body, max_tokens=_max_tokens(body), logprobs=_logprobs(body))
        if body.max_tokens is None and body.max_completion_tokens is not None:
            self.spellings = {"max_tokens": "max_completion_tokens"}

    @property
    def prompts(self) -> int:
        return 1

    def size(self, model: TextModel) -> int:
        text = sum(len(str(part).encode()) for message in self.messages for part in message.values())
        return self.tokens_of(text + MESSAGE_OVERHEAD_BYTES * len(self.messages), model)

    def tokenize(self, model: TextModel) -> list[Sequence[int]]:
        rendered = model.render_chat(
            self.messages, add_generation_prompt=self.add_generation_prompt, extra=self.template_kwargs
        )
        return [model.encode_chat(rendered)]

    # Answers -----------------------------------------------------------------------------------------------------

    def chunks(self, head: Head) -> ChunkWriter:
        return ChunkWriter(head, "chat.completion.chunk", with_usage=self.include_usage)

    def first_events(self, writer: ChunkWriter, row: int, piece: Piece, model: TextModel) -> bytes:
        delta = {"role": "assistant", "content": ""}
        return writer.choice({"index": row, "delta": delta, "logprobs": None, "finish_reason": None})

    def events(self, writer: ChunkWriter, row: int, piece: Piece, model: TextModel) -> bytes:
        events = b""
        if piece.text or piece.entries or (self.return_token_ids and piece.token_ids):
            choice = self._choice(row, piece, model, finish_reason=None)
            choice["delta"] = {"content": piece.text}
            events = writer.choice(choice)
        if piece.finish_reason is not None:
            last = {"index": row, "delta": {}, "logprobs": None, "finish_reason": piece.finish_reason}
            events += writer.choice(last)
        return events

    def whole(self, head: Head, choices: Sequence[Choice], usage: Usage, model: TextModel) -> bytes:
        answer = head.fields("chat.completion")
        answer["choices"] = [self._whole_choice(i, choice, model) for i, choice in enumerate(choices)]
        answer["usage"] = usage.as_json()
        return encode(answer)

    def _whole_choice(self, row: int, choice: Choice, model: TextModel) -> dict[str, Any]:
        found = self._choice(row, choice, model, finish_reason=choice.finish_reason)
        found["message"] = {"role": "assistant", "content": "".join(choice.text), "refusal": None}
        return found

    def _choice(self, row: int, part: Piece | Choice, model: TextModel, finish_reason: str | None) -> dict[str, Any]:
        logprobs = None if self.wanted.logprobs is None else chat_logprobs(part.entries, model)
        choice: dict[str, Any] = {"index": row, "logprobs": logprobs, "finish_reason": finish_reason}
        if self.return_token_ids:
            choice["token_ids"] = part.token_ids
        return choice


def _max_tokens(body: ChatFields) -> int | None:
    first, second = body.max_tokens, body.max_completion_tokens
    if first is not None and second is not None and first != second:
        raise InvalidRequest(
            f"max_tokens is {first} and max_completion_tokens is {second}: give one of them", param="max_tokens"
        )
    return second if first is None else first


def _logprobs(body: ChatFields) -> int | None:
    top = body.top_logprobs
    if not body.logprobs:
        if top:
            raise InvalidRequest("top_logprobs needs logprobs: true", param="top_logprobs")
        return None
    if top is not None and not 0 <= top <= MAX_TOP_LOGPROBS:
        raise InvalidRequest(
            f"top_logprobs is out of range: it must be a whole number from 0 to {MAX_TOP_LOGPROBS}",
            param="top_logprobs",
        )
    return top or 0


def _messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    if not messages:
        raise InvalidRequest("messages is empty: give at least one", param="messages")
    return [_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _message(message: Message, at: str) -> dict[str, Any]:
    """The turn as templates know it: plain text and only the keys that say something."""
    for name in ("tool_calls", "tool_call_id", "function_call", "audio"):
        if getattr(message, name):
            raise UnsupportedParameter(f"{at}.{name} is not supported here: leave it out", param=f"{at}.{name}")
    if message.role in ("tool", "function"):
        raise UnsupportedParameter(f"{at}.role '{message.role}' is not supported here yet", param=f"{at}.role")
    if message.role not in ROLES:
        raise InvalidRequest(
            f"{at}.role is '{message.role[:40]}': it must be one of {', '.join(ROLES)}", param=f"{at}.role"
        )
    turn: dict[str, Any] = {"role": "system" if message.role == "developer" else message.role}
    turn["content"] = _content(message, at)
    if message.name is not None:
        turn["name"] = message.name
    reasoning = message.reasoning_content or message.reasoning
    if reasoning:
        turn["reasoning_content"] = reasoning
    return turn


def _content(message: Message, at: str) -> str | list[dict[str, str]]:
    """A string, or text parts: how those are joined is the template's business."""
    if message.content is None:
        raise InvalidRequest(f"{at}.content is missing: give a string", param=f"{at}.content")
    if isinstance(message.content, str):
        return message.content
    parts = []
    for i, part in enumerate(message.content):
        where = f"{at}.content[{i}]"
        if part.type != "text":
            raise UnsupportedParameter(
                f"{where}.type '{part.type[:40]}' is not supported here: this model reads text", param=f"{where}.type"
            )
        if part.text is None:
            raise InvalidRequest(f"{where}.text is missing: give a string", param=f"{where}.text")
        parts.append({"type": "text", "text": part.text})
    if not parts:
        raise InvalidRequest(f"{at}.content is empty: give at least one part", param=f"{at}.content")
    return parts


def _template_kwargs(given: Mapping[str, Any]) -> dict[str, Any]:
    if len(given) > MAX_TEMPLATE_KWARGS:
        raise InvalidRequest(f"chat_template_kwargs has over {MAX_TEMPLATE_KWARGS} keys", param="chat_template_kwargs")
    for key, value in given.items():
        if not key.isidentifier() or key.startswith("_") or key in RESERVED_KWARGS or len(key) > 64:
            raise InvalidRequest(
                f"chat_template_kwargs may not set '{key[:64]}'", param=f"chat_template_kwargs.{key[:64]}"
            )
        if not isinstance(value, (str, int, float, bool, type(None))) or len(str(value)) > 4096:
            raise InvalidRequest(
                f"chat_template_kwargs.{key} must be a string, a number, true, false or null",
                param=f"chat_template_kwargs.{key}",
            )
    return dict(given)
