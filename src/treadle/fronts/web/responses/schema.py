"""Shape of the requests: fields, their types, and their descriptions in the OpenAPI document."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import create_model

from ...validate import MAX_TOP_LOGPROBS
from ..fields import (
    TokenCount,
    Whole,
    neutral_only,
    optional,
    span,
)
from ..request_shapes import Sampling, Strict, extended
from ..template_kwargs import TemplateKwargs
from .field_types import (
    Choice,
    Include,
    Input,
    Metadata,
    ReasoningField,
    TextOptions,
    ToolsField,
    Truncation,
)

NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "conversation": (),
    "prompt": (),
    "context_management": ([],),
    "moderation": (),
}
HARMLESS = ("prompt_cache_retention", "prompt_cache_options", "client_metadata", "personality")


class StreamingOptions(Strict):
    """Options of a stream."""

    include_obfuscation: Any = neutral_only("Only false: this server adds no padding.", False)


class ResponseFields(Sampling):
    """Body of a request for a response."""

    model: str | None = optional("The served model's name, which is the default.")
    input: Input = optional("The conversation: a text of the user, or items, oldest first.")
    instructions: str | None = optional("A system turn before everything else. Not carried over to the next response.")
    previous_response_id: str | None = optional("A stored response: `input` goes on behind its input and output.")
    prompt_cache_key: str | None = optional("Accepted, repeated in the answer and not used.")
    stream: bool | None = optional("Answer with server-sent events while the text is generated.")
    stream_options: StreamingOptions | None = optional("Options of the stream.")
    store: bool | None = optional("False: the response is not kept. Default: true.")
    background: bool | None = optional("True: answer at once; the response is generated without a connection.")
    tools: ToolsField = optional("Functions, custom tools, and namespaces of both. Hosted tools are left out.")
    tool_choice: Choice = optional(
        '"auto" (the default), "none", "required", one tool, or allowed tools. All but "none" are enforced.'
    )
    parallel_tool_calls: bool | None = optional("False: at most one call in an answer.")
    max_tool_calls: TokenCount | None = optional("Limits calls of hosted tools, of which there are none.")
    text: TextOptions = optional("`format`: text, json_object or json_schema. `verbosity` is not used.")
    reasoning: ReasoningField = optional(
        "`effort`, and `summary`: with it the reasoning stands in the item's summary instead of its content."
    )
    include: Include = optional("What to add to the answer: encrypted reasoning, log-probabilities.")
    top_logprobs: Annotated[Whole, span(0, MAX_TOP_LOGPROBS)] | None = optional(
        "How many likely tokens to list with each token of the text."
    )
    max_output_tokens: TokenCount | None = optional("The most tokens to generate, reasoning included.")
    truncation: Truncation = optional(
        '"auto" leaves out the oldest turns of an input that is too long; "disabled" (the default) refuses it.'
    )
    metadata: Metadata = optional("Up to 16 texts by name, repeated in the answer.")
    user: str | None = optional("Accepted, repeated in the answer and not used.")
    safety_identifier: str | None = optional("Accepted, repeated in the answer and not used.")
    chat_template_kwargs: TemplateKwargs | None = optional("Plain values for the model's template, by its names.")


ResponseRequest: type[ResponseFields] = extended("ResponseRequest", ResponseFields, NEUTRAL, HARMLESS)
NOT_COMPACTING = ("stream", "stream_options", "background", "truncation", "metadata")
_COMPACT: dict[str, Any] = {
    name: (field.annotation, field)
    for name, field in ResponseRequest.model_fields.items()
    if name not in NOT_COMPACTING
}
CompactRequest: type[Strict] = create_model(
    "CompactRequest",
    __base__=Strict,
    __doc__="Body of a request for a summary. Tools are not called: with them the prompt begins as the responses' did.",
    **_COMPACT,
)
