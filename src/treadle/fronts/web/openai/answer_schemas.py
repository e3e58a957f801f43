"""JSON schemas of messages and of answers, for the OpenAPI document. `fronts.chat_messages` reads the first, `wire` and
its users write the second."""

from __future__ import annotations

from typing import Any

from ...chat_messages import (
    CONTINUE_KEYS,
    MAX_CALLS,
    MAX_PARTS,
    NEUTRAL_KEYS,
    NEUTRAL_PART_KEYS,
    REFUSAL_PART,
    SYSTEM_ROLES,
    TEXT_PARTS,
)
from ...service_tiers import TIERS
from ..json_schemas import COUNT, NULL, REF, STRING, TEXT_OR_NULL, Schema, either, listed, or_null, ref, shape

LOGPROB: Schema = {"type": "number", "maximum": 0}


# Messages -------------------------------------------------------------------------------------------------------


def _unserved(allowed: tuple[Any, ...], description: str) -> Schema:
    return {"enum": [None, *allowed], "description": description}


LEFT_OPEN = "True in a last message of the assistant: the answer continues it."
UNSERVED = "Not served yet: only a value that says nothing."
PART_KEYS: Schema = {key: _unserved((), UNSERVED) for key in NEUTRAL_PART_KEYS}
TURN_KEYS: Schema = {
    "name": {**TEXT_OR_NULL, "description": "Handed to the model's template."},
    "reasoning_content": {**TEXT_OR_NULL, "description": "Handed to the model's template."},
    "reasoning": {**TEXT_OR_NULL, "description": "Another spelling of `reasoning_content`."},
    **{key: {"type": ["boolean", "null"], "description": LEFT_OPEN} for key in CONTINUE_KEYS},
    **{key: _unserved(allowed, UNSERVED) for key, allowed in NEUTRAL_KEYS.items()},
}


NO_CALLS: Schema = {
    "tool_calls": {"anyOf": [{"type": "array", "maxItems": 0}, NULL]},
    "function_call": NULL,
}
"""Keys of the assistant's messages, in others."""


def _turn(roles: tuple[str, ...], content: Schema, needed: tuple[str, ...], description: str) -> Schema:
    content = {**content, "description": "Text, or parts."}
    properties = {"role": {"type": "string", "enum": list(roles)}, "content": content, **NO_CALLS, **TURN_KEYS}
    about = f"{description} Unknown keys are ignored."
    return {"type": "object", "description": about, "properties": properties, "required": ["role", *needed]}


def _content(part: str, **limits: Any) -> list[Schema]:
    return [STRING, listed(ref(part), maxItems=MAX_PARTS, **limits)]


def _message(role: str, part: str, about: str, **properties: Schema) -> Schema:
    """Return the schema of a message that may be empty, with `properties` besides those of all messages."""
    found = _turn((role,), either(*_content(part), NULL), (), about)
    found["properties"] |= properties
    return found


ROLE_SHAPES = {
    "system": "SystemMessage",
    "developer": "SystemMessage",
    "user": "UserMessage",
    "assistant": "AssistantMessage",
    "tool": "ToolMessage",
    "function": "FunctionMessage",
}
ARGUMENTS: Schema = {"anyOf": [STRING, {"type": "object"}, NULL], "description": "JSON as a string."}
PAST_FUNCTION: Schema = {
    "type": "object",
    "properties": {"name": {**STRING, "minLength": 1}, "arguments": ARGUMENTS},
    "required": ["name"],
}
PAST_CALL: Schema = {
    "type": "object",
    "properties": {"id": TEXT_OR_NULL, "type": {"const": "function"}, "function": PAST_FUNCTION},
    "required": ["function"],
}

MESSAGES: dict[str, Schema] = {
    "Message": {
        "oneOf": [ref(name) for name in dict.fromkeys(ROLE_SHAPES.values())],
        "discriminator": {"propertyName": "role", "mapping": {role: REF + name for role, name in ROLE_SHAPES.items()}},
    },
    "SystemMessage": _turn(
        SYSTEM_ROLES,
        either(*_content("TextPart", minItems=1)),
        ("content",),
        "Instructions; `developer` is read as `system`.",
    ),
    "UserMessage": _turn(("user",), either(*_content("TextPart", minItems=1)), ("content",), "A user's turn."),
    "AssistantMessage": _message(
        "assistant",
        "AssistantPart",
        "An earlier answer, as it was received; without content it is an empty turn.",
        tool_calls=or_null(listed(PAST_CALL, maxItems=MAX_CALLS)),
        function_call=or_null(PAST_FUNCTION),
    ),
    "ToolMessage": _message(
        "tool",
        "TextPart",
        "The result of a call.",
        tool_call_id={**TEXT_OR_NULL, "description": "The id of its call."},
    ),
    "FunctionMessage": _message(
        "function", "TextPart", "The result of a call, in OpenAI's older form; `name` is the function's."
    ),
    "TextPart": shape(
        "A piece of text. Unknown keys are ignored.",
        {"type": {"type": "string", "enum": list(TEXT_PARTS)}, "text": STRING},
        **PART_KEYS,
    ),
    "RefusalPart": shape(
        "The text of a refusal.", {"type": {"type": "string", "const": REFUSAL_PART}, REFUSAL_PART: STRING}, **PART_KEYS
    ),
    "AssistantPart": either(ref("TextPart"), ref("RefusalPart")),
}

# Answers --------------------------------------------------------------------------------------------------------

FINISH: Schema = {
    "type": "string",
    "enum": ["stop", "length", "tool_calls", "function_call", "abort"],
    "description": "The model or a stop ended it; a limit did; it ended with calls, in the form that was asked for; it "
    "was cancelled by its id.",
}
NOT_YET: Schema = or_null(FINISH)
STOP_REASON: Schema = {"const": "timeout", "description": "Where the request's `timeout` ended the choice."}
TIER: Schema = {"enum": list(TIERS[1:]), "description": "The tier that was used, where the request names one."}
TOKEN_IDS = listed(COUNT, description="With `return_token_ids`.")
HEAD: Schema = {
    "id": STRING,
    "created": {**COUNT, "description": "Seconds since 1970."},
    "model": STRING,
    "system_fingerprint": {**STRING, "description": "Changes when the same seed may give another answer."},
}
TOKEN: Schema = {
    "token": STRING,
    "logprob": LOGPROB,
    "bytes": listed({"type": "integer", "minimum": 0, "maximum": 255}),
}
CHAT_LOGPROBS = or_null(ref("ChatLogprobs"))
TEXT_LOGPROBS = or_null(ref("TextLogprobs"))
NUMBERS_OR_NULLS = listed(or_null(LOGPROB))


def _answer(kind: str, choice: str, description: str, **more: Any) -> Schema:
    return shape(
        description,
        {"object": {"type": "string", "const": kind}, **HEAD, "choices": listed(ref(choice)), **more},
        service_tier=TIER,
    )


ANSWERS: dict[str, Schema] = {
    "ChatCompletion": _answer("chat.completion", "ChatChoice", "A whole answer.", usage=ref("Usage")),
    "ChatChoice": shape(
        "One answer.",
        {"index": COUNT, "message": ref("AnswerMessage"), "logprobs": CHAT_LOGPROBS, "finish_reason": FINISH},
        token_ids=TOKEN_IDS,
        stop_reason=STOP_REASON,
    ),
    "AnswerMessage": shape(
        "The assistant's turn; send it back as it is.",
        {"role": {"type": "string", "const": "assistant"}, "content": TEXT_OR_NULL, "refusal": NULL},
        reasoning_content={**STRING, "description": "Where the model reasoned."},
        tool_calls={**listed(ref("ToolCall")), "description": "Where the model called tools."},
        function_call=ref("CalledFunction"),
    ),
    "ToolCall": shape(
        "A call of a tool.",
        {"id": STRING, "type": {"type": "string", "const": "function"}, "function": ref("CalledFunction")},
    ),
    "CalledFunction": shape(
        "The function that is called.", {"name": STRING, "arguments": {**STRING, "description": "JSON."}}
    ),
    "ToolCallDelta": shape(
        "A piece of a call: first its id, type and name, then pieces of its arguments.",
        {"index": COUNT, "function": shape("Of the function.", {"arguments": STRING}, name=STRING)},
        id=STRING,
        type={"type": "string", "const": "function"},
    ),
    "ChatLogprobs": shape("One entry for each shown token.", {"content": listed(ref("ChatToken")), "refusal": NULL}),
    "ChatToken": shape(
        "A token and the likeliest in its place.", {**TOKEN, "top_logprobs": listed(shape("One.", TOKEN))}
    ),
    "ChatCompletionChunk": {
        **_answer("chat.completion.chunk", "ChunkChoice", "One event of a stream, but for the last, `[DONE]`."),
    },
    "ChunkChoice": shape(
        "A piece of one choice.",
        {
            "index": COUNT,
            "delta": shape(
                "New text, reasoning, or a piece of a call.",
                {},
                role={"type": "string", "const": "assistant"},
                content=TEXT_OR_NULL,
                reasoning_content=STRING,
                tool_calls=listed(ref("ToolCallDelta")),
                function_call=shape("A piece of the call.", {"arguments": STRING}, name=STRING),
            ),
            "logprobs": CHAT_LOGPROBS,
            "finish_reason": NOT_YET,
        },
        token_ids=TOKEN_IDS,
        stop_reason=STOP_REASON,
    ),
    "Completion": _answer("text_completion", "CompletionChoice", "A whole answer.", usage=ref("Usage")),
    "CompletionChunk": _answer(
        "text_completion", "CompletionChoice", "One event of a stream, but for the last, `[DONE]`."
    ),
    "CompletionChoice": shape(
        "One answer, or a piece of it.",
        {"index": COUNT, "text": STRING, "logprobs": TEXT_LOGPROBS, "finish_reason": NOT_YET},
        token_ids=TOKEN_IDS,
        stop_reason=STOP_REASON,
    ),
    "TextLogprobs": shape(
        "Parallel lists, one entry for each token.",
        {
            "tokens": listed(STRING),
            "token_logprobs": NUMBERS_OR_NULLS,
            "top_logprobs": either(listed(either({"type": "object", "additionalProperties": LOGPROB}, NULL)), NULL),
            "text_offset": listed(COUNT),
        },
    ),
    "Embeddings": shape(
        "Embeddings of all inputs.",
        {
            "object": {"type": "string", "const": "list"},
            "data": listed(ref("Embedding")),
            "model": STRING,
            "usage": shape("Counts of tokens.", {"prompt_tokens": COUNT, "total_tokens": COUNT}),
        },
    ),
    "Embedding": shape(
        "One vector of length 1.",
        {
            "object": {"type": "string", "const": "embedding"},
            "index": COUNT,
            "embedding": either(listed({"type": "number"}), {**STRING, "description": "With `base64`."}),
        },
    ),
    "RunningUsage": shape(
        "Counts of tokens so far, over all choices.",
        {"prompt_tokens": COUNT, "completion_tokens": COUNT, "total_tokens": COUNT},
    ),
    "Usage": shape(
        "Counts of tokens over all choices; each prompt counts once.",
        {
            "prompt_tokens": COUNT,
            "completion_tokens": COUNT,
            "total_tokens": COUNT,
            "prompt_tokens_details": shape(
                "Of the prompt's. Those that were scored and kept where it was prefilled in part.",
                {"cached_tokens": COUNT},
                scored_tokens=COUNT,
                kept_tokens=COUNT,
            ),
            "completion_tokens_details": shape(
                "Of the completions'; 0 for text completions, which are not read for reasoning.",
                {"reasoning_tokens": COUNT},
                accepted_prediction_tokens=COUNT,
                rejected_prediction_tokens=COUNT,
            ),
        },
    ),
}
for _chunk in ("ChatCompletionChunk", "CompletionChunk"):
    ANSWERS[_chunk]["properties"]["usage"] = {
        **or_null(ref("Usage"), ref("RunningUsage")),
        "description": "With `include_usage`: null, or with `continuous_usage_stats` the counts so far; in the last "
        "chunk all counts.",
    }
