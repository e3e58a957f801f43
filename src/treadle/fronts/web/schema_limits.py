"""JSON schemas of the requests, with the limits of the server and the model that it serves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pydantic.json_schema import models_json_schema

from .json_schemas import REF, Schema, ref
from .openai.embedding_fields import EmbeddingChatFields, EmbeddingFields
from .openai.schema import ChatRequest, CompletionRequest, DetokenizeFields, TokenizeChatFields, TokenizeTextFields
from .responses.schema import CompactRequest, ResponseRequest

FIRST_FIELDS = ("messages", "prompt", "input")
LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens", "max_new_tokens", "num_predict", "n_predict")
TOKEN_SHAPES = (TokenizeTextFields, TokenizeChatFields, DetokenizeFields)
BOTH: Schema = {
    "required": ["continue_final_message", "add_generation_prompt"],
    "properties": {"continue_final_message": {"const": True}, "add_generation_prompt": {"const": True}},
}


@dataclass(frozen=True)
class ServerFacts:
    """Facts of the running server for the document. `vocabulary`, `context` and `dimensions`, those of embeddings, are
    None until the model is loaded; `places` is the most sequences that one request may ask for, `max_tokens` the
    operator's cap. `needs_model`: each request must name the model; `spec_prefill`: long prompts may be prefilled in
    part; `images`: requests may have images; `embeds_only`: the model generates no text."""

    names: tuple[str, ...]
    places: int
    max_tokens: int | None
    needs_key: bool
    needs_model: bool = False
    vocabulary: int | None = None
    context: int | None = None
    dimensions: int | None = None
    spec_prefill: bool = False
    images: bool = False
    embeds_only: bool = False


def limit_spec_prefill(requests: Mapping[str, Schema], facts: ServerFacts) -> None:
    """Let requests, of any dialect, only refuse to be prefilled in part where this server can't do that."""
    for fields in (schema.get("properties", {}) for schema in requests.values()):
        if "spec_prefill" in fields and not facts.spec_prefill:
            _kind(fields["spec_prefill"], "boolean")["const"] = False


def request_schemas(facts: ServerFacts) -> dict[str, Schema]:
    """Return the requests' schemas, and those of the objects in them except messages."""
    embeddings = (EmbeddingFields, EmbeddingChatFields)
    bodies = (ChatRequest, CompletionRequest, *embeddings, ResponseRequest, CompactRequest, *TOKEN_SHAPES)
    shapes = [(shape, "validation") for shape in bodies]
    _, defined = models_json_schema(shapes, ref_template=REF + "{model}")  # type: ignore[arg-type]
    requests: dict[str, Schema] = defined["$defs"]
    for schema in requests.values():
        properties = schema["properties"]
        schema["properties"] = {name: _tidy(properties[name]) for name in sorted(properties, key=_sort_key)}
    for name in ("ChatRequest", "CompletionRequest"):
        _limit(requests[name]["properties"], facts)
        if facts.needs_model:
            _require_model(requests[name])
    for name in ("ResponseRequest", "CompactRequest"):
        _limit_response(requests[name]["properties"], facts)
    for schema in requests.values():
        _limit_lengths(schema["properties"], facts)
    for shape in embeddings:
        _limit_embeddings(requests[shape.__name__], facts)
    for name in ("ChatRequest", "EmbeddingChatFields"):
        requests[name]["properties"]["messages"]["items"] = ref("Message")
        requests[name]["not"] = BOTH
    requests["EmbeddingItem"]["properties"]["content"]["anyOf"][1]["items"] = ref("TextPart")
    either = {"anyOf": [ref(shape.__name__) for shape in embeddings]}
    return _with_token_requests(requests, facts) | {"EmbeddingRequest": either}


def _with_token_requests(requests: dict[str, Schema], facts: ServerFacts) -> dict[str, Schema]:
    """Return the schemas with those of `/tokenize` and `/detokenize` under their names. A request for the tokens of a
    chat has the fields of the chat's own request, and more."""
    text, more, back = (requests.pop(shape.__name__) for shape in TOKEN_SHAPES)
    chat = {**requests["ChatRequest"], "description": "Body of a request for the tokens of a chat."}
    chat["properties"] = chat["properties"] | more["properties"]
    for schema in (text, back):
        _kind(schema["properties"]["model"], "string")["enum"] = list(facts.names)
        if facts.needs_model:
            _require_model(schema)
    if facts.vocabulary is not None:
        back["properties"]["tokens"]["items"]["maximum"] = facts.vocabulary - 1
    named = {"TokenizeText": text, "TokenizeChat": chat, "DetokenizeRequest": back}
    return requests | named | {"TokenizeRequest": {"anyOf": [ref("TokenizeText"), ref("TokenizeChat")]}}


def _sort_key(name: str) -> bool:
    return name not in FIRST_FIELDS


def _tidy(field: Schema) -> Schema:
    """Return the field without redundant keywords: its title, and the default null."""
    return {key: value for key, value in field.items() if key != "title" and (key, value) != ("default", None)}


def _limit(fields: Schema, facts: ServerFacts) -> None:
    """Set the limits of this server and its model."""
    _kind(fields["model"], "string")["enum"] = list(facts.names)
    _kind(fields["n"], "integer")["maximum"] = min(_kind(fields["n"], "integer")["maximum"], facts.places)
    if facts.vocabulary is not None:
        _limit_tokens(fields, facts.vocabulary - 1)
    for kind in fields.get("prompt", {}).get("anyOf", ()):
        if kind["type"] == "array" and kind["items"]["type"] != "integer":
            kind["maxItems"] = min(kind["maxItems"], facts.places)


def _limit_embeddings(schema: Schema, facts: ServerFacts) -> None:
    fields = schema["properties"]
    _kind(fields["model"], "string")["enum"] = list(facts.names)
    if facts.needs_model:
        _require_model(schema)
    if facts.dimensions:
        _kind(fields["dimensions"], "integer")["maximum"] = facts.dimensions
    if facts.vocabulary is not None and "input" in fields:
        for one in _token_ids(fields["input"]):
            one["maximum"] = facts.vocabulary - 1


def _limit_response(fields: Schema, facts: ServerFacts) -> None:
    """Set the limits of this server and its model in a request for a response."""
    fields["model"]["enum"] = list(facts.names)
    if facts.vocabulary is not None:
        _limit_bias(fields, facts.vocabulary - 1)


def _require_model(request: Schema) -> None:
    fields = request["properties"]
    fields["model"] = _kind(fields["model"], "string")
    request["required"] = [*request.get("required", ()), "model"]


def _limit_lengths(fields: Schema, facts: ServerFacts) -> None:
    """Set the operator's cap and the context, under all names that requests have for them."""
    highest = dict.fromkeys(LIMITS, facts.max_tokens) | {"num_ctx": facts.context}
    for name, limit in highest.items():
        if limit is not None and name in fields:
            kind = _kind(fields[name], "integer")
            for bounded in kind.get("anyOf", [kind])[:1]:
                bounded["maximum"] = limit


def _limit_bias(fields: Schema, last: int) -> None:
    bias = _kind(fields["logit_bias"], "object")
    bias["propertyNames"] = {"pattern": f"^({at_most(last)})$"}


def _limit_tokens(fields: Schema, last: int) -> None:
    _limit_bias(fields, last)
    for one in (_kind(fields["stop_token_ids"], "array")["items"], *_token_ids(fields.get("prompt", {}))):
        one["maximum"] = last


def _token_ids(field: Schema) -> list[Schema]:
    """Return the schemas of token ids among the forms of a field."""
    found = []
    for kind in field.get("anyOf", ()):
        items = kind.get("items", {})
        found += [one for one in (items, items.get("items", {})) if one.get("type") == "integer"]
    return found


def _kind(field: Schema, kind: str) -> Schema:
    """Return the alternative of this type."""
    found: Schema = next(one for one in field.get("anyOf", [field]) if one.get("type") == kind)
    return found


def at_most(last: int) -> str:
    """Return a regular expression of the whole numbers from 0 to `last`, without leading zeros."""
    digits = str(last)
    shorter = ["[0-9]"] if len(digits) > 1 else []
    shorter += [f"[1-9][0-9]{{{n}}}" for n in range(1, len(digits) - 1)]
    same = [
        f"{digits[:i]}[{int(i == 0 < len(digits) - 1)}-{int(digit) - 1}]" + "[0-9]" * (len(digits) - 1 - i)
        for i, digit in enumerate(digits)
        if int(digit) > int(i == 0 < len(digits) - 1)
    ]
    return "|".join([*shorter, *same, digits])
