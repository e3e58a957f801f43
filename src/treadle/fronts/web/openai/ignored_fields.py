"""Fields that OpenAI, its imitators and their clients know and this server does not act on.

A field is accepted at its neutral value, which means the same as no value, and refused by name otherwise: no wish of a
client is silently dropped. Harmless fields change nothing about an answer and may hold any value.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ....errors import UnsupportedParameter

HARMLESS = (
    "user",
    "metadata",
    "store",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
    "prompt_cache_options",
    "keep_alive",  # Ollama: time that the model stays loaded; here always
    "ttl",  # LM Studio: the same
    "cache_prompt",  # llama.cpp: prompts are always cached, and answers do not depend on it
    "id_slot",  # llama.cpp: its slot to use
    "guided_decoding_backend",  # vLLM: the engine of its grammars
)

SAMPLERS_OFF: Mapping[str, tuple[Any, ...]] = {
    "typical_p": (1,),
    "tfs_z": (1,),
    "mirostat": (0,),
    "dry_multiplier": (0,),
    "xtc_probability": (0,),
    "dynatemp_range": (0,),
    "repeat_last_n": (-1,),
}
"""Samplers of llama.cpp and Ollama, at the values that switch them off. The repetition penalty looks at all tokens."""

SHARED_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "include_stop_str_in_output": (False,),
    "spaces_between_special_tokens": (True,),
    "prompt_logprobs": (),
    "return_tokens_as_token_ids": (False,),
    **SAMPLERS_OFF,
}

CHAT_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "verbosity": ("medium",),
    "web_search_options": (),
    "moderation": (),
    "echo": (False,),
    "chat_template": (),
    "documents": ([],),
    **SHARED_NEUTRAL,
}

COMPLETION_NEUTRAL: Mapping[str, tuple[Any, ...]] = {"suffix": ("",), **SHARED_NEUTRAL}

OPTIONS_HARMLESS = (
    "num_keep",
    "num_batch",
    "num_gpu",
    "main_gpu",
    "num_thread",
    "numa",
    "low_vram",
    "f16_kv",
    "use_mmap",
    "use_mlock",
    "mirostat_tau",
    "mirostat_eta",
)
"""Keys of Ollama's `options` that tune a server, or samplers that are refused unless they are off."""

HINTS = {
    "best_of": "answers are not ranked, n alone gives several; leave it out",
    "chat_template": "templates come from the server's operator, never from a request",
    "prompt_logprobs": "ask /v1/completions with echo and logprobs for a prompt's log-probabilities",
    "repeat_last_n": "the repetition penalty looks at all tokens; leave it out or send -1",
}


def refuse_beyond_neutral(given: Mapping[str, Any], neutral: Mapping[str, tuple[Any, ...]], prefix: str = "") -> None:
    """Raise UnsupportedParameter for the first field that is not neutral. `prefix` is put before its name."""
    for name, allowed_values in neutral.items():
        value = given.get(name)
        if value is not None and not any(_same(value, allowed) for allowed in allowed_values):
            hint = HINTS.get(name, f"leave it out{_or_neutral(allowed_values)}")
            raise UnsupportedParameter(f"{prefix}{name} is not supported here: {hint}", param=prefix + name)


def _same(value: Any, allowed: Any) -> bool:
    """Compare as JSON does: 1 is 1.0 and not true, also inside of arrays and objects."""
    if isinstance(value, dict) and isinstance(allowed, dict):
        return value.keys() == allowed.keys() and all(_same(value[key], allowed[key]) for key in value)
    if isinstance(value, list) and isinstance(allowed, list):
        return len(value) == len(allowed) and all(map(_same, value, allowed))
    return isinstance(value, bool) == isinstance(allowed, bool) and bool(value == allowed)


def _or_neutral(allowed_values: tuple[Any, ...]) -> str:
    return f" or send {' or '.join(map(_as_json, allowed_values))}" if allowed_values else ""


def _as_json(value: Any) -> str:
    return json.dumps(value)
