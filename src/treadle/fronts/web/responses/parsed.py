"""POST /v1/responses: its fields, prompt and answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import msgspec

from ....errors import InvalidRequest
from ....text import TextView
from ...answer_options import AnswerOptions
from ...generation.pieces import Usage, WholeChoice
from ...output_fields import read_format
from ...prepared import PreparedPrompts
from ...reasoning_fields import ReasoningOptions, read_reasoning
from ...service_tiers import check_tier
from ...text_jobs import Enter, prepared_chat
from ...validate import MAX_TOKENS, Limits, RawParams, ValidatedRequest, check, rename_params
from ...value_checks import check_whole
from ..chat_prompt import ChatPrompt
from ..neutral_fields import refuse_beyond_neutral
from ..parsed import MAX_NAME_CHARS, Head, ParsedRequest
from ..parsing import read
from ..request_shapes import ALIASED, UNALIASED
from ..template_kwargs import checked_kwargs
from .field_types import ENCRYPTED, LOGPROBS
from .items import MORE_TOOLS, REFERENCE, TRIGGER, Item, read_input
from .options import read_include, read_summary, read_truncation, text_options
from .output import OutputForm
from .prompt import ItemsPrompt
from .repeated_fields import repeated_fields
from .response_object import ResponseObject
from .schema import NEUTRAL, ResponseFields, ResponseRequest
from .tool_names import CallName
from .tools import Tools, about_definition
from .turns import turns_of
from .writer import Ended, ResponseWriter, drop_response

if TYPE_CHECKING:
    from ....text import TextModel

OUTLINE = "outline"
encode = msgspec.json.encode
_pack = msgspec.msgpack.Encoder().encode


class Facts(msgspec.Struct, omit_defaults=True):
    """Everything of a request but its content: what the event loop needs. `repeated` are the members of the answer that
    repeat the request, as JSON without braces. `items` and `ids` are its input, where it is stored; `references` are
    ids of stored items in it. `compacts`: the answer is a summary."""

    model: str | None
    params: RawParams
    service_tier: str | None = None
    stream: bool = False
    store: bool = False
    background: bool = False
    previous: str | None = None
    cuts: bool = False
    summarized: bool = False
    hidden: bool = False
    encrypted: bool = False
    compacts: bool = False
    repeated: bytes = b""
    names: dict[str, CallName] = {}
    items: list[bytes] = []
    ids: list[str] = []
    references: list[str] = []


class Carried(msgspec.Struct):
    """Stored items that a prompt needs: those before its input, and those that its references name, as JSON."""

    history: list[msgspec.Raw]
    references: dict[str, msgspec.Raw]


class ParsedResponse(ParsedRequest):
    """One request for a response, parsed.

    `carry` returns the stored items that the prompt needs; `carried_bytes` is their size. `ended` gets the response,
    `log` each event of its stream.
    """

    kind = "responses"
    id_prefix = "resp_"
    prompt_param = "input"
    stops_of_model = True
    spellings: Mapping[str, str] = MappingProxyType({"max_tokens": "max_output_tokens", "logprobs": "top_logprobs"})

    items: list[Item]
    carry: Callable[[], bytes] = staticmethod(lambda: b"")
    carried_bytes: int = 0
    ended: Ended = staticmethod(drop_response)
    log: Callable[[bytes], None] | None = None
    _writer: ResponseWriter | None = None

    def __init__(self, value: dict[str, Any]) -> None:
        outlined = value.get(OUTLINE)
        if isinstance(outlined, bytes):  # JSON has no bytes: this is our own
            self.facts = msgspec.msgpack.decode(outlined, type=Facts)
            self.options = AnswerOptions()
        else:
            self._parse(value)
        self.params, self.model, self.stream = self.facts.params, self.facts.model, self.facts.stream
        self.service_tier, self.cuts = self.facts.service_tier, self.facts.cuts

    def _parse(self, value: dict[str, Any]) -> None:
        """Set `facts`, `items`, `options` and `variables` of a body's JSON."""
        refuse_beyond_neutral(value, NEUTRAL)
        body: ResponseFields = read(ResponseRequest, value)
        self.items = _input(body)
        tools = _tools(body, self.items)
        reasoning = read_reasoning({"reasoning": body.reasoning})
        self.instructions = body.instructions
        self.variables = reasoning.template_variables() | checked_kwargs(body.chat_template_kwargs or {})
        self.options = _options(body, tools, reasoning)
        self.facts = _facts(body, self.items, tools, reasoning)
        self.image_places = self._chat(self.items).image_places

    @property
    def carried(self) -> bytes:
        return self.carry()

    @carried.setter
    def carried(self, value: bytes) -> None:
        self.carry = lambda: value

    def size(self, model: TextView) -> int:
        size = super().size(model)
        if self.carried_bytes:
            size += self.tokens_of(self.carried_bytes, model)
        return min(size, model.context) if self.facts.cuts else size

    def _size(self, model: TextView) -> int:
        return self.tokens_of(self._chat(self.items).size_bytes(), model)

    def tokenize(self, model: TextModel, enter: Enter, most: int) -> PreparedPrompts:
        given = self.carried
        carried = msgspec.json.decode(given, type=Carried) if given else Carried([], {})
        history = [_stored(item) for item in carried.history]
        known = {name: _stored(item) for name, item in carried.references.items()}
        own = [known.get(item["id"], item) if item["type"] == REFERENCE else item for item in self.items]
        chat = self._chat([*history, *own], len(history))
        if not chat.turns:
            raise InvalidRequest("input is empty: give a text, or at least one item", param="input")
        prompt = ItemsPrompt(chat, self.facts.cuts, self.params.max_tokens)
        with about_definition():
            found = prompt.tokenize(model, enter, most)
        if not self.facts.compacts:
            return found
        options = AnswerOptions(thinking_budget=self.options.thinking_budget)
        return PreparedPrompts(found.ids, prepared_chat(model, options, found.ids[0], enter), found.places)

    def _chat(self, items: Sequence[Item], carried: int = 0) -> ChatPrompt:
        turns = turns_of(items, carried)
        if self.instructions:
            turns.insert(0, {"role": "system", "content": self.instructions})
        if self.facts.compacts:
            turns.append({"role": "user", "content": COMPACT_PROMPT})
        return ChatPrompt(turns, self.options, self.variables, layouts=self.layouts)

    def outline(self, value: dict[str, Any]) -> dict[str, Any]:
        return {OUTLINE: _pack(self.facts)}

    def check_against(self, limits: Limits) -> ValidatedRequest:
        with rename_params(self.spellings):
            return check(self.params, limits, as_many_as_fit=True)

    # Answers -----------------------------------------------------------------------------------------------------

    def stream_writer(self, head: Head, text: TextView) -> ResponseWriter:
        """Return the writer of this response. There is one, for the answer and for snapshots of it in the store."""
        if self._writer is None:
            self._writer = self._new_writer(head, text)
        return self._writer

    def _new_writer(self, head: Head, text: TextView) -> ResponseWriter:
        facts = self.facts
        response = ResponseObject(head, facts.repeated, self.params, text)
        form = OutputForm(
            facts.names,
            text,
            summarized=facts.summarized,
            hidden=facts.hidden or facts.compacts,
            encrypted=facts.encrypted,
            logprobs=self.params.logprobs is not None,
            compacts=facts.compacts,
        )
        return ResponseWriter(self, response, form, ended=self.ended, log=self.log)

    def whole(self, head: Head, choices: Sequence[WholeChoice], usage: Usage, text: TextView) -> bytes:
        return self.stream_writer(head, text).whole(choices[0], usage)


COMPACT_PROMPT = (
    "Summarize this conversation for yourself: you will go on with the work and will see only your summary. Keep what "
    "is needed for that: the goals and wishes of the user, decisions and their reasons, facts, names, paths and "
    "numbers, what was done, what failed, and what is next. Answer with the summary alone; call no tools."
)


def _stored(item: msgspec.Raw) -> Item:
    found: Item = msgspec.json.decode(item)
    return found


def _input(body: ResponseFields) -> list[Item]:
    """Return the items of a request, of which there is one at least, unless it continues another response."""
    items = read_input(body.input)
    if not items and body.previous_response_id is None:
        missing = "missing" if body.input is None else "empty"
        raise InvalidRequest(f"input is {missing}: give a text, or at least one item", param="input")
    for i, item in enumerate(items[:-1]):
        if item["type"] == TRIGGER:
            raise InvalidRequest(f"input[{i}] is a {TRIGGER}: it must be the last item", param=f"input[{i}]")
    return items


def _tools(body: ResponseFields, items: Sequence[Item]) -> Tools:
    tools = Tools()
    tools.read(body.tools)
    for i, item in enumerate(items):
        if item["type"] == MORE_TOOLS:
            tools.read_more(item["tools"], f"input[{i}].tools")
    return tools


def _options(body: ResponseFields, tools: Tools, reasoning: ReasoningOptions) -> AnswerOptions:
    close = bool(body.close_at_limit)
    text = text_options(body.text)
    return AnswerOptions(
        tools=tuple(tools.specs),
        choice=tools.choice(body.tool_choice),
        parallel=body.parallel_tool_calls is not False,
        tool_schemas=tuple(tools.places),
        output=read_format(text.get("format"), "text.format", close_at_limit=close),
        thinking_budget=reasoning.budget,
        close_at_limit=close and bool(tools.specs),
    )


def _facts(body: ResponseFields, items: Sequence[Item], tools: Tools, reasoning: ReasoningOptions) -> Facts:
    if body.stream_options is not None:
        refuse_beyond_neutral(body.stream_options.model_dump(), {"include_obfuscation": (False,)}, "stream_options.")
    include = read_include(body.include)
    summary = read_summary(body.reasoning)
    store = body.store is not False
    check_whole("max_tool_calls", body.max_tool_calls, 1, MAX_TOKENS)
    if body.background and not store:
        raise InvalidRequest("background needs store: leave out store, or send true", param="background")
    return Facts(
        model=None if body.model is None else body.model[:MAX_NAME_CHARS],
        params=_params(body, include),
        service_tier=check_tier(body.service_tier),
        stream=bool(body.stream),
        store=store,
        background=bool(body.background),
        previous=body.previous_response_id,
        cuts=read_truncation(body.truncation) == "auto",
        summarized=summary is not None,
        hidden=not reasoning.shown,
        encrypted=ENCRYPTED in include,
        compacts=bool(items) and items[-1]["type"] == TRIGGER,
        repeated=repeated_fields(body, tools, reasoning, summary),
        names={in_prompt: name for in_prompt, name in tools.names.items() if name != CallName(in_prompt)},
        items=[encode(item) for item in items] if store else [],
        ids=[item["id"] for item in items] if store else [],
        references=[item["id"] for item in items if item["type"] == REFERENCE],
    )


def _params(body: ResponseFields, include: Sequence[str]) -> RawParams:
    listed = body.top_logprobs or 0
    return RawParams(
        **{name: getattr(body, name) for name in (*ALIASED, *UNALIASED)},
        max_tokens=body.max_output_tokens,
        stop=[body.stop] if isinstance(body.stop, str) else body.stop,
        logprobs=listed if listed or LOGPROBS in include else None,
    )
