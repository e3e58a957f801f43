"""Text settings of a model folder: vocabulary, context, EOS, default sampling, special tokens.

Read from config.json, generation_config.json, tokenizer_config.json and special_tokens_map.json, and for images from
preprocessor_config.json and processor_config.json.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..context_length import NO_LIMIT, context_length, positive_int
from ..errors import ConfigError, ModelError
from ..regular_files import read_regular

log = logging.getLogger(__name__)

_FILES = (
    *("config", "generation_config", "tokenizer_config", "special_tokens_map"),
    *("preprocessor_config", "processor_config"),
)
_LEAST_CONTEXT = 2
_NESTED = ("text_config", "language_config", "llm_config")


@dataclass(frozen=True)
class FolderConfig:
    """The folder's JSON files as parsed; a missing file is an empty object."""

    folder: Path
    config: Mapping[str, Any]
    generation: Mapping[str, Any]
    tokenizer: Mapping[str, Any]
    special: Mapping[str, Any]
    preprocessor: Mapping[str, Any]
    processor: Mapping[str, Any]

    @classmethod
    def read(cls, folder: Path) -> FolderConfig:
        """Read the folder. Raises ModelError when config.json is missing or one of the files is broken."""
        if not (folder / "config.json").exists():
            raise ModelError(f"{folder} has no config.json: give a model folder in Hugging Face layout")
        return cls(folder, *(read_object(folder / f"{name}.json") for name in _FILES))

    def _configs(self) -> Iterator[Mapping[str, Any]]:
        yield self.config
        for name in _NESTED:
            nested = self.config.get(name)
            if isinstance(nested, Mapping):
                yield nested

    def vocabulary(self) -> int | None:
        """Return the model's vocabulary size, which may exceed the tokenizer's; None if it is not given."""
        return next((n for c in self._configs() if (n := positive_int(c.get("vocab_size")))), None)

    def context(self, override: int | None) -> int:
        """Return the context length in tokens: `override`, or else the model's own.

        Raises ModelError when neither is given or the model's own is too short, ConfigError when `override` exceeds the
        model's own or is too short.
        """
        own = next((n for c in self._configs() if (n := context_length(c))), None)
        own = own or positive_int(self.tokenizer.get("model_max_length"))
        if own is None and override is None:
            raise ModelError(f"{self.folder}/config.json names no context length: give one with `context`")
        if own is not None and own < _LEAST_CONTEXT:
            raise ModelError(
                f"{self.folder}/config.json gives a context of {own} token, which holds no prompt with an answer: "
                "download it again, or use another model"
            )
        if own is not None and override is not None and override > own:
            raise ConfigError(
                f"`context` is {override}, and the model's own is {own}: give {own} or less", param="context"
            )
        if override is not None and override < _LEAST_CONTEXT:
            raise ConfigError(
                f"`context` is {override}, which holds no prompt with an answer: give {_LEAST_CONTEXT} or more",
                param="context",
            )
        return override or own or 0

    def eos_ids(self, vocabulary: int) -> tuple[int, ...]:
        """Return EOS ids from generation_config.json, else config.json; () when neither names one in the vocabulary."""
        for source in (self.generation, *self._configs()):
            value = source.get("eos_token_id")
            values = value if isinstance(value, list) else [value]
            found = [v for v in values if isinstance(v, int) and not isinstance(v, bool) and 0 <= v < vocabulary]
            if found:
                return tuple(dict.fromkeys(found))
        return ()

    def default_sampling(self) -> dict[str, float | int]:
        """Return generation_config.json's sampling defaults under this server's names. Values out of the range of
        request parameters are logged and ignored."""
        found: dict[str, float | int] = {}
        for name, fits in _SAMPLING.items():
            value = self.generation.get(name)
            if value is None:
                continue
            if (
                isinstance(value, (int, float))
                and not isinstance(value, bool)
                and abs(value) < NO_LIMIT
                and fits(value)
            ):
                found[name] = int(value) if name == "top_k" else float(value)
            else:
                log.warning(
                    "generation_config.json: %s is %s, which is out of range: it is ignored", name, repr(value)[:60]
                )
        if self.generation.get("do_sample") is False:
            found["temperature"] = 0.0
        return found

    def stop_strings(self) -> tuple[str, ...]:
        """Return generation_config.json's `stop_strings`; () when it has none."""
        given = self.generation.get("stop_strings")
        strings = [given] if isinstance(given, str) else given if isinstance(given, list) else []
        return tuple(string for string in strings if isinstance(string, str) and string)

    def architectures(self) -> tuple[str, ...]:
        """Return the class names in config.json's `architectures`, at most 16 of 256 characters."""
        named = self.config.get("architectures")
        return tuple(name[:256] for name in named[:16] if isinstance(name, str)) if isinstance(named, list) else ()

    def declared_tokens(self) -> list[tuple[int, dict[str, Any]]]:
        """Return tokenizer_config.json's added tokens as (id, content with flags), ordered by id; without those of ids
        that no model has."""
        declared = self.tokenizer.get("added_tokens_decoder")
        found = []
        for key, token in (declared if isinstance(declared, Mapping) else {}).items():
            content = _token_content(token)
            if content and key.isdecimal() and len(key) <= _ID_DIGITS:
                flags = {name: token[name] for name in _TOKEN_FLAGS if isinstance(token.get(name), bool)}
                found.append((int(key), {"content": content, **flags}))
        return sorted(found, key=lambda item: item[0])

    def tokenizer_class(self) -> str:
        """Return the name of the tokenizer's class in transformers, by default that of any tokenizer.json."""
        name = self.tokenizer.get("tokenizer_class")
        return name if isinstance(name, str) and name and _is_text(name) else _TOKENIZER_CLASS

    def special_tokens(self) -> dict[str, str]:
        """Return named special tokens (`bos_token`, ...) for templates. tokenizer_config.json comes first."""
        named = {**self.special, **{k: v for k, v in self.tokenizer.items() if v is not None}}
        found = {name: _token_content(value) for name, value in named.items() if name.endswith("_token")}
        return {name: content for name, content in found.items() if content is not None}


_TOKENIZER_CLASS = "PreTrainedTokenizerFast"
_ID_DIGITS = 9
_TOKEN_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")

_SAMPLING: dict[str, Callable[[float], bool]] = {
    "temperature": lambda v: 0 <= v <= 2,
    "top_p": lambda v: 0 < v <= 1,
    "top_k": lambda v: v >= -1 and v == int(v),
    "min_p": lambda v: 0 <= v <= 1,
    "repetition_penalty": lambda v: 0 < v <= 10,
}


def read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in `path`; {} when the file is missing. Raises ModelError when it holds anything else."""
    try:
        value = json.loads(read_regular(path))
    except FileNotFoundError:
        return {}
    except RecursionError:
        raise ModelError(f"{path} is nested too deeply to be a model's: fetch the file again") from None
    except (OSError, ValueError) as error:
        raise ModelError(f"can't read {path}: {error}; fetch the file again") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} must hold a JSON object, not {type(value).__name__}; fetch the file again")
    return value


def read_override(path: Path) -> str:
    """Read the template file given with `chat_template`. Raises ConfigError when it can't be read."""
    try:
        return read_regular(path).decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"`chat_template` {path} can't be read: {why}", param="chat_template") from error


def _token_content(value: Any) -> str | None:
    if isinstance(value, Mapping):
        value = value.get("content")
    return value if isinstance(value, str) and _is_text(value) else None


def _is_text(value: str) -> bool:
    """Whether the string has no lone surrogates, which tokenizers reject."""
    return not any("\ud800" <= char <= "\udfff" for char in value)
