"""Options of other servers (vLLM, SGLang, llama.cpp, mlx-lm) and their equivalents here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

_CONTEXT, _RUNNING = "use --context", "use --max-running"
_ON = "prefixes are cached by default, leave it out"

CURES: Mapping[str, str] = {
    "--model": "the model is an argument: {command} {value}",
    "--model-path": "the model is an argument: {command} {value}",
    "-m": "the model is an argument: {command} {value}",
    "--max-model-len": _CONTEXT,
    "--context-length": _CONTEXT,
    "--ctx-size": _CONTEXT,
    "--n-ctx": _CONTEXT,
    "-c": _CONTEXT,
    "--max-num-seqs": _RUNNING,
    "--max-seqs": _RUNNING,
    "--max-running-requests": _RUNNING,
    "--parallel": _RUNNING,
    "-np": _RUNNING,
    "--gpu-memory-utilization": "use --memory with the size of the KV cache, such as 8GiB",
    "--mem-fraction-static": "use --memory with the size of the KV cache, such as 8GiB",
    "--max-num-batched-tokens": "use --prefill-tokens",
    "--chunked-prefill-size": "use --prefill-tokens",
    "--speculative-config": "use --speculate, and --draft for a draft model",
    "--speculative-algorithm": "use --speculate, such as --speculate mtp",
    "--speculative-draft-model-path": "use --draft",
    "--speculative-model": "use --draft",
    "--draft-model": "use --draft",
    "--enable-prefix-caching": _ON,
    "--no-enable-prefix-caching": "use --no-prefix-cache",
    "--disable-radix-cache": "use --no-prefix-cache",
}


def cure(refused: str, words: Sequence[str], command: str) -> str:
    """Return the replacement of the first option of another server among the command line's `words`; empty if there is
    none. `refused` is the option, or the beginning of it, that `command` does not have."""
    for word, following in zip(words, [*words[1:], ""], strict=True):
        flag, _, value = word.partition("=")
        if flag in CURES and flag.startswith(refused):
            given = value or ("" if following.startswith("-") else following) or "MODEL"
            return f"{flag} is an option of other servers: {CURES[flag].format(command=command, value=given)}"
    return ""
