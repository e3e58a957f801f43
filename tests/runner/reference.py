"""What mlx-lm gives by itself, for one sequence alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from treadle.core.messages import Submit
from treadle.runner.loading.model import LoadedModel


def reference(model: LoadedModel, request: Submit, guess: Sequence[int] = ()) -> list[int]:
    """Greedy tokens of mlx-lm's own generation.

    A `guess` of all of them is right if the model, which reads prompt and guess as mlx-lm reads a prompt, has each of
    its tokens as the most likely one after those before. That is one pass; any other guess costs a pass a token.
    """
    if len(guess) == request.max_tokens and _greedy(model.module, request.prompt, guess):
        return list(guess)
    from mlx_lm.generate import generate_step

    steps: Any = generate_step(mx.array(request.prompt), model.module, max_tokens=request.max_tokens)
    return [int(token) for token, _ in steps]


def references(model: LoadedModel, some: Sequence[Submit], guesses: dict[str, list[int]]) -> dict[str, list[int]]:
    """The same for each of some requests, by id."""
    return {request.id: reference(model, request, guesses[request.id]) for request in some}


def _greedy(module: Any, prompt: Sequence[int], tokens: Sequence[int]) -> bool:
    from mlx_lm.models.cache import make_prompt_cache

    read = mx.array([[*prompt, *tokens[:-1]]])
    logits = module(read, cache=make_prompt_cache(module))[0, len(prompt) - 1 :]
    return bool(mx.array_equal(logits.argmax(axis=-1), mx.array([*tokens])).item())
