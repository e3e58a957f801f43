"""A prompt that is repeated before its answer (`echo`), with its log-probabilities where they were asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from typing import Any

from ....core.messages import TokenLogprob
from ....text import Detokenizer, TextView, TokenEntry
from .wire import legacy_logprobs


@dataclass(frozen=True)
class Echo:
    """One prompt as it is shown: `text`, and where in it the text of each of `tokens` begins, if it is scored."""

    text: str
    tokens: Sequence[int] = ()
    offsets: Sequence[int] = ()

    def logprobs(self, scores: Sequence[TokenLogprob], model: TextView, *, top: bool) -> dict[str, Any]:
        """The completions format. `scores` are of the second token on: nothing comes before the first, which gets
        nulls."""
        scored = zip(self.tokens[1:], scores, self.offsets[1:], strict=True)
        rest = legacy_logprobs([TokenEntry(*one) for one in scored], model, top=top)
        first = {
            "tokens": [model.token_text(self.tokens[0])],
            "token_logprobs": [None],
            "top_logprobs": [None] if top else None,
            "text_offset": [0],
        }
        return joined(first, rest)


def echo_text(text: str, tokens: Sequence[int], model: TextView, *, special: bool) -> Echo:
    """The echo of a prompt that came as text; `special`: the tokenizer put its own tokens around it, which show
    none."""
    added = len(model.prefix) if special and tuple(tokens[: len(model.prefix)]) == model.prefix else 0
    _, starts = _spelled(tokens[added:], model, skip_special_tokens=False)
    return Echo(text, tokens, [min(start, len(text)) for start in chain(repeat(0, added), starts)])


def echo_ids(tokens: Sequence[int], model: TextView, *, skip_special_tokens: bool) -> Echo:
    """The echo of a prompt that came as token ids."""
    text, starts = _spelled(tokens, model, skip_special_tokens=skip_special_tokens)
    return Echo(text, tokens, starts)


def joined(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """Two stretches of log-probabilities in the completions format as one."""
    return {name: None if values is None else [*values, *second[name]] for name, values in first.items()}


def _spelled(tokens: Sequence[int], model: TextView, *, skip_special_tokens: bool) -> tuple[str, list[int]]:
    """The text of `tokens`, and where each one's begins."""
    detokenizer = Detokenizer(model, skip_special_tokens=skip_special_tokens)
    texts: list[str] = []
    starts, length = [], 0
    for token in tokens:
        starts.append(length)
        texts.append(detokenizer.push((token,)))
        length += len(texts[-1])
    texts.append(detokenizer.finish())
    return "".join(texts), starts
