"""POST /v1/messages: its fields, prompt and answers."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ....errors import InvalidRequest, ThreadUnsupported, UnsupportedParameter
from ....text import TextView
from ....text.events import ends_with_call
from ...answer_options import AnswerOptions
from ...field_checks import kind_of
from ...generation.pieces import Usage, WholeChoice
from ...prepared import PreparedPrompts
from ...text_jobs import Enter
from ...validate import MAX_TOKENS, Limits, RawParams, ValidatedRequest, check, rename_params
from ...value_checks import check_number, check_whole
from ..chat_prompt import ChatPrompt
from ..framing import Framing
from ..parsed import MAX_NAME_CHARS, Head, ParsedRequest, StreamWriter
from ..parsing import read
from .content import content_of
from .models import named_model
from .options import read_format, read_thinking
from .reports import REPORTS
from .schema import Conversation, Messages, unknown_fields
from .stream import MessageStream
from .tools import read_tools, searches_in
from .turns import read_conversation
from .wire import PING, AnswerLimits, encode, end_of, message, usage_json

if TYPE_CHECKING:
    from ....text import TextModel
    from ...served_models import Models, ServedModel

CACHE_MARK = "cache_control"
SPELLINGS = {"stop": "stop_sequences"}
PLACEHOLDER = {"messages": [{"role": "user", "content": ""}]}
OUTLINED = ("model", "stream", "max_tokens", "temperature", "top_p", "top_k", "stop_sequences", "thinking")


class ParsedConversation(ParsedRequest):
    """A request with a conversation in Anthropic's dialect: its prompt, and the model that it asks for."""

    prompt_param = "messages"
    stops_of_model = True
    spellings: Mapping[str, str] = SPELLINGS

    def _read(self, body: Conversation) -> None:
        _refuse_unserved(body)
        self.model = body.model
        self.unknown = unknown_fields(body)
        tools = read_tools(body.tools, body.tool_choice)
        thinking = read_thinking(body.thinking, body.output_config)
        self.left_out = tools.left_out
        self.display = thinking.display
        self.options = AnswerOptions(
            tools=tools.specs,
            tool_schemas=tools.places,
            choice=tools.choice,
            parallel=tools.parallel,
            output=read_format(body.output_config, body.output_format),
            thinking_budget=thinking.reasoning.budget,
        )
        turns, continues = read_conversation(body.messages, body.system)
        self.prompt = ChatPrompt(turns, self.options, thinking.reasoning.template_variables(), continues)
        self.image_places = self.prompt.image_places

    def served_by(self, models: Models) -> ServedModel:
        """Return the model of this name, or the default one for a name of Anthropic's, and log what was left out of the
        request. Raises as `Models.get` does."""
        REPORTS.unknown_fields(self.unknown)
        REPORTS.left_out_tools(self.left_out)
        return named_model(models, self.model)

    def _size(self, model: TextView) -> int:
        return self.tokens_of(self.prompt.size_bytes(), model)

    def outline(self, value: dict[str, Any]) -> dict[str, Any]:
        fields = {key: value[key] for key in OUTLINED if value.get(key) is not None}
        if isinstance(fields.get("model"), str):
            fields["model"] = fields["model"][:MAX_NAME_CHARS]
        if has_cache_mark(value):
            fields[CACHE_MARK] = True
        fields["tools"] = [{"type": kind} for kind in searches_in(value.get("tools"))]
        return {**dict.fromkeys(self.unknown), **fields, **PLACEHOLDER}


class ParsedMessages(ParsedConversation):
    """One request for an answer, parsed."""

    kind = "messages"
    id_prefix = "msg_"
    framing = Framing(b"text/event-stream; charset=utf-8", PING)

    def __init__(self, value: dict[str, Any]) -> None:
        body = read(Messages, value)
        self._read(body)
        self.stream = bool(body.stream)
        check_number("temperature", body.temperature, 0, 1)
        stops = tuple(body.stop_sequences or ())
        self.limits = AnswerLimits(body.max_tokens, stops, caches=has_cache_mark(value))
        self.params = RawParams(
            temperature=body.temperature,
            top_p=body.top_p,
            top_k=body.top_k,
            stop=stops,
            max_tokens=body.max_tokens,
            speculate=body.speculate,
            spec_prefill=body.spec_prefill,
        )

    def check_against(self, limits: Limits) -> ValidatedRequest:
        """Validate the parameters. `max_tokens` may be more than what the context and the server's cap leave: clients
        send the most that any model gives. Raises InvalidRequest."""
        self.limits = dataclasses.replace(self.limits, context=limits.context)
        most = self.params.max_tokens
        with rename_params(self.spellings):
            if not most:
                return check(self.params, limits, least_tokens=0)
            validated = check(dataclasses.replace(self.params, max_tokens=None), limits)
        check_whole("max_tokens", most, 0, MAX_TOKENS)
        return dataclasses.replace(validated, completion_cap=most)

    def tokenize(self, model: TextModel, enter: Enter, most: int) -> PreparedPrompts:
        return self._prompt().tokenize(model, enter, most)

    def _prompt(self) -> ChatPrompt:
        return dataclasses.replace(self.prompt, layouts=self.layouts)

    # Answers -----------------------------------------------------------------------------------------------------

    def stream_writer(self, head: Head, text: TextView) -> StreamWriter:
        return MessageStream(head, text, self.limits, self.display, self.events_of)

    def whole(self, head: Head, choices: Sequence[WholeChoice], usage: Usage, text: TextView) -> bytes:
        (choice,) = choices
        events = self.events_of(choice)
        content = content_of(events, self.display)
        end = end_of(choice, usage, self.limits, text, called=ends_with_call(events))
        return encode(message(head, content, end, usage_json(usage, self.limits, head)))


class ParsedCount(ParsedMessages):
    """One request to count the tokens of a prompt. Its other fields are checked where they are given."""

    kind = "count_tokens"

    def __init__(self, value: dict[str, Any]) -> None:
        super().__init__({"max_tokens": 0, **value})

    def tokenize(self, model: TextModel, enter: Enter, most: int) -> PreparedPrompts:
        """Return the prompt's ids alone: no grammar is compiled."""
        return PreparedPrompts([self._prompt().rendered(model, enter, most).ids])


def has_cache_mark(value: Any) -> bool:
    """Whether a part of the request is marked for the cache, at any depth."""
    rest = [value]
    while rest:
        item = rest.pop()
        if isinstance(item, dict):
            if item.get(CACHE_MARK):
                return True
            rest.extend(item.values())
        elif isinstance(item, list):
            rest.extend(item)
    return False


def _refuse_unserved(body: Conversation) -> None:
    if not isinstance(body.mcp_servers, (list, type(None))):
        raise InvalidRequest(f"mcp_servers is {kind_of(body.mcp_servers)}: it must be an array", param="mcp_servers")
    if body.mcp_servers:
        raise UnsupportedParameter(
            "mcp_servers is not supported here: connect to them in the client, and send their tools",
            param="mcp_servers",
        )
    if body.container is not None:
        raise UnsupportedParameter("container is not supported here: leave it out", param="container")
    if body.thread is not None:
        raise ThreadUnsupported(
            "thread is not supported here, as no conversation is held between requests: leave it out and send all "
            "messages (a thread of Anthropic's SDKs does so with unsupported_request_behavior='continue_unthreaded')",
            param="thread",
        )
    if body.compaction is not None:
        raise UnsupportedParameter(
            "compaction is not supported here: leave it out, and ask for a summary in a message", param="compaction"
        )
    if body.model == "":
        raise InvalidRequest("model is empty: name the served model, or leave it out", param="model")
