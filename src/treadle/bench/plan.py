"""Workloads as plain values: requests and the moments they are sent at, independent of any server."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from .pictures import Picture

Event = Literal["sent", "token", "end"]


class FunctionCall(msgspec.Struct, frozen=True):
    """Name and arguments (JSON, as text) of a tool call."""

    name: str
    arguments: str


class ToolCall(msgspec.Struct, frozen=True):
    """One tool call of an assistant's turn, as OpenAI's API writes it."""

    id: str
    function: FunctionCall
    type: str = "function"


class PromptMessage(msgspec.Struct, frozen=True):
    """One turn of a conversation. `role` is "system", "user", "assistant" or "tool". `tool_calls` belong to an
    assistant's turn, `tool_call_id` to a tool's result. `pictures` stand before the text of a user's turn."""

    role: str
    content: str
    tool_calls: tuple[ToolCall, ...] | UnsetType = UNSET
    tool_call_id: str | UnsetType = UNSET
    pictures: tuple[Picture, ...] | UnsetType = UNSET


class Moment(msgspec.Struct, frozen=True):
    """A time `delay_s` seconds after an event of request `of`: it was sent, its `count`th piece came, or it ended, for
    any reason. If its end comes before the event, the end counts as the event."""

    of: str
    event: Event = "end"
    count: int = 1
    delay_s: float = 0.0


class Request(msgspec.Struct, frozen=True):
    """One request. It is due at `at_s` seconds after the start of the run or, with `after`, at that moment; it is sent
    when it is due and the workload's concurrency allows. At `leave` the client drops the connection, if the request has
    not ended by then. `role` groups requests that are measured together; `session` names the conversation it belongs
    to. `fields` are more fields of the body, such as `response_format` or `tools`: the answer is checked against the
    schemas in them, and its end is the server's choice."""

    id: str
    messages: tuple[PromptMessage, ...]
    max_tokens: int
    at_s: float = 0.0
    after: Moment | None = None
    leave: Moment | None = None
    role: str = "all"
    session: str = ""
    stream: bool = True
    fields: dict[str, Any] | UnsetType = UNSET


class Workload(msgspec.Struct, frozen=True):
    """A named load. The same name, seed and options give the same requests, to the letter.

    `concurrency` is the most requests that the client has open (0: no limit). `goodput` are the limits, in seconds,
    under which an answer counts as good: time to first token, and mean time per token after it.
    """

    name: str
    seed: int
    options: dict[str, float]
    requests: tuple[Request, ...]
    concurrency: int = 0
    goodput: tuple[float, float] = (2.0, 0.2)
