"""POST /api/chat and /api/generate: their fields, read as a chat or completion of the OpenAI dialect.

Fields that nobody knows are ignored, as Ollama does, and logged by name. A known one that asks for something that is
not served is refused.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

from ....errors import InvalidRequest, UnsupportedParameter
from ....text import TextView
from ....text.images import ImageSource
from ....text.images.prompt import image_part
from ....text.text_view import NO_CHATS_CURE
from ...field_checks import checked, kind_of, require_type
from ...generation.pieces import Usage, WholeChoice
from ...prepared import PreparedPrompts
from ...text_jobs import Enter
from ...validate import Limits, ValidatedRequest, rename_params
from ..framing import Framing
from ..openai.chat import ParsedChat
from ..openai.completions import ParsedCompletion
from ..openai.parsed import ParsedOpenAi
from ..openai.schema import Options
from ..parsed import MAX_NAME_CHARS, Head, ParsedRequest
from .answers import AnswerLines, encode_line, last_line, logprobs_of, parts_of

if TYPE_CHECKING:
    from ....text import TextModel

NDJSON = Framing(b"application/x-ndjson", b"")
LATEST = ":latest"
MAX_REPORTED = 32
MAX_REPORTED_CHARS = 64

SHARED = (
    *("model", "format", "options", "think", "logprobs", "top_logprobs"),
    *("cache_salt", "priority", "speculate", "spec_prefill", "close_at_limit"),
)
LIMITS = ("max_output_tokens", "max_tokens")
BESIDE_OPTIONS = ("temperature", "top_p", *LIMITS)
"""Fields that some clients write beside `options`; those in it have precedence."""
CHAT = (*SHARED, "messages", "tools", "tool_choice", "parallel_tool_calls")
IGNORED = ("stream", "keep_alive", "truncate", "shift")
"""Fields that change nothing here, or are read before: the model stays loaded, and a prompt that is too long is
refused."""
GENERATE = (*SHARED, "prompt", "system", "raw", "images")
NEUTRAL: Mapping[str, tuple[Any, ...]] = {"suffix": ("",), "template": ("",), "context": ([],)}
"""Fields of /api/generate that are not served, with their neutral values besides null."""
RAW_CURE = 'use /api/generate with "raw": true, or start the server with --chat-template FILE'
OWN_KEYS = ("thinking", "tool_name", "tool_calls", "images")


class ParsedOllama(ParsedRequest):
    """One request, parsed. `loads`: it has no prompt, and asks Ollama to load the model, or to unload it. `known`:
    its fields; `unknown`: names of others in it; `beside`: those beside its options that count, by OpenAI's names."""

    stops_of_model = True
    framing = NDJSON

    inner: ParsedOpenAi
    known: ClassVar[tuple[str, ...]]
    beside: Mapping[str, str] = MappingProxyType({})
    loads = False
    unloads = False

    def _read(self, value: dict[str, Any]) -> None:
        self.unknown = unknown_fields(value, self.known)
        self.model = model_of(value)
        self.stream = checked(value, "stream", bool, "true or false", "") is not False
        self.unloads = value.get("keep_alive") in (0, "0")

    def _load(self) -> None:
        self.loads = True
        self._hold(ParsedChat, {"messages": [{"role": "user", "content": ""}]})

    def _given(self, value: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields of a request for the parsers of the OpenAI dialect, with those beside its options."""
        given = {name: value[name] for name in self.known if value.get(name) is not None and name != "model"}
        options = given.get("options", {})
        if isinstance(options, dict):
            given["options"] = served_options(options)
            self.beside = _beside_options(value, options)
        return given | {field: value[name] for field, name in self.beside.items()}

    def _hold(self, shape: Callable[[dict[str, Any]], ParsedOpenAi], given: dict[str, Any]) -> None:
        with rename_params(self.beside):
            inner = self.inner = shape(given)
        inner.spellings = {**inner.spellings, **self.beside}
        self.params, self.options, self.spellings = inner.params, inner.options, inner.spellings
        self.image_places = inner.image_places

    def _size(self, model: TextView) -> int:
        return self.inner.size(model)

    def tokenize(self, model: TextModel, enter: Enter, most: int) -> PreparedPrompts:
        self.inner.layouts = self.layouts
        try:
            return self.inner.tokenize(model, enter, most)
        except InvalidRequest as error:
            if not error.message.endswith(NO_CHATS_CURE):
                raise
            message = error.message.removesuffix(NO_CHATS_CURE) + RAW_CURE
            raise InvalidRequest(message, param=error.param) from None

    def check_against(self, limits: Limits) -> ValidatedRequest:
        return self.inner.check_against(limits)

    def stream_writer(self, head: Head, text: TextView) -> AnswerLines:
        return AnswerLines(self, head, text)

    def whole(self, head: Head, choices: Sequence[WholeChoice], usage: Usage, text: TextView) -> bytes:
        (choice,) = choices
        line = last_line(head, choice.finish_reason, usage) | self.body(parts_of(self.events_of(choice)))
        return encode_line(line | logprobs_of(choice.entries, text))

    def _outline(self, value: dict[str, Any], content: dict[str, Any]) -> dict[str, Any]:
        """Return the fields that the event loop needs, with `content` in place of the prompt, tools and format."""
        names = ("stream", "keep_alive", *BESIDE_OPTIONS, *SHARED)
        fields = {name: value[name] for name in names if value.get(name) is not None and name != "format"}
        if isinstance(fields.get("model"), str):
            fields["model"] = fields["model"][:MAX_NAME_CHARS]
        if isinstance(fields.get("options"), dict):
            fields["options"] = served_options(fields["options"])
        raw = {"raw": True} if value.get("raw") else {}
        return {**dict.fromkeys(self.unknown), **fields, **raw, **content}

    def body(self, parts: dict[str, Any]) -> dict[str, Any]:
        """Return the members of a line that hold `parts` of an answer: content, thinking, tool_calls."""
        raise NotImplementedError


class OllamaChat(ParsedOllama):
    """A request of /api/chat."""

    kind = "ollama_chat"
    id_prefix = "chat-"
    prompt_param = "messages"
    known = CHAT

    def __init__(self, value: dict[str, Any]) -> None:
        self._read(value)
        messages = value.get("messages")
        if messages is None or messages == []:
            self._load()
            return
        self._hold(ParsedChat, self._given(value) | {"messages": _messages(messages)})

    def outline(self, value: dict[str, Any]) -> dict[str, Any]:
        return self._outline(value, {"messages": [] if self.loads else [{"role": "user", "content": ""}]})

    def body(self, parts: dict[str, Any]) -> dict[str, Any]:
        return {"message": {"role": "assistant", **parts}}


class OllamaGenerate(ParsedOllama):
    """A request of /api/generate: one turn in the model's template, or with `raw` the prompt as it is."""

    kind = "ollama_generate"
    id_prefix = "gen-"
    prompt_param = "prompt"
    known = (*GENERATE, *NEUTRAL)

    def __init__(self, value: dict[str, Any]) -> None:
        for name, neutral in NEUTRAL.items():
            if value.get(name) is not None and value[name] not in neutral:
                raise UnsupportedParameter(f"{name} is not supported here: leave it out", param=name)
        self._read(value)
        prompt = checked(value, "prompt", str, "a string", "") or ""
        system = checked(value, "system", str, "a string", "")
        images = _images(value, "")
        if not prompt and not images:
            self._load()
            return
        given = self._given(value)
        for name in ("prompt", "system", "raw", "images", *NEUTRAL):
            given.pop(name, None)
        if checked(value, "raw", bool, "true or false", ""):
            if images:
                raise UnsupportedParameter("images are not supported with raw: leave out raw", param="images")
            self._hold(ParsedCompletion, _raw(given, prompt))
            return
        turns: list[dict[str, Any]] = [{"role": "user", "content": _with_images(prompt, images)}]
        if system:
            turns.insert(0, {"role": "system", "content": system})
        self._hold(ParsedChat, given | {"messages": turns})

    def outline(self, value: dict[str, Any]) -> dict[str, Any]:
        return self._outline(value, {"prompt": "" if self.loads else "x"})

    def body(self, parts: dict[str, Any]) -> dict[str, Any]:
        given = {"response": parts["content"]}
        return given | ({"thinking": parts["thinking"]} if "thinking" in parts else {})


def _raw(given: dict[str, Any], prompt: str) -> dict[str, Any]:
    given.pop("think", None)
    if given.pop("logprobs", None):
        given["logprobs"] = given.pop("top_logprobs", None) or 0
    given.pop("top_logprobs", None)
    return given | {"prompt": prompt}


def model_of(value: Mapping[str, Any]) -> str | None:
    """Return the model's name. Ollama's clients add the tag `:latest` to names without a tag."""
    name = checked(value, "model", str, "a string", "")
    return None if name is None else str(name).removesuffix(LATEST)


def unknown_fields(value: Mapping[str, Any], known: Collection[str]) -> tuple[str, ...]:
    """Return the names of fields and of `options` that this server does not know, at most MAX_REPORTED and cut."""
    own = (name for name in value if name not in known and name not in (*IGNORED, *BESIDE_OPTIONS))
    options = value.get("options")
    listed = options if isinstance(options, dict) else ()
    others = (f"options.{name}" for name in listed if name not in Options.model_fields)
    return tuple(name[:MAX_REPORTED_CHARS] for name in itertools.islice(itertools.chain(own, others), MAX_REPORTED))


def served_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of `options` that are known."""
    return {name: options[name] for name in options if name in Options.model_fields}


def _beside_options(value: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, str]:
    """Return the fields beside `options` that count, by OpenAI's names."""
    found: dict[str, str] = {}
    for name in BESIDE_OPTIONS:
        field, option = ("max_tokens", "num_predict") if name in LIMITS else (name, name)
        if value.get(name) is not None and options.get(option) is None:
            found.setdefault(field, name)
    return found


def _messages(messages: Any) -> Any:
    """Return messages with the names that OpenAI has for Ollama's keys; what is no message stays for the reader to
    refuse."""
    if not isinstance(messages, list):
        return messages
    places = enumerate(messages)
    return [_message(turn, f"messages[{i}]") if isinstance(turn, dict) else turn for i, turn in places]


def _message(message: dict[str, Any], at: str) -> dict[str, Any]:
    found = {key: value for key, value in message.items() if key not in OWN_KEYS}
    if images := _images(message, at):
        found["content"] = _with_images(checked(message, "content", str, "a string", at) or "", images)
    thinking = checked(message, "thinking", str, "a string", at)
    if thinking:
        found["reasoning_content"] = thinking
    name = checked(message, "tool_name", str, "a string", at)
    if name:
        found["name"] = name
    if found.get("content") is None and message.get("tool_calls"):
        found["content"] = ""
    calls = message.get("tool_calls")
    if calls is not None and not isinstance(calls, list):
        raise InvalidRequest(f"{at}.tool_calls is {kind_of(calls)}: it must be an array", param=f"{at}.tool_calls")
    return found | ({"tool_calls": calls} if calls else {})


def _images(given: Mapping[str, Any], at: str) -> list[dict[str, Any]]:
    """Return the parts of the images of a message, which are strings in base64."""
    found = []
    for i, data in enumerate(checked(given, "images", list, "an array of images in base64", at) or ()):
        place = f"{at}.images[{i}]" if at else f"images[{i}]"
        require_type(data, str, "an image in base64", place)
        found.append(image_part(ImageSource(place, data=data)))
    return found


def _with_images(text: str, images: list[dict[str, Any]]) -> str | list[dict[str, Any]]:
    """Return content with images in front of its text, as Ollama writes them."""
    return [*images, *([{"type": "text", "text": text}] if text else [])] if images else text
