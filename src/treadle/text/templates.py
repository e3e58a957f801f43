"""Chat templates: Jinja programs that come with a model, run in a sandbox the way their writers expect.

Templates come from model folders, so they are not trusted: the sandbox allows no changes to what they are given, and
what they may write, and for how long, has a bound.
"""

from __future__ import annotations

import json
import math
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
from .continuation import cut_at_mark, marked
from .folder import FolderFacts, read_object, read_override, read_regular

_MAX_CHARS = 32 * 1024 * 1024
_MAX_S = 10.0
_PROBES = ((0, 4), (1, 4), (1, 2))  # not every template takes every order of roles
_OWN_NAMES = frozenset({"messages", "tools", "add_generation_prompt"})


class Content(Enum):
    """What a template can take as a message's content."""

    TEXT = "text"
    PARTS = "parts"
    EITHER = "either"


class ChatTemplate:
    """One compiled template.

    `source` is its text, `name` says where it came from, for errors. `special_tokens` (`bos_token`, ...) are variables
    it may use. `now` gives the time for templates that print the date. A rendering may write `max_chars` characters and
    take `max_s` seconds. Raises ModelError when the source is no template.
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
        self._content = self._probe()
        self.written = self._written()

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt for `messages`, each with a `role` and a `content` of text or of text parts.

        With `continue_final_message` it ends with the last message's text, without the end of its turn or the
        beginning of another. `extra` are more variables for the template. Raises InvalidRequest when the template
        refuses the messages, can't take them, or leaves out the text that is to be continued.
        """
        if taken := _OWN_NAMES.intersection(extra or {}):
            raise InvalidRequest(f"template variable {min(taken)!r} is set by the server", param="chat_template_kwargs")
        shaped = [_shaped(message, index, self._content) for index, message in enumerate(messages)]
        last = shaped[-1] if continue_final_message else None
        if last is not None:
            shaped[-1], add_generation_prompt = marked(last), False
        own = {"messages": shaped, "tools": tools or None, "add_generation_prompt": add_generation_prompt}
        rendered = self._run({"documents": None, **(extra or {}), **own})
        return rendered if last is None else cut_at_mark(rendered, last)

    def _run(self, variables: Mapping[str, Any]) -> str:
        try:
            return self._collect({**self._special_tokens, **variables})
        except _Refused as error:
            raise InvalidRequest(
                f"the model's chat template refuses this: {one_line(error)}", param="messages"
            ) from None
        except jinja2.exceptions.SecurityError as error:
            raise InvalidRequest(
                f"the chat template in {self.name} does what is not allowed ({one_line(error)}): start the server with "
                "another",
                param="messages",
            ) from None
        except (InvalidRequest, MemoryError):
            raise
        except Exception as error:
            what = f"{type(error).__name__}: {one_line(error)}"
            raise InvalidRequest(
                f"the model's chat template can't write these messages ({what})", param="messages"
            ) from error

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

    def _probe(self) -> Content:
        """Try the template on a text and on a list of parts: the one way to know that holds for every template."""
        word = "treadleprobe"
        text, parts = self._tried(word), self._tried([{"type": "text", "text": word}])
        takes_parts = word in parts and "'text'" not in parts and '"text"' not in parts
        if not takes_parts:
            return Content.TEXT
        return Content.EITHER if word in text else Content.PARTS

    def _written(self) -> str:
        """What the template writes of its own around turns of every role, for `guard`."""
        turns = [{"role": role, "content": ""} for role in ("system", "user", "assistant", "user")]
        shaped = [[_shaped(turn, 0, self._content) for turn in turns[first:last]] for first, last in _PROBES]
        return "".join(self._rendered_or_nothing({"messages": messages}) for messages in shaped)

    def _rendered_or_nothing(self, variables: Mapping[str, Any]) -> str:
        try:
            return self._run({"tools": None, "add_generation_prompt": False, **variables})
        except (InvalidRequest, ModelError):
            return ""

    def _tried(self, content: Any) -> str:
        try:
            return self._run(
                {"messages": [{"role": "user", "content": content}], "tools": None, "add_generation_prompt": True}
            )
        except (InvalidRequest, ModelError):
            return ""


def find_template(facts: FolderFacts, override: Path | None) -> ChatTemplate | None:
    """The template to use: `override`, chat_template.jinja, tokenizer_config.json, chat_template.json; None if none.

    Raises ConfigError when `override` can't be read, ModelError when a template is broken.
    """
    found = _source(facts, override)
    return ChatTemplate(found[1], name=found[0], special_tokens=facts.special_tokens()) if found else None


def _source(facts: FolderFacts, override: Path | None) -> tuple[str, str] | None:
    """Where the template comes from, and its text."""
    if override is not None:
        return str(override), read_override(override)
    path = facts.folder / "chat_template.jinja"
    if path.exists():
        return path.name, _read(path)
    for name, values in (
        ("tokenizer_config.json", facts.tokenizer),
        ("chat_template.json", read_object(facts.folder / "chat_template.json")),
    ):
        if source := _named_default(values.get("chat_template")):
            return name, source
    return None


def _read(path: Path) -> str:
    try:
        return read_regular(path).decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"can't read {path}: {error}; fetch the file again") from error


def _named_default(value: Any) -> str | None:
    """The template in tokenizer_config.json's field: a string, or a list of named ones."""
    if not isinstance(value, list):
        return value if isinstance(value, str) else None
    named = {t.get("name"): t.get("template") for t in value if isinstance(t, Mapping)}
    found = named.get("default") or (next(iter(named.values())) if len(named) == 1 else None)
    return found if isinstance(found, str) else None


def _shaped(message: Mapping[str, Any], index: int, content: Content) -> dict[str, Any]:
    value = message.get("content")
    where = f"messages[{index}].content"
    if isinstance(value, list):
        parts = [_text_part(part, f"{where}[{i}]") for i, part in enumerate(value)]
        return {**message, "content": "".join(p["text"] for p in parts) if content is Content.TEXT else parts}
    if value is None:
        value = ""
    if not isinstance(value, str):
        raise InvalidRequest(f"{where} must be a string or a list of text parts", param=where)
    return {**message, "content": [{"type": "text", "text": value}] if content is Content.PARTS else value}


def _text_part(part: Any, where: str) -> dict[str, Any]:
    if not isinstance(part, Mapping) or not isinstance(part.get("type"), str):
        raise InvalidRequest(f"{where} must be an object with a type", param=where)
    if part["type"] != "text":
        raise InvalidRequest(f"{where} is of type {part['type']!r}, but this model reads text only", param=where)
    if not isinstance(part.get("text"), str):
        raise InvalidRequest(f"{where}.text must be a string", param=where)
    return dict(part)


class _Refused(jinja2.TemplateError):
    """The template called raise_exception."""


class _BoundedSandbox(ImmutableSandboxedEnvironment):
    """A sandbox whose renderings end: templates can't loop for long without looking something up or calling it."""

    def __init__(self, max_s: float, extensions: Sequence[type[Extension]]) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
        self._max_s = max_s
        self._rendering = threading.local()

    def start(self) -> None:
        """This thread's rendering starts now."""
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
    """`{% generation %}` marks the assistant's part for training; for serving it means nothing."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment(now: Callable[[], datetime], max_s: float) -> _BoundedSandbox:
    environment = _BoundedSandbox(max_s, [_GenerationTag, loopcontrols])
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda pattern: now().strftime(pattern)
    return environment


def _refuse(message: Any) -> NoReturn:
    raise _Refused(str(message))


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as it is; Jinja's own filter would escape it for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
