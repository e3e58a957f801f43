"""JSON schemas of responses for the OpenAPI document, and its examples."""

from __future__ import annotations

from typing import Any

from ..json_schemas import COUNT, STRING, TEXT_OR_NULL, Schema, listed, or_null, ref, shape

MAX_LISTED = 100


def _query(name: str, schema: Schema, description: str) -> Schema:
    return {"name": name, "in": "query", "required": False, "schema": schema, "description": description}


RETRIEVE_QUERY = [
    _query("stream", {"type": "string", "enum": ["true", "false"]}, "true: the events of a background response."),
    _query("starting_after", {"type": "integer", "minimum": 0, "maximum": 2**53}, "Skip events up to this number."),
]
LIST_QUERY = [
    _query("limit", {"type": "integer", "minimum": 1, "maximum": MAX_LISTED}, "How many; 20 unless given."),
    _query("order", {"type": "string", "enum": ["desc", "asc"]}, "desc, the default: newest first."),
    _query("after", STRING, "The id of an item: those behind it."),
]

STATUS: Schema = {
    "type": "string",
    "enum": ["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"],
}
ITEM: Schema = {
    "type": "object",
    "description": "A message, a call, reasoning or a summary.",
    "properties": {
        "id": STRING,
        "type": {
            "type": "string",
            "enum": ["message", "function_call", "custom_tool_call", "reasoning", "compaction"],
        },
    },
    "required": ["id", "type"],
}
USAGE = shape(
    "Counts of tokens.",
    {
        "input_tokens": COUNT,
        "input_tokens_details": shape(
            "Of the input's. Those that were scored and kept where it was prefilled in part.",
            {"cached_tokens": COUNT, "cache_write_tokens": COUNT},
            scored_tokens=COUNT,
            kept_tokens=COUNT,
        ),
        "output_tokens": COUNT,
        "output_tokens_details": shape("Of the output's.", {"reasoning_tokens": COUNT}),
        "total_tokens": COUNT,
    },
)
RESPONSES: dict[str, Schema] = {
    "Response": shape(
        "A response. Its other members repeat the request.",
        {
            "id": STRING,
            "object": {"type": "string", "const": "response"},
            "created_at": {**COUNT, "description": "Seconds since 1970."},
            "model": STRING,
            "status": STATUS,
            "output": listed(ref("OutputItem")),
            "error": or_null(shape("Why it failed.", {"code": STRING, "message": STRING})),
            "incomplete_details": or_null(shape("Why it is incomplete.", {"reason": STRING})),
            "usage": or_null(ref("ResponseUsage")),
            "completed_at": {"type": ["integer", "null"]},
            "previous_response_id": TEXT_OR_NULL,
            "metadata": {"type": "object", "additionalProperties": STRING},
        },
    ),
    "OutputItem": ITEM,
    "ResponseUsage": USAGE,
    "ResponseEvent": shape(
        "One event of a stream, the last one has the whole response.", {"type": STRING, "sequence_number": COUNT}
    ),
    "Compaction": shape(
        "A summary, as an item that later requests have in place of the conversation.",
        {
            "id": STRING,
            "object": {"type": "string", "const": "response.compaction"},
            "created_at": COUNT,
            "model": STRING,
            "output": listed(ref("OutputItem")),
            "usage": ref("ResponseUsage"),
        },
    ),
    "InputTokens": shape(
        "The number of tokens of a response's input, as its usage would have it.",
        {"object": {"type": "string", "const": "response.input_tokens"}, "input_tokens": COUNT},
    ),
    "DeletedResponse": shape(
        "The response is deleted.",
        {"id": STRING, "object": {"type": "string", "const": "response"}, "deleted": {"type": "boolean"}},
    ),
    "InputItems": shape(
        "A page of the items that the model was given.",
        {
            "object": {"type": "string", "const": "list"},
            "data": listed({"type": "object"}),
            "first_id": TEXT_OR_NULL,
            "last_id": TEXT_OR_NULL,
            "has_more": {"type": "boolean"},
        },
    ),
}

EXAMPLES: dict[str, dict[str, Any]] = {
    "/v1/responses": {
        "answer": {"input": "Write a short poem about weaving."},
        "stream": {"input": "Write a short poem about weaving.", "stream": True},
    },
    "/v1/responses/input_tokens": {"answer": {"input": "Write a short poem about weaving."}},
    "/v1/responses/compact": {
        "answer": {
            "input": [
                {"role": "user", "content": "The launch is on Tuesday. Notify support first."},
                {"role": "assistant", "content": "Understood."},
            ]
        }
    },
}
