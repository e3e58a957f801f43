"""Chat templates: a model's Jinja templates, rendered in a sandbox compatible with transformers'.

Templates come from model folders and are not trusted. The sandbox forbids changes to its inputs and limits the size of
the output and the time of a rendering.
"""

from __future__ import annotations

import json
import logging
import math
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from enum import Enum
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ..errors import InvalidRequest, ModelError, one_line
from ..regular_files import read_regular
from .continuation import cut_at_marker, with_marker
from .folder import FolderConfig, read_object, read_override
from .template_traits import TemplateTraits, least_chats, probe
from .text_view import NO_CHATS_CURE

log = logging.getLogger(__name__)

_MAX_CHARS = 32 * 1024 * 1024
_MAX_S = 10.0
_PROBES = ((0, 4), (1, 4), (1, 2))  # slices of the probe's turns: templates differ in the orders of roles they accept
_IMAGE = {"type": "image"}
_REASONING_KEYS = ("thinking", "reasoning")  # of messages, besides `reasoning_content`
_RESERVED_NAMES = frozenset({"messages", "tools", "add_generation_prompt"})


class ContentFormat(Enum):
    """The forms of message content that a template accepts."""

    TEXT = "text"
    PARTS = "parts"
    EITHER = "either"


class TemplateRefusal(InvalidRequest):
    """The template raised, or failed, on this conversation. It may take another form of it."""


class ChatTemplate:
    """A compiled chat template.

    `source` is its text; `name` is its origin, for error messages; `traits` are the forms of a conversation that it
    writes. `fault`: the reason for which it writes no chat, not even one user's turn with a system turn, tools or
    without; "" if it does. `special_tokens` (`bos_token`, ...) are passed as variables. `now` is the clock of
    `strftime_now`. A rendering may write `max_chars` characters and take `max_s` seconds. Raises ModelError when the
    source does not compile.
    """

    def __init__(
        self,
        source: str,
        *,
        name: str,
        special_tokens: Mapping[str, str] | None = None,
        now: Callable[[], datetime] = datetime.now,
        max_chars: int = _MAX_CHARS,
        max_s: float = _MAX_S,
    ) -> None:
        self.source = source
        self.name = name
        self._special_tokens = dict(special_tokens or {})
        self._max_chars = max_chars
        self._environment = _environment(now, max_s)
        try:
            self._template = self._environment.from_string(source)
        except (jinja2.TemplateError, RecursionError) as error:
            line = f", line {error.lineno}" if isinstance(error, jinja2.TemplateSyntaxError) else ""
            raise ModelError(
                f"the chat template in {name}{line} is broken: {one_line(error)}; give another with `chat_template`"
            ) from error
        self._reasoning_keys = [key for key in _REASONING_KEYS if re.search(rf"\.{key}\b|\[['\"]{key}['\"]\]", source)]
        self.fault = ""
        self._content_format = self._probe_content_format()
        self.fault = self._probe_fault()
        self.traits = self._probe_traits()
        self.literal_text = self._render_literal_text() + self.traits.probed

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> str:
        """Render the prompt for `messages`, each with a `role` and a `content` of text or of text parts.

        With `continue_final_message` the prompt ends with the last message's text, without end-of-turn tokens. `extra`
        are additional template variables. Raises InvalidRequest when the template raises, breaks a limit, or does not
        write the text to be continued.
        """
        if taken := _RESERVED_NAMES.intersection(extra or {}):
            raise InvalidRequest(f"template variable {min(taken)!r} is set by the server", param="chat_template_kwargs")
        normalized = [_normalize_content(message, i, self._content_format) for i, message in enumerate(messages)]
        normalized = [self._with_reasoning(message) for message in normalized]
        last = normalized[-1] if continue_final_message else None
        if last is not None:
            normalized[-1], add_generation_prompt = with_marker(last), False
        own = {"messages": normalized, "tools": tools or None, "add_generation_prompt": add_generation_prompt}
        rendered = self._run({"documents": None, **(extra or {}), **own})
        return rendered if last is None else cut_at_marker(rendered, last)

    def _with_reasoning(self, message: dict[str, Any]) -> dict[str, Any]:
        """Return the message with its reasoning also under the other names that the template reads."""
        reasoning = message.get("reasoning_content")
        if reasoning is None:
            return message
        return {**dict.fromkeys(self._reasoning_keys, reasoning), **message}

    def _run(self, variables: Mapping[str, Any]) -> str:
        try:
            return self._collect({**self._special_tokens, **variables})
        except MemoryError:
            raise
        except Exception as error:
            raise self._explained(error) from (error if _is_unexpected(error) else None)

    def _explained(self, error: Exception) -> InvalidRequest:
        """Return the request's error for what a rendering raised."""
        kind = TemplateRefusal if _may_take_another_form(error) else InvalidRequest
        if self.fault:
            return kind(f"the model's chat template {_fault(error)}: {NO_CHATS_CURE}")
        if isinstance(error, InvalidRequest):
            return error
        if isinstance(error, jinja2.exceptions.SecurityError):
            doing = f"does what is not allowed ({one_line(error)})"
            message = f"the chat template in {self.name} {doing}: start the server with another"
        elif isinstance(error, _RaisedByTemplate):
            message = f"the model's chat template refuses this: {_cause(error)}"
        else:
            message = f"the model's chat template can't write these messages ({_cause(error)})"
        return kind(message, param="messages")

    def _collect(self, variables: Mapping[str, Any]) -> str:
        chunks, size = [], 0
        self._environment.start()
        for chunk in self._template.generate(variables):
            size += len(chunk)
            if size > self._max_chars:
                raise InvalidRequest(
                    f"the chat template writes more than {self._max_chars} characters; send less", param="messages"
                )
            chunks.append(chunk)
        return "".join(chunks)

    def _probe_content_format(self) -> ContentFormat:
        """Find the accepted content format by rendering a text and a list of parts."""
        word = "treadleprobe"
        text, parts = self._render_probe(word), self._render_probe([{"type": "text", "text": word}])
        takes_parts = word in parts and "'text'" not in parts and '"text"' not in parts
        if not takes_parts:
            return ContentFormat.TEXT
        return ContentFormat.EITHER if word in text else ContentFormat.PARTS

    def _probe_fault(self) -> str:
        """Find out whether some chat of one user's turn can be written, and why not."""
        first: Exception | None = None
        for turns, tools in least_chats():
            messages = [_normalize_content(turn, i, self._content_format) for i, turn in enumerate(turns)]
            own = {"messages": messages, "tools": tools, "documents": None, "add_generation_prompt": True}
            try:
                self._collect({**self._special_tokens, **own})
                return ""
            except MemoryError:
                raise
            except Exception as error:
                first = first or error
                if not _may_take_another_form(error):
                    break
        return "" if first is None else _fault(first)

    def _probe_traits(self) -> TemplateTraits:
        def render(turns: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None) -> str:
            try:
                return self.render(turns, tools=tools)
            except TemplateRefusal:
                return ""

        try:
            return probe(render)
        except (InvalidRequest, ModelError):  # it breaks a limit
            return TemplateTraits()

    def _render_literal_text(self) -> str:
        """Render empty turns of every role: the text that comes from the template itself, for `SpecialTokenGuard`."""
        turns = [{"role": role, "content": ""} for role in ("system", "user", "assistant", "user")]
        normalized = [_normalize_content(turn, 0, self._content_format) for turn in turns]
        return "".join(self._render_or_empty({"messages": normalized[first:last]}) for first, last in _PROBES)

    def _render_or_empty(self, variables: Mapping[str, Any]) -> str:
        try:
            return self._run({"tools": None, "add_generation_prompt": False, **variables})
        except (InvalidRequest, ModelError):
            return ""

    @property
    def takes_parts(self) -> bool:
        """Whether the template writes content of several parts, which images are."""
        return self._content_format is not ContentFormat.TEXT

    def image_text(self, placeholder: str) -> str:
        """Return the text that the template writes for an image between two texts of a user; the placeholder alone
        where it writes none, or writes images in front."""
        before, behind = "alphaprobe", "betaprobe"
        texts = [{"type": "text", "text": before}, _IMAGE, {"type": "text", "text": behind}]
        written = self._render_probe(texts) if self.takes_parts else ""
        found = written.partition(before)[2].partition(behind)[0]
        return found if found.count(placeholder) == 1 else placeholder

    def _render_probe(self, content: Any) -> str:
        try:
            return self._run(
                {"messages": [{"role": "user", "content": content}], "tools": None, "add_generation_prompt": True}
            )
        except (InvalidRequest, ModelError):
            return ""


def _may_take_another_form(error: Exception) -> bool:
    return not isinstance(error, (InvalidRequest, jinja2.exceptions.SecurityError))


def _is_unexpected(error: Exception) -> bool:
    return _may_take_another_form(error) and not isinstance(error, _RaisedByTemplate)


def _cause(error: Exception) -> str:
    """Return why a rendering ended, without what a client could do about it."""
    if isinstance(error, InvalidRequest):
        return error.message.partition(";")[0]
    if isinstance(error, jinja2.exceptions.SecurityError):
        return f"it does what is not allowed: {one_line(error)}"
    return one_line(error) if isinstance(error, _RaisedByTemplate) else f"{type(error).__name__}: {one_line(error)}"


def _fault(error: Exception) -> str:
    return f"can't write even one user's turn ({_cause(error).rstrip('.')})"


def find_template(files: FolderConfig, override: Path | None) -> ChatTemplate | None:
    """Return the first of `override`, chat_template.jinja, tokenizer_config.json, chat_template.json; None if none.

    Warns of one that refuses every chat. Raises ConfigError when `override` can't be read, ModelError when a template
    is broken.
    """
    found = _source(files, override)
    if found is None:
        return None
    template = ChatTemplate(found[1], name=found[0], special_tokens=files.special_tokens())
    if template.fault:
        log.warning(
            "the chat template in %s %s: chats are refused; give another with --chat-template",
            template.name,
            template.fault,
        )
    return template


def _source(files: FolderConfig, override: Path | None) -> tuple[str, str] | None:
    """Return the template's origin and text; None if there is no template."""
    if override is not None:
        return str(override), read_override(override)
    path = files.folder / "chat_template.jinja"
    if path.exists():
        return path.name, _read(path)
    for name, values in (
        ("tokenizer_config.json", files.tokenizer),
        ("chat_template.json", read_object(files.folder / "chat_template.json")),
    ):
        if source := _select_template(values.get("chat_template"), name):
            return name, source
    return None


def _read(path: Path) -> str:
    try:
        return read_regular(path).decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"can't read {path}: {error}; fetch the file again") from error


def _select_template(value: Any, name: str) -> str | None:
    """Return the template of a `chat_template` field, a text or several with names; None if there is none. Warns
    of a field of another type. `name` is that of its file."""
    if value is None or isinstance(value, str):
        return value
    named = value if isinstance(value, Mapping) else _named(value) if isinstance(value, list) else None
    if named is None or not all(isinstance(source, str) for source in named.values()):
        log.warning(
            "chat_template in %s is %s, which is neither a template nor a list of named ones: it is ignored; fetch the "
            "file again, or give a template with --chat-template",
            name,
            one_line(repr(value), 60),
        )
        return None
    return named.get("default") or (next(iter(named.values())) if len(named) == 1 else None)


def _named(entries: Sequence[Any]) -> dict[str, Any] | None:
    """Return the templates of a list by their names; None if an entry is none."""
    if not all(isinstance(entry, Mapping) and isinstance(entry.get("name"), str) for entry in entries):
        return None
    return {entry["name"]: entry.get("template") for entry in entries}


def _normalize_content(message: Mapping[str, Any], index: int, content: ContentFormat) -> dict[str, Any]:
    value = message.get("content")
    where = f"messages[{index}].content"
    if isinstance(value, list):
        parts = [_part(part, f"{where}[{i}]", content) for i, part in enumerate(value)]
        return {**message, "content": "".join(p["text"] for p in parts) if content is ContentFormat.TEXT else parts}
    if value is None:
        value = ""
    if not isinstance(value, str):
        raise InvalidRequest(f"{where} must be a string or a list of text parts", param=where)
    return {**message, "content": [{"type": "text", "text": value}] if content is ContentFormat.PARTS else value}


def _part(part: Any, where: str, content: ContentFormat) -> dict[str, Any]:
    if not isinstance(part, Mapping) or not isinstance(part.get("type"), str):
        raise InvalidRequest(f"{where} must be an object with a type", param=where)
    if part == _IMAGE and content is not ContentFormat.TEXT:
        return dict(part)
    if part["type"] != "text":
        raise InvalidRequest(f"{where} is of type {part['type']!r}, but this model reads text only", param=where)
    if not isinstance(part.get("text"), str):
        raise InvalidRequest(f"{where}.text must be a string", param=where)
    return dict(part)


class _RaisedByTemplate(jinja2.TemplateError):
    """Raised by a template through `raise_exception`."""


class _BoundedSandbox(ImmutableSandboxedEnvironment):
    """A sandbox with a time limit, checked at every lookup and call: a loop can't run for long without either."""

    def __init__(self, max_s: float, extensions: Sequence[type[Extension]]) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
        self._max_s = max_s
        self._rendering = threading.local()

    def start(self) -> None:
        """Start the time limit of a rendering on this thread."""
        self._rendering.deadline = time.monotonic() + self._max_s

    def _check(self) -> None:
        if time.monotonic() > getattr(self._rendering, "deadline", math.inf):
            raise InvalidRequest(
                f"the chat template took more than {self._max_s:g} s; send fewer messages", param="messages"
            )

    def getattr(self, obj: Any, attribute: str) -> Any:
        self._check()
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        self._check()
        return super().getitem(obj, argument)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805 (jinja2's own)
        __self._check()
        return super().call(__context, __obj, *args, **kwargs)


class _GenerationTag(Extension):
    """`{% generation %}`, which marks the assistant's text for training. Ignored when serving."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment(now: Callable[[], datetime], max_s: float) -> _BoundedSandbox:
    environment = _BoundedSandbox(max_s, [_GenerationTag, loopcontrols])
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda pattern: now().strftime(pattern)
    return environment


def _raise_exception(message: Any) -> NoReturn:
    raise _RaisedByTemplate(str(message))


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Serialize as JSON. Jinja's own `tojson` filter escapes for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
