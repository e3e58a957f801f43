"""HTML tables of the fields of a request body: needed ones first, further ones grouped by purpose."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from html import escape
from typing import Any

from ..openai.ignored_fields import CHAT_NEUTRAL, COMPLETION_NEUTRAL, HARMLESS
from ..responses.schema import HARMLESS as RESPONSE_HARMLESS
from ..responses.schema import NEUTRAL as RESPONSE_NEUTRAL
from .shapes import Schema, default_of, is_empty, limits_of, refs_in, type_of
from .shell import snippet
from .snippets import pretty

MAIN_FIELDS = ("messages", "prompt", "input")
"""Main fields of a request, whether or not its schema requires them."""
GROUPS: dict[str, tuple[str, ...]] = {
    "Model and limits": (
        "model",
        "max_completion_tokens",
        "max_tokens",
        "stop",
        "n",
        "best_of",
        "service_tier",
        "prediction",
    ),
    "Sampling": (
        "temperature",
        "top_p",
        "seed",
        "presence_penalty",
        "frequency_penalty",
        "logit_bias",
    ),
    "Streaming": ("stream", "stream_options", "usage"),
    "Tools": ("tools", "tool_choice", "parallel_tool_calls", "functions", "function_call"),
    "Structured output": ("response_format", "structured_outputs", "close_at_limit"),
    "Reasoning": ("reasoning_effort", "include_reasoning", "enable_thinking", "thinking_token_budget"),
    "Log-probabilities": ("logprobs", "top_logprobs", "echo"),
    "Beyond OpenAI": (
        "top_k",
        "min_p",
        "repetition_penalty",
        "min_tokens",
        "stop_token_ids",
        "ignore_eos",
        "skip_special_tokens",
        "add_special_tokens",
        "return_token_ids",
        "add_generation_prompt",
        "continue_final_message",
        "chat_template_kwargs",
        "cache_salt",
        "priority",
        "timeout",
        "speculate",
        "spec_prefill",
    ),
    "Names that other servers use": (
        "max_new_tokens",
        "num_predict",
        "n_predict",
        "repeat_penalty",
        "repeat_last_n",
        "num_ctx",
        "options",
        "guided_json",
        "guided_regex",
        "guided_choice",
        "guided_grammar",
        "json_schema",
        "format",
        "reasoning",
        "thinking",
        "think",
        "thinking_budget",
        "thinking_budget_tokens",
        "reasoning_budget",
    ),
}
OWN_GROUPS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "/v1/messages": {
        "Model and limits": ("stop_sequences",),
        "Sampling": ("top_k",),
        "Structured output": ("output_config", "output_format"),
        "Reasoning": ("thinking",),
    },
    "/v1/responses": {
        "Model and limits": ("max_output_tokens", "truncation"),
        "Tools": ("max_tool_calls",),
        "Structured output": ("text",),
        "Reasoning": ("reasoning",),
        "Beyond OpenAI": ("seed", "stop", "presence_penalty", "frequency_penalty", "logit_bias"),
    },
}
"""Fields of a dialect whose group is another one than in chats, or that chats do not have, by path and title."""
SAME_GROUPS = {
    "/v1/messages/count_tokens": "/v1/messages",
    "/v1/responses/compact": "/v1/responses",
    "/v1/responses/input_tokens": "/v1/responses",
}
OTHERS = "Other fields"
IDLE = "Accepted without effect"
IDLE_FIELDS: Mapping[str, Collection[str]] = {
    "/v1/chat/completions": {*HARMLESS, *CHAT_NEUTRAL},
    "/v1/completions": {*HARMLESS, *COMPLETION_NEUTRAL},
    "/v1/embeddings": {"user"},
    "/v1/messages": {"mcp_servers", "container", "thread", "compaction"},
    "/v1/messages/count_tokens": {"mcp_servers", "container", "thread", "compaction"},
    "/v1/responses": {*RESPONSE_HARMLESS, *RESPONSE_NEUTRAL},
    "/v1/responses/compact": {*RESPONSE_HARMLESS, *RESPONSE_NEUTRAL},
    "/v1/responses/input_tokens": {*RESPONSE_HARMLESS, *RESPONSE_NEUTRAL},
}
"""Fields without effect: they are ignored, or accepted only at their neutral value."""
HEADS = '<thead><tr><th scope="col">field</th><th scope="col">type</th><th scope="col">meaning</th></tr></thead>'


class Fields:
    """Tables of one request body. `schemas` are the document's named shapes, `examples` values of single fields."""

    def __init__(self, path: str, body: Schema, schemas: Mapping[str, Schema], examples: Mapping[str, Any]) -> None:
        self._path = path
        self._needed = tuple(body.get("required", ()))
        self._fields: Mapping[str, Schema] = body.get("properties", {})
        self._schemas = schemas
        self._examples = examples
        self._shapes_done: set[str] = set()

    def html(self) -> str:
        """Return all tables."""
        return "".join([*map(self._main_field, self.main_fields()), *map(self._group, self.groups())])

    def main_fields(self) -> list[str]:
        """Return the fields that get a part of their own, in front."""
        names = dict.fromkeys((*MAIN_FIELDS, *self._needed))
        return [name for name in names if name in self._fields and name not in IDLE_FIELDS.get(self._path, ())]

    def groups(self) -> dict[str, list[str]]:
        """Return all other fields by the title of their group, each in exactly one; groups without fields are left
        out."""
        remaining = dict.fromkeys(name for name in self._fields if name not in self.main_fields())
        idle = [name for name in remaining if name in IDLE_FIELDS.get(self._path, ())]
        own = OWN_GROUPS.get(SAME_GROUPS.get(self._path, self._path), {})
        title_of = {name: title for groups in (GROUPS, own) for title, names in groups.items() for name in names}
        ordered = [name for groups in (GROUPS, own) for names in groups.values() for name in names]
        grouped = [name for name in dict.fromkeys(ordered) if name in remaining and name not in idle]
        listed = {title: [name for name in grouped if title_of[name] == title] for title in GROUPS}
        taken = {name for names in (*listed.values(), idle) for name in names}
        groups = {**listed, OTHERS: [name for name in remaining if name not in taken], IDLE: idle}
        return {title: names for title, names in groups.items() if names}

    def anchor(self, name: str) -> str:
        """Return the id of a field on the page."""
        return f"{slug(self._path)}-{slug(name)}"

    def _main_field(self, name: str) -> str:
        schema = self._fields[name]
        words = [type_of(schema), *limits_of(schema), *(["needed"] if name in self._needed else [])]
        examples = [*schema.get("examples", ()), *([self._examples[name]] if name in self._examples else [])]
        example = "" if not examples else f"<h4>Example</h4>{snippet(escape(pretty({name: examples[0]})))}"
        return (
            f'<h3 id="{self.anchor(name)}"><code>{escape(name)}</code></h3>'
            f"<p>{prose(schema.get('description', ''))} <small>{escape('; '.join(words))}</small></p>"
            f"{example}{self._shapes_of([schema])}"
        )

    def _group(self, title: str) -> str:
        names = self.groups()[title]
        table = self._table(names, self._fields, self._needed, self.anchor)
        table += self._shapes_of(self._fields[name] for name in names)
        anchor = f"{slug(self._path)}-{slug(title)}"
        if title == IDLE:
            return f'<details id="{anchor}"><summary>{title} ({len(names)} fields)</summary>{table}</details>'
        return f'<h3 id="{anchor}">{escape(title)}</h3>{table}'

    def _table(self, names: Collection[str], fields: Mapping[str, Schema], needed: Collection[str], anchor: Any) -> str:
        rows = "".join(row(name, fields[name], needed=name in needed, anchor=anchor(name)) for name in names)
        return f'<div class="scroll"><table class="fields">{HEADS}<tbody>{rows}</tbody></table></div>'

    def _shapes_of(self, schemas: Any) -> str:
        """Return the named shapes within `schemas`, and those within them, each once on the page."""
        return "".join(self._shape(name) for schema in schemas for name in self._new_refs(schema))

    def _new_refs(self, schema: Schema) -> Iterator[str]:
        for name in refs_in(schema):
            if name in self._schemas and name not in self._shapes_done:
                self._shapes_done.add(name)
                yield name

    def _shape(self, name: str) -> str:
        shape = self._schemas[name]
        fields = shape.get("properties", {})
        empty = [field for field, schema in fields.items() if is_empty(schema)]
        full = [field for field in fields if field not in empty]
        table = self._table(full, fields, shape.get("required", ()), lambda field: f"{slug(self._path)}-{name}-{field}")
        if empty:
            table += f"<p>Only null or empty: {', '.join(f'<code>{escape(field)}</code>' for field in empty)}.</p>"
        description = f"<p>{prose(shape['description'])}</p>" if shape.get("description") else ""
        if not fields:
            table = f"<p>{escape(type_of({**shape, 'description': ''}))}</p>"
        inner = self._shapes_of([shape, *fields.values()])
        return f'<div class="shape"><h4><code>{escape(name)}</code></h4>{description}{table}</div>{inner}'


def row(name: str, schema: Schema, *, needed: bool, anchor: str) -> str:
    """Return one line of a table of fields."""
    limits = "".join(f"<small><br>{escape(limit)}</small>" for limit in limits_of(schema))
    default = default_of(schema)
    description = prose(schema.get("description", ""))
    if default:
        description += f" <small>Default: <code>{escape(default)}</code>.</small>"
    need = '<span class="need">needed</span>' if needed else ""
    return (
        f'<tr id="{escape(anchor)}"><td><code>{escape(name)}</code>{need}</td>'
        f"<td>{escape(type_of(schema))}{limits}</td><td>{description}</td></tr>"
    )


def prose(text: str) -> str:
    """Convert a description to HTML: text in backticks is code."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text))


def slug(text: str) -> str:
    """Return `text` as an id: `/v1/chat/completions` is `chat-completions`."""
    return re.sub(r"[^A-Za-z0-9_]+", "-", text.removeprefix("/v1")).strip("-") or "root"
