"""Echo of a prompt before its answer (`echo`), with its log-probabilities if requested."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, repeat
from typing import Any

from ....core.messages import TokenLogprob
from ....text import Detokenizer, TextView, TokenEntry
from ..echo import Echo
from .wire import legacy_logprobs


def echo_logprobs(echo: Echo, scores: Sequence[TokenLogprob], model: TextView, *, top: bool) -> dict[str, Any]:
    """Return the prompt's log-probabilities in the completions format. `scores` begin at the second token: the first
    has no predecessor and gets nulls. A request that was cut short has fewer."""
    scored = zip(echo.tokens[1:], scores, echo.offsets[1:], strict=False)
    rest = legacy_logprobs([TokenEntry(*one) for one in scored], model, top=top)
    first = {
        "tokens": [model.token_text(echo.tokens[0])],
        "token_logprobs": [None],
        "top_logprobs": [None] if top else None,
        "text_offset": [0],
    }
    return joined(first, rest)


def echo_text(text: str, tokens: Sequence[int], model: TextView, *, special: bool) -> Echo:
    """Return the echo of a text prompt; `special`: the tokenizer added its own tokens around it, which show no text."""
    added = len(model.prefix) if special and tuple(tokens[: len(model.prefix)]) == model.prefix else 0
    _, starts = _detokenized(tokens[added:], model, skip_special_tokens=False)
    return Echo(text, tokens, [min(start, len(text)) for start in chain(repeat(0, added), starts)])


def echo_ids(tokens: Sequence[int], model: TextView, *, skip_special_tokens: bool) -> Echo:
    """Return the echo of a prompt of token ids."""
    text, starts = _detokenized(tokens, model, skip_special_tokens=skip_special_tokens)
    return Echo(text, tokens, starts)


def joined(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """Concatenate two stretches of log-probabilities in the completions format."""
    return {name: None if values is None else [*values, *second[name]] for name, values in first.items()}


def _detokenized(tokens: Sequence[int], model: TextView, *, skip_special_tokens: bool) -> tuple[str, list[int]]:
    """Return the text of `tokens`, and the offset of each."""
    detokenizer = Detokenizer(model, skip_special_tokens=skip_special_tokens)
    texts: list[str] = []
    starts, length = [], 0
    for token in tokens:
        starts.append(length)
        texts.append(detokenizer.push((token,)))
        length += len(texts[-1])
    texts.append(detokenizer.finish())
    return "".join(texts), starts
