"""Fields that OpenAI and its imitators know and this server does not act on.

A field is taken at its neutral value, where leaving it out means the same, and refused by name otherwise: nothing a
client asks for is silently dropped. Harmless fields change nothing about an answer and may hold what they like.
"""

from __future__ import annotations

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
)

CHAT_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "reasoning_effort": (),
    "verbosity": ("medium",),
    "web_search_options": (),
    "moderation": (),
    "service_tier": ("auto", "default"),
    "best_of": (1,),
    "echo": (False,),
    "use_beam_search": (False,),
    "length_penalty": (1, 1.0),
    "include_stop_str_in_output": (False,),
    "spaces_between_special_tokens": (True,),
    "prompt_logprobs": (),
    "return_tokens_as_token_ids": (False,),
    "chat_template": (),
    "documents": ([],),
}

COMPLETION_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "suffix": ("",),
    **{
        name: CHAT_NEUTRAL[name]
        for name in (
            "response_format",
            "service_tier",
            "use_beam_search",
            "length_penalty",
            "include_stop_str_in_output",
            "spaces_between_special_tokens",
            "prompt_logprobs",
            "return_tokens_as_token_ids",
        )
    },
}

HINTS = {
    "chat_template": "templates come from the server's operator, never from a request",
    "prompt_logprobs": "ask /v1/completions with echo and logprobs for a prompt's log-probabilities",
    "reasoning_effort": "give what the model's template knows in chat_template_kwargs",
}


def refuse_beyond_neutral(given: Mapping[str, Any], neutral: Mapping[str, tuple[Any, ...]]) -> None:
    """Raises UnsupportedParameter for the first field that asks for something."""
    for name, fine in neutral.items():
        value = given.get(name)
        if value is not None and not any(_same(value, allowed) for allowed in fine):
            hint = HINTS.get(name, f"leave it out{_or_neutral(fine)}")
            raise UnsupportedParameter(f"{name} is not supported here: {hint}", param=name)


def _same(value: Any, allowed: Any) -> bool:
    return isinstance(value, bool) == isinstance(allowed, bool) and bool(value == allowed)


def _or_neutral(fine: tuple[Any, ...]) -> str:
    return f" or send {' or '.join(repr(value) for value in fine)}" if fine else ""
