"""The requests' shapes: which fields there are and of which type. Ranges are the validator's business.

Strict: a number is no string, true is no number, and an unknown field is refused with the nearest known name.
"""

from __future__ import annotations

import difflib
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model
from pydantic_core import ErrorDetails

from ....errors import InvalidRequest
from .neutral import CHAT_NEUTRAL, COMPLETION_NEUTRAL, HARMLESS

MAX_MESSAGES = 8192
MAX_PARTS = 8192
MAX_PROMPTS = 2048
MAX_PROMPT_IDS = 2**20

StopStrings = Annotated[list[str], Field(fail_fast=True)]
TokenIds = Annotated[list[int], Field(fail_fast=True)]


class Strict(BaseModel):
    """Base of all request bodies."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, protected_namespaces=())


class StreamOptions(Strict):
    include_usage: bool | None = Field(None, description="End the stream with a chunk that holds the usage.")
    include_obfuscation: bool | None = Field(None, description="Only false: this server adds no padding.")
    continuous_usage_stats: bool | None = Field(None, description="Only false.")


class TextPart(Strict):
    type: str = Field(description="Only 'text'.")
    text: str | None = None
    image_url: Any = None
    input_audio: Any = None
    file: Any = None
    refusal: str | None = None


class Message(Strict):
    """One turn. `developer` is read as `system`."""

    role: str = Field(description="system, developer, user or assistant.")
    content: str | Annotated[list[TextPart], Field(fail_fast=True, max_length=MAX_PARTS)] | None = None
    name: str | None = None
    reasoning_content: str | None = Field(None, description="Handed to the model's template as it is.")
    reasoning: str | None = Field(None, description="Another spelling of reasoning_content.")
    refusal: str | None = None
    tool_calls: list[Any] | None = Field(None, description="Only null or empty.")
    tool_call_id: str | None = Field(None, description="Only null.")
    function_call: Any = Field(None, description="Only null.")
    audio: Any = Field(None, description="Only null.")
    annotations: list[Any] | None = Field(None, description="Ignored: what an earlier answer carried.")


class Generate(Strict):
    """What chat and completions share."""

    model: str | None = Field(None, description="The served model's name; left out, it is the served model.")
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = Field(None, description="How many choices, 1 to 128.")
    max_tokens: int | None = Field(
        None, description="At least 1, with echo 0; left out, what the cap and the context leave."
    )
    temperature: float | None = Field(None, description="0 (greedy) to 2.")
    top_p: float | None = Field(None, description="Above 0, at most 1.")
    top_k: int | None = Field(None, description="0 or -1 for off.")
    min_p: float | None = Field(None, description="0 to 1.")
    repetition_penalty: float | None = Field(None, description="Above 0; 1 is off.")
    presence_penalty: float | None = Field(None, description="-2 to 2.")
    frequency_penalty: float | None = Field(None, description="-2 to 2.")
    logit_bias: dict[str, float] | None = Field(None, description="Token id to bias, -100 to 100.")
    seed: int | None = Field(None, description="64 bits, signed. The same seed gives the same choice.")
    stop: str | StopStrings | None = Field(None, description="Up to 16 strings, none empty.")
    stop_token_ids: TokenIds | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    priority: int | None = Field(None, description="Lower goes first; 0 is normal.")
    skip_special_tokens: bool | None = Field(None, description="False shows special tokens in the text.")
    return_token_ids: bool | None = Field(None, description="Adds `token_ids` to every choice.")
    cache_salt: str | None = Field(
        None, description="Only requests of the same key and salt reuse each other's cached prompts."
    )


class ChatFields(Generate):
    messages: Annotated[list[Message], Field(fail_fast=True, max_length=MAX_MESSAGES)]
    max_completion_tokens: int | None = Field(None, description="The same as max_tokens.")
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, description="0 to 20, with logprobs.")
    add_generation_prompt: bool | None = Field(None, description="False leaves the assistant's turn unopened.")
    continue_final_message: bool | None = Field(None, description="Only false.")
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="Plain values for the model's template.")


class CompletionFields(Generate):
    prompt: (
        str
        | Annotated[list[str], Field(fail_fast=True)]
        | TokenIds
        | Annotated[list[TokenIds], Field(fail_fast=True)]
        | None
    ) = Field(None, description="A string, strings, token ids, or lists of token ids.")
    logprobs: int | None = Field(None, description="0 to 20.")
    best_of: int | None = Field(None, description="Only as many as n.")
    echo: bool | None = Field(None, description="Repeat the prompt before the answer, with its logprobs.")
    add_special_tokens: bool | None = Field(None, description="False tokenizes the prompt without BOS and the like.")


def _with_known(name: str, base: type[BaseModel], neutral: dict[str, str]) -> type[Any]:
    fields: dict[str, Any] = {key: (Any, Field(None, description=text)) for key, text in neutral.items()}
    return create_model(name, __base__=base, **fields)


def _described(neutral: dict[str, tuple[Any, ...]]) -> dict[str, str]:
    known = {key: f"Only {', '.join(map(repr, fine)) or 'null'}." for key, fine in neutral.items()}
    return known | dict.fromkeys(HARMLESS, "Accepted and not used.")


ChatRequest: type[ChatFields] = _with_known("ChatRequest", ChatFields, _described(dict(CHAT_NEUTRAL)))
CompletionRequest: type[CompletionFields] = _with_known(
    "CompletionRequest", CompletionFields, _described(dict(COMPLETION_NEUTRAL))
)

Body = TypeVar("Body", bound=Strict)


def read(shape: type[Body], value: dict[str, Any]) -> Body:
    """The body as `shape`. Raises InvalidRequest that names the first field at fault."""
    try:
        return shape.model_validate(value)
    except ValidationError as error:
        raise _refusal(shape, error.errors(include_url=False)) from None


def _refusal(shape: type[Strict], details: list[ErrorDetails]) -> InvalidRequest:
    """The deepest complaint is about the alternative that was meant; `loc` also holds the names of alternatives."""
    first = [d for d in details if d["loc"][:1] == details[0]["loc"][:1]]
    worst = max(first, key=lambda d: len(_path(d)))
    path = _path(worst)
    if worst["type"] == "extra_forbidden":
        return InvalidRequest(f"unknown field '{path}'{_nearest(shape, str(worst['loc'][-1]), path)}", param=path)
    if worst["type"] == "missing":
        return InvalidRequest(f"{path} is missing: it must be given", param=path)
    wanted = " or ".join(dict.fromkeys(_wish(d) for d in first if _path(d) == path))
    return InvalidRequest(f"{path} is {_shown(worst['input'])}: it must be {wanted}", param=path)


NAMES = frozenset(
    name for shape in (ChatRequest, CompletionRequest, Message, TextPart, StreamOptions) for name in shape.model_fields
)


def _path(detail: ErrorDetails) -> str:
    path = ""
    last = len(detail["loc"]) - 1
    for i, part in enumerate(detail["loc"]):
        if isinstance(part, int):
            path += f"[{part}]"
        elif part in NAMES or (i == last and detail["type"] == "extra_forbidden") or i == 0 or "logit_bias" in path:
            path += f".{part[:80]}" if path else part[:80]
    return path


def _nearest(shape: type[Strict], name: str, path: str) -> str:
    known = list(shape.model_fields) if "." not in path and "[" not in path else sorted(NAMES)
    near = difflib.get_close_matches(name[:80], known, n=1)
    return f"; did you mean '{near[0]}'?" if near else ": leave it out"


WISHES = {
    "string_type": "a string",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "list_type": "an array",
    "dict_type": "an object",
    "model_type": "an object",
}


def _wish(detail: ErrorDetails) -> str:
    if detail["type"] == "too_long":
        return f"at most {detail['ctx']['max_length']} long"
    return WISHES.get(detail["type"], detail["msg"].lower())


def _shown(value: Any) -> str:
    if isinstance(value, str):
        return f"the string '{value[:40]}'" + ("" if len(value) <= 40 else " (cut)")
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return f"{value}" if value.bit_length() <= 128 else "a number of more than 128 bits"
    names = {float: "a fraction", list: "an array", dict: "an object", type(None): "null"}
    return names.get(type(value), type(value).__name__)
