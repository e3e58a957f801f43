"""Validation of generation requests, for every front: from a client's parameters to sequences for the engine.

Pure: no web framework, no gRPC. `check` needs the request alone and runs before anything is reserved; `build_submits`
follows once the prompts are token ids. Every refusal names the field, its value, and a value that would do.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from ..core.messages import Image, Sampling, Submit
from ..errors import ContextLengthExceeded, InvalidRequest, beyond_context
from .cache_salts import check_cache_salt
from .prepared import NOTHING, Prepared
from .value_checks import check_flag, check_number, check_sequence, check_token_id, check_whole, shown

MAX_N = 128
MAX_STOPS = 16
MAX_STOP_CHARS = 1024
MAX_STOP_TOKEN_IDS = 256
MAX_LOGIT_BIAS = 1024
MAX_TOP_LOGPROBS = 20
MAX_PRIORITY = 1000
MAX_PROMPT_SCORES = 1_000_000  # they are kept until the first token comes
MAX_TOKENS = 2**31 - 1
MAX_TIMEOUT_S = 2**31 - 1
HOPELESS = 16
GREEDY_BELOW = 1e-4  # a temperature this small only overflows: it is greedy
LEAST_REPETITION_PENALTY = 1e-6  # a smaller one overflows, and picks the same tokens
SEED_STRIDE = 0x9E3779B97F4A7C15


@dataclass(frozen=True, kw_only=True)
class RawParams:
    """Parameters as a client sent them; None for those it did not send."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Mapping[Any, float] | None = None
    seed: int | None = None
    n: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    stop: Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    priority: int | None = None
    timeout: float | None = None
    cache_salt: str | None = None
    speculate: bool | None = None
    spec_prefill: bool | None = None


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of the model and the settings. `max_tokens` caps one completion; None: the context alone does.

    `sampling` holds the model's default parameters, by the names of `RawParams`. `grammars`: constraints are enforced.
    `no_images`: the reason why no images are read; "" where they are.
    `spec_prefill`: long prompts may be prefilled in part.
    """

    vocabulary: int
    context: int
    max_tokens: int | None = None
    eos_token_ids: Collection[int] = ()
    sampling: Mapping[str, float] = field(default_factory=dict)
    grammars: bool = True
    no_images: str = ""
    spec_prefill: bool = False

    @property
    def countable(self) -> Limits:
        """The limits of prompts whose tokens are only counted, or some turns of which are left out: these may be
        HOPELESS times as long."""
        return replace(self, context=HOPELESS * self.context)


@dataclass(frozen=True, kw_only=True)
class ValidatedRequest:
    """A request whose every parameter is in range. `max_tokens` None: as many as the cap and the context leave; 0: the
    prompt alone is computed. `completion_cap` is a limit that may exceed the server's cap and the context: the smallest
    counts. `ignore_eos`: nothing of the model's own ends the answer. `as_many_as_fit`: tokens beyond the context are
    cut, not refused. `timeout_s`: the time from the request's arrival to the end of its answers."""

    sampling: Sampling
    seed: int | None
    n: int
    max_tokens: int | None
    min_tokens: int
    stop: tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    ignore_eos: bool
    logprobs: int | None
    prompt_logprobs: int | None
    priority: int
    cache_salt: str | None
    speculate: bool = True
    spec_prefill: bool | None = None
    timeout_s: float | None = None
    as_many_as_fit: bool = False
    completion_cap: int | None = None

    @property
    def completion_limit(self) -> int | None:
        """Tokens that one answer has at most; None where only the context and the server's cap limit it."""
        return self.max_tokens if self.completion_cap is None else self.completion_cap

    @property
    def least_tokens(self) -> int:
        """Tokens that one answer has at least: all of `max_tokens` where nothing may end it earlier."""
        whole = self.ignore_eos and not self.stop and not self.stop_token_ids
        return max(self.min_tokens, self.max_tokens or 0) if whole else self.min_tokens


def check(
    params: RawParams, limits: Limits, *, least_tokens: int = 1, as_many_as_fit: bool = False
) -> ValidatedRequest:
    """Return the parameters, in range and with defaults. `least_tokens` is 0 where an answer may be the prompt
    alone. With `as_many_as_fit`, `max_tokens` and `min_tokens` are cut to what the context leaves, where they would be
    refused otherwise. Raises InvalidRequest with the field in `param`."""
    max_tokens = _max_tokens(params.max_tokens, limits, least_tokens, as_many_as_fit)
    most = min(limits.context, limits.max_tokens or limits.context) if max_tokens is None else max_tokens
    top = min(MAX_TOP_LOGPROBS, limits.vocabulary)
    return ValidatedRequest(
        sampling=_sampling(params, limits),
        seed=check_whole("seed", params.seed, -(2**63), 2**63 - 1),
        n=check_whole("n", params.n, 1, MAX_N) or 1,
        max_tokens=max_tokens,
        min_tokens=check_whole("min_tokens", params.min_tokens, 0, MAX_TOKENS if as_many_as_fit else most) or 0,
        stop=_stop(() if params.stop is None else params.stop),
        stop_token_ids=_stop_token_ids(params, limits),
        ignore_eos=bool(params.ignore_eos),
        logprobs=check_whole("logprobs", params.logprobs, 0, top),
        prompt_logprobs=check_whole("prompt_logprobs", params.prompt_logprobs, 0, top),
        priority=check_whole("priority", params.priority, -MAX_PRIORITY, MAX_PRIORITY) or 0,
        cache_salt=check_cache_salt(params.cache_salt),
        speculate=check_flag("speculate", params.speculate) is not False,
        spec_prefill=_spec_prefill(params, limits),
        as_many_as_fit=as_many_as_fit,
        timeout_s=check_number("timeout", params.timeout, 0.0, MAX_TIMEOUT_S, above=True),
    )


def _spec_prefill(params: RawParams, limits: Limits) -> bool | None:
    """Return whether a long prompt may be prefilled in part; None where the request does not say."""
    given = check_flag("spec_prefill", params.spec_prefill)
    if given and not limits.spec_prefill:
        raise InvalidRequest(
            "spec_prefill is true, and the server has no model that scores prompts: leave it out, or start the server "
            "with --spec-prefill",
            param="spec_prefill",
        )
    if given and params.prompt_logprobs is not None:
        raise InvalidRequest(
            "spec_prefill leaves out a part of the prompt, and log-probabilities of all of its tokens are asked for: "
            "give one of them",
            param="spec_prefill",
        )
    return given


def check_prompt_ids(prompt: Sequence[int], limits: Limits, param: str = "prompt") -> None:
    """Check token ids that a client sent: at least one, all within the vocabulary. Raises InvalidRequest."""
    if not prompt:
        raise InvalidRequest(f"{param} is empty: give at least one token", param=param)
    for wrong in (min(prompt), max(prompt)):
        if not 0 <= wrong < limits.vocabulary:
            raise InvalidRequest(
                f"{param} has the token id {shown(wrong)}: ids of this model are 0 to {limits.vocabulary - 1}",
                param=param,
            )


def check_size(estimate: int, prompts: int, limits: Limits, param: str = "prompt") -> None:
    """Refuse prompts that are far too long before they are tokenized. `estimate` is in tokens, over all prompts.

    Raises ContextLengthExceeded only beyond doubt: texts average a sixteenth of the usual tokens in no language.
    """
    if estimate > HOPELESS * limits.context * prompts:
        error = prompt_beyond(limits.context, f"about {estimate // prompts}", param)
        error.prompt_tokens, error.context = estimate // prompts, limits.context
        raise error


def completion_budget(validated: ValidatedRequest, prompt_tokens: int, limits: Limits, param: str = "prompt") -> int:
    """Return how many tokens may follow a prompt of this length. Raises ContextLengthExceeded when they do not fit,
    InvalidRequest when `completion_cap` allows fewer than `min_tokens`."""
    left = limits.context - prompt_tokens
    if left < (0 if validated.max_tokens == 0 else 1):
        raise too_long(prompt_tokens, limits, param)
    if validated.max_tokens is None:
        left = min(left, limits.max_tokens or left)
        if validated.min_tokens > left and not validated.as_many_as_fit:
            raise ContextLengthExceeded(
                f"min_tokens is {validated.min_tokens} and {left} tokens are left: ask for fewer", param="min_tokens"
            )
        return left if validated.completion_cap is None else _capped(validated, left, validated.completion_cap)
    if validated.max_tokens > left and not validated.as_many_as_fit:
        raise ContextLengthExceeded(
            beyond_context(
                limits.context,
                f"you requested {prompt_tokens + validated.max_tokens} tokens ({prompt_tokens} in the messages, "
                f"{validated.max_tokens} in the completion). Please reduce the length of the messages or completion. "
                f"Behind this prompt, max_tokens may be at most {left}.",
            ),
            param="max_tokens",
        )
    return min(validated.max_tokens, left)


def too_long(prompt_tokens: int, limits: Limits, param: str = "prompt") -> ContextLengthExceeded:
    """Return the refusal of a prompt that leaves no token for the answer."""
    hint = "The context must also hold at least one token of the answer."
    error = prompt_beyond(limits.context, str(prompt_tokens), param, hint)
    error.prompt_tokens, error.context = prompt_tokens, limits.context
    return error


def prompt_beyond(context: int, tokens: str, param: str, hint: str = "") -> ContextLengthExceeded:
    """Return the refusal of a prompt for which `context` is too short. `tokens` is the number of its tokens, maybe in
    words."""
    excess = f"your messages resulted in {tokens} tokens. Please reduce the length of the messages."
    return ContextLengthExceeded(beyond_context(context, f"{excess} {hint}".rstrip()), param=param)


def build_submits(
    validated: ValidatedRequest,
    prompts: Sequence[Sequence[int]],
    limits: Limits,
    draw_seed: Callable[[], int],
    param: str = "prompt",
    *,
    salt: str = "",
    prepared: Prepared = NOTHING,
    images: Sequence[tuple[Image, ...]] = (),
) -> list[Submit]:
    """Return one Submit for each choice of each prompt: all choices of the first prompt, then of the second. Their
    prompts are cached under `salt`; all get the constraint, the thinking and the prediction of `prepared`, a constraint
    that is optional only where the engine enforces any. `images` are those of each prompt.

    A given seed makes choice i of a prompt the same whatever other prompts are in the request. Raises InvalidRequest
    for empty prompts or foreign ids and ContextLengthExceeded for what does not fit.
    """
    _check_scores(validated, sum(map(len, prompts)))
    if prepared.optional and not limits.grammars:
        prepared = prepared.without_constraint()
    submits = []
    for place, prompt in enumerate(prompts):
        thinking = None if place in prepared.answering else prepared.thinking
        check_prompt_ids(prompt, limits, param)
        max_tokens = completion_budget(validated, len(prompt), limits, param)
        ids = tuple(prompt)
        for choice in range(validated.n):
            seed = draw_seed() if validated.seed is None else validated.seed + choice * SEED_STRIDE
            submits.append(
                Submit(
                    id="",
                    prompt=ids,
                    max_tokens=max_tokens,
                    sampling=msgspec.structs.replace(validated.sampling, seed=seed & (2**63 - 1)),
                    stop_token_ids=validated.stop_token_ids,
                    min_tokens=min(validated.min_tokens, max_tokens),
                    logprobs=validated.logprobs,
                    prompt_logprobs=validated.prompt_logprobs,
                    salt=salt,
                    priority=validated.priority,
                    constraint=prepared.constraint,
                    thinking=thinking,
                    speculate=validated.speculate,
                    prediction=prepared.prediction,
                    images=images[place] if images else (),
                    sparse_prefill=validated.spec_prefill,
                )
            )
    return submits


@contextlib.contextmanager
def rename_params(spellings: Mapping[str, str]) -> Iterator[None]:
    """Let refusals in the block name fields as the client did: `spellings` maps our names to the client's."""
    try:
        yield
    except InvalidRequest as error:
        name = error.param or ""
        if name not in spellings:
            raise
        spelling = spellings[name]
        raise type(error)(error.message.replace(name, spelling), param=spelling) from None


# Single fields --------------------------------------------------------------------------------------------------


def _sampling(params: RawParams, limits: Limits) -> Sampling:
    def value(name: str, default: float, low: float, high: float, *, above: bool = False) -> float:
        given = getattr(params, name)
        chosen = check_number(name, given, low, high, above=above)
        return float(limits.sampling.get(name, default)) if chosen is None else chosen

    temperature = value("temperature", 1.0, 0.0, 2.0)
    top_k = check_whole("top_k", params.top_k, -1, 2**31 - 1)
    top_k = int(limits.sampling.get("top_k", 0)) if top_k is None else top_k
    return Sampling(
        temperature=0.0 if temperature < GREEDY_BELOW else temperature,
        top_p=value("top_p", 1.0, 0.0, 1.0, above=True),
        top_k=top_k if 0 < top_k < limits.vocabulary else 0,
        min_p=value("min_p", 0.0, 0.0, 1.0),
        repetition_penalty=max(LEAST_REPETITION_PENALTY, value("repetition_penalty", 1.0, 0.0, 10.0, above=True)),
        presence_penalty=value("presence_penalty", 0.0, -2.0, 2.0),
        frequency_penalty=value("frequency_penalty", 0.0, -2.0, 2.0),
        logit_bias=_logit_bias({} if params.logit_bias is None else params.logit_bias, limits),
    )


def _max_tokens(value: Any, limits: Limits, least: int, as_many_as_fit: bool) -> int | None:
    most = check_whole("max_tokens", value, least, MAX_TOKENS)
    if most is not None and limits.max_tokens is not None and most > limits.max_tokens:
        raise InvalidRequest(
            f"max_tokens is {most} and this server allows {limits.max_tokens}: ask for fewer, or leave it out",
            param="max_tokens",
        )
    if most is not None and most >= limits.context:
        if as_many_as_fit:
            return None
        raise ContextLengthExceeded(
            f"max_tokens is {most} and the model's context is {limits.context}, which must also hold the prompt: "
            "ask for fewer, or leave it out",
            param="max_tokens",
        )
    return most


def _capped(validated: ValidatedRequest, left: int, cap: int) -> int:
    most = min(cap, left)
    if validated.min_tokens > most:
        raise InvalidRequest(
            f"min_tokens is {validated.min_tokens} and the answer has at most {most} tokens: ask for fewer",
            param="min_tokens",
        )
    return most


def _check_scores(validated: ValidatedRequest, prompt_tokens: int) -> None:
    if validated.prompt_logprobs is None:
        return
    scores = prompt_tokens * (1 + validated.prompt_logprobs) * validated.n
    if scores > MAX_PROMPT_SCORES:
        raise InvalidRequest(
            f"prompt_logprobs of {prompt_tokens} prompt tokens would be {scores} numbers: ask for at most "
            f"{MAX_PROMPT_SCORES}, with fewer for each token or in several requests",
            param="prompt_logprobs",
        )


def _stop(stops: Sequence[str]) -> tuple[str, ...]:
    check_sequence("stop", stops, "a string, or a list of strings")
    if len(stops) > MAX_STOPS:
        raise InvalidRequest(f"stop has {len(stops)} strings: give at most {MAX_STOPS}", param="stop")
    for stop in stops:
        if not isinstance(stop, str) or not stop:
            raise InvalidRequest(
                "stop has an empty string: it would end every answer at once; leave it out", param="stop"
            )
        if len(stop) > MAX_STOP_CHARS:
            raise InvalidRequest(
                f"stop has a string of {len(stop)} characters: give at most {MAX_STOP_CHARS}", param="stop"
            )
    return tuple(dict.fromkeys(stops))


def _stop_token_ids(params: RawParams, limits: Limits) -> tuple[int, ...]:
    given = () if params.stop_token_ids is None else params.stop_token_ids
    check_sequence("stop_token_ids", given, "a list of token ids")
    if len(given) > MAX_STOP_TOKEN_IDS:
        raise InvalidRequest(
            f"stop_token_ids has {len(given)} ids: give at most {MAX_STOP_TOKEN_IDS}", param="stop_token_ids"
        )
    for token in given:
        check_token_id("stop_token_ids", token, limits.vocabulary)
    eos = () if params.ignore_eos else tuple(limits.eos_token_ids)
    return tuple(dict.fromkeys((*eos, *given)))


def _logit_bias(given: Mapping[Any, Any], limits: Limits) -> tuple[tuple[int, float], ...]:
    if not isinstance(given, Mapping):
        raise InvalidRequest(f"logit_bias is {shown(given)}: give token ids with numbers", param="logit_bias")
    if len(given) > MAX_LOGIT_BIAS:
        raise InvalidRequest(f"logit_bias has {len(given)} entries: give at most {MAX_LOGIT_BIAS}", param="logit_bias")
    pairs: dict[int, float] = {}
    for key, value in given.items():
        token = check_token_id("logit_bias", _bias_key(key), limits.vocabulary)
        bias = check_number(f"logit_bias[{token}]", value, -100.0, 100.0)
        if bias is None or token in pairs:
            raise InvalidRequest(f"logit_bias names token {token} without a number, or twice", param="logit_bias")
        pairs[token] = bias
    return tuple(pairs.items())


def _bias_key(key: Any) -> int:
    if isinstance(key, int) and not isinstance(key, bool):
        return key
    if isinstance(key, str) and len(key) <= 18 and key.isascii() and key.isdigit() and str(int(key)) == key:
        return int(key)
    raise InvalidRequest(
        f"logit_bias has the key {shown(key)}: keys are token ids, without leading zeros", param="logit_bias"
    )
