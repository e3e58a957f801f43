"""Fields that OpenAI, its imitators and their clients know and this server does not act on.

A field is accepted at its neutral value, which means the same as no value, and refused by name otherwise: no wish of a
client is silently dropped. Harmless fields change nothing about an answer and may hold any value.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

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
}
"""Samplers of llama.cpp and Ollama, at the values that switch them off."""

OPTIONS_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "penalize_newline": (True,),
    "logits_all": (False,),
    "vocab_only": (False,),
    "embedding_only": (False,),
    **SAMPLERS_OFF,
}
"""Keys of Ollama's `options`, at the values that ask for nothing."""

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
    "verbosity": ("low", "medium", "high"),  # a hint
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
