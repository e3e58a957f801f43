"""POST /v1/chat/completions: its fields, prompt and answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ....errors import InvalidRequest
from ....text import TextView
from ....text.events import Event, Reasoning, ends_with_call
from ...answer_options import AnswerOptions
from ...chat_messages import read_turns
from ...generation.pieces import STOP, Piece, Usage, WholeChoice
from ...output_fields import FIELDS as OUTPUT_FIELDS
from ...output_fields import read_output
from ...prediction_field import read_prediction
from ...prepared import PreparedPrompts
from ...reasoning_fields import ReasoningOptions, read_reasoning
from ...text_jobs import Enter
from ...tool_fields import read_choice, read_function_call, read_functions, read_tools
from ..chat_prompt import ChatPrompt, continues
from ..neutral_fields import refuse_beyond_neutral
from ..parsed import Head
from ..parsing import read
from ..template_kwargs import checked_kwargs
from .event_deltas import delta_of, message_of, older_delta_of
from .field_aliases import Renamed
from .ignored_fields import CHAT_NEUTRAL
from .parsed import ParsedOpenAi, outline_of, raw_params_of
from .schema import ChatFields, ChatRequest
from .wire import ChunkWriter, chat_logprobs, encode, head_fields, stop_reason, usage_json

if TYPE_CHECKING:
    from ....text import TextModel

TOOL_FIELDS = ("tools", "tool_choice", "parallel_tool_calls", "functions", "function_call")
CONTENT = (
    *("messages", "chat_template_kwargs", "continue_final_message", "add_generation_prompt"),
    *(*TOOL_FIELDS, *OUTPUT_FIELDS, "prediction"),
)
ACTED_ON = frozenset(ChatFields.model_fields) - {*CONTENT}
OLDER_FORM: dict[str, Any] = {"functions": [{"name": "f"}]}


class ParsedChat(ParsedOpenAi):
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
        turns = read_turns(body.messages)
        is_open = continues(body.messages, body.continue_final_message, body.add_generation_prompt)
        reasoning = read_reasoning(value, body.enable_thinking)
        self.shows_reasoning = reasoning.shown
        variables = reasoning.template_variables() | checked_kwargs(body.chat_template_kwargs or {})
        self.options = _options(body, value, reasoning)
        opens_answer = body.add_generation_prompt is not False
        self.prompt = ChatPrompt(turns, self.options, variables, is_open, opens_answer)
        self.image_places = self.prompt.image_places
        self.older_form = bool(body.functions)
        self._called: dict[int, bool] = {}
        max_tokens, limited_by = _max_tokens(body, given)
        self.params = raw_params_of(body, given, max_tokens=max_tokens, logprobs=_logprobs(body))
        self.spellings = {**given.names, "max_tokens": limited_by, "logprobs": "top_logprobs"}

    def _size(self, model: TextView) -> int:
        return self.tokens_of(self.prompt.size_bytes(), model)

    def tokenize(self, model: TextModel, enter: Enter, most: int) -> PreparedPrompts:
        return replace(self.prompt, layouts=self.layouts).tokenize(model, enter, most)

    def outline(self, value: dict[str, Any]) -> dict[str, Any]:
        content = {"messages": [{"role": "user", "content": ""}]} | (OLDER_FORM if self.older_form else {})
        return outline_of(value, ACTED_ON, content)

    # Answers -----------------------------------------------------------------------------------------------------

    def chunks(self, head: Head) -> ChunkWriter:
        return ChunkWriter(head, "chat.completion.chunk", with_usage=self.include_usage)

    def first_events(self, writer: ChunkWriter, index: int, piece: Piece, model: TextView) -> bytes:
        delta = {"role": "assistant", "content": "" if self.prepared.reader is None else None}
        return writer.choice({"index": index, "delta": delta, "logprobs": None, "finish_reason": None})

    def events(self, writer: ChunkWriter, index: int, piece: Piece, model: TextView) -> bytes:
        events = b""
        deltas = self._deltas(index, piece)
        if not deltas and (piece.entries or (self.return_token_ids and piece.token_ids)):
            deltas = [{"content": ""}]
        with_text = next((i for i, delta in enumerate(deltas) if "content" in delta), 0)
        for i, delta in enumerate(deltas):
            choice = self._choice(index, piece if i == with_text else Piece(), model, finish_reason=None)
            choice["delta"] = delta
            events += writer.choice(choice)
        if piece.finish_reason is not None:
            reason = self._finish_reason(piece.finish_reason, called=self._called.get(index, False))
            last = {"index": index, "delta": {}, "logprobs": None, "finish_reason": reason}
            events += writer.choice(last | stop_reason(piece))
        return events

    def _deltas(self, index: int, piece: Piece) -> list[dict[str, Any]]:
        if self.prepared.reader is None:
            return [{"content": piece.text}] if piece.text else []
        events = self._visible(piece.events)
        self._called[index] = ends_with_call(events, self._called.get(index, False))
        write = older_delta_of if self.older_form else delta_of
        return [delta for event in events if (delta := write(event)) is not None]

    def _visible(self, events: Sequence[Event]) -> list[Event]:
        return [event for event in events if self.shows_reasoning or not isinstance(event, Reasoning)]

    def _finish_reason(self, reason: str | None, *, called: bool) -> str | None:
        if reason != STOP or not called:
            return reason
        return "function_call" if self.older_form else "tool_calls"

    def whole(self, head: Head, choices: Sequence[WholeChoice], usage: Usage, model: TextView) -> bytes:
        answer = head_fields(head, "chat.completion")
        answer["choices"] = [self._whole_choice(i, choice, model) for i, choice in enumerate(choices)]
        answer["usage"] = usage_json(usage)
        return encode(answer)

    def _whole_choice(self, index: int, choice: WholeChoice, model: TextView) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": "".join(choice.text), "refusal": None}
        if (reader := self.prepared.reader) is not None:
            events = self._visible(choice.events)
            message |= message_of(events, older_form=self.older_form, forced=reader.forced)
        reason = self._finish_reason(choice.finish_reason, called=ends_with_call(choice.events))
        found = self._choice(index, choice, model, finish_reason=reason)
        found["message"] = message
        return found | stop_reason(choice)

    def _choice(
        self, index: int, part: Piece | WholeChoice, model: TextView, finish_reason: str | None
    ) -> dict[str, Any]:
        logprobs = None if self.params.logprobs is None else chat_logprobs(part.entries, model)
        choice: dict[str, Any] = {"index": index, "logprobs": logprobs, "finish_reason": finish_reason}
        if self.return_token_ids:
            choice["token_ids"] = part.token_ids
        return choice


def _max_tokens(body: ChatFields, given: Renamed) -> tuple[int | None, str]:
    """Return the smaller of both limits, and the name by which it was given."""
    limits = [(given["max_tokens"], given.names.get("max_tokens", "max_tokens"))]
    limits.append((body.max_completion_tokens, "max_completion_tokens"))
    smaller, *larger = sorted(limit for limit in limits if limit[0] is not None) or [(None, "max_tokens")]
    given.unused += [("max_tokens", name, most) for most, name in larger]
    return smaller


def _logprobs(body: ChatFields) -> int | None:
    """Return the number of likely tokens to list with each token; None without log-probabilities."""
    requested = bool(body.top_logprobs) if body.logprobs is None else body.logprobs
    return (body.top_logprobs or 0) if requested else None


def _options(body: ChatFields, value: Mapping[str, Any], reasoning: ReasoningOptions) -> AnswerOptions:
    """Return the tools in either form, the output's grammar, and the budget of reasoning."""
    functions = read_functions(body.functions)
    if functions and body.tools:
        raise InvalidRequest("tools and functions are both given: leave out functions", param="functions")
    if functions:
        tools = functions
        choice, parallel = read_function_call(body.function_call, tools), False
    else:
        tools, parallel = read_tools(body.tools), body.parallel_tool_calls is not False
        older = read_function_call(body.function_call, tools)
        choice = older if body.tool_choice is None else read_choice(body.tool_choice, tools)
    return AnswerOptions(
        tools=tools,
        choice=choice,
        parallel=parallel,
        tools_param="functions" if body.functions else "tools",
        output=read_output(value, close_at_limit=bool(body.close_at_limit)),
        thinking_budget=reasoning.budget,
        close_at_limit=bool(body.close_at_limit) and bool(tools),
        prediction=read_prediction(body.prediction),
    )
