"""A Generate request of either wire, parsed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ...core.messages import TokenLogprob
from ...errors import InvalidRequest
from ...text import TextView
from ...text.images import ImageSource
from ..answer_options import AnswerOptions, OutputGrammar
from ..generation.prompts import IdsPrompt, Prompts, TextPrompt
from ..live_requests import MAX_REQUEST_ID_CHARS
from ..media.prompt import MediaPrompt
from ..media.service import RequestImages
from ..prepared import PreparedPrompts
from ..text_jobs import TextJobRunner, prepare_options
from ..validate import Limits, RawParams, ValidatedRequest, check

MAX_MESSAGE_BYTES = 4 * 1024 * 1024 - 64 * 1024


@dataclass(frozen=True, kw_only=True)
class RpcRequest:
    """One request. `prompt` is token ids, or text that is tokenized here. A `max_tokens` beyond what the context leaves
    means as much as it leaves: the gateway passes on its clients' values unchecked. `media` are images, for each of
    which the ids have one placeholder. The grammar `output` begins behind
    reasoning that the prompt leaves open, in a format with channels in that of the answer, or with
    `grammar_from_first_token` in any case with the first token."""

    request_id: str
    prompt: Sequence[int] | str
    params: RawParams
    max_tokens: int | None
    stream: bool
    skip_special_tokens: bool = True
    output: OutputGrammar | None = None
    grammar_from_first_token: bool = False
    media: tuple[ImageSource, ...] = ()

    def __post_init__(self) -> None:
        check_request_id(self.request_id)
        if not self.prompt:
            raise InvalidRequest("the prompt is empty: give at least one token", param="input")
        if self.max_tokens == 0:
            raise InvalidRequest("max_tokens is 0: ask for at least 1, or leave it out", param="max_tokens")

    def prompts(self, images: RequestImages | None = None) -> Prompts:
        """The prompt, whose scores must fit one message. `images` prepares those in it."""
        inner: Prompts = TextPrompt(self.prompt, "input") if isinstance(self.prompt, str) else self._ids(images)
        return _RpcPrompt(inner, AnswerOptions(output=self.output), self.grammar_from_first_token)

    def _ids(self, images: RequestImages | None) -> IdsPrompt | MediaPrompt:
        assert not isinstance(self.prompt, str)
        if not self.media:
            return IdsPrompt(self.prompt, "input")
        return MediaPrompt(self.prompt, self.media, images)

    def check(self, limits: Limits) -> ValidatedRequest:
        """Validate the parameters. Raises InvalidRequest."""
        return replace(check(self.params, limits), completion_cap=self.max_tokens)


@dataclass(frozen=True)
class _RpcPrompt:
    """One prompt, and the grammar of its answers. With log-probabilities it must be short enough for them to fit one
    message."""

    inner: Prompts
    options: AnswerOptions
    grammar_from_first_token: bool

    @property
    def param(self) -> str:
        return self.inner.param

    def __len__(self) -> int:
        return 1

    def size(self, text: TextView, limits: Limits) -> int:
        return self.inner.size(text, limits)

    async def tokenize(
        self, pool: TextJobRunner, params: ValidatedRequest, limits: Limits, tenant: str
    ) -> PreparedPrompts:
        prompts = await self.inner.tokenize(pool, params, limits, tenant)
        try:
            return await self._prepared(prompts, pool, params, limits, tenant)
        except BaseException:
            if prompts.held is not None:
                prompts.held.release()
            raise

    async def _prepared(
        self, prompts: PreparedPrompts, pool: TextJobRunner, params: ValidatedRequest, limits: Limits, tenant: str
    ) -> PreparedPrompts:
        (prompt,) = prompts.ids
        scores = params.prompt_logprobs
        if scores is not None and message_bytes_of(len(prompt), scores) > MAX_MESSAGE_BYTES:
            raise InvalidRequest(
                f"the prompt has {len(prompt)} tokens, whose log-probabilities do not fit one message of 4 MiB: ask "
                "for fewer, or send a shorter prompt",
                param="prompt_logprobs",
            )
        opening = () if self.grammar_from_first_token else prompt
        prepared = await prepare_options(pool, self.options, limits, tenant, opening, rendered=True)
        return replace(prompts, prepared=prepared)


def check_request_id(request_id: str) -> None:
    """Raise InvalidRequest for an id that is empty or too long."""
    if not request_id:
        raise InvalidRequest("request_id is empty: give each request its own", param="request_id")
    if len(request_id) > MAX_REQUEST_ID_CHARS:
        raise InvalidRequest(
            f"request_id has {len(request_id)} characters: give at most {MAX_REQUEST_ID_CHARS}", param="request_id"
        )


def check_answer_bytes(tokens: Sequence[int], scores: Sequence[TokenLogprob], params: ValidatedRequest) -> None:
    """Raise InvalidRequest where an answer of `tokens`, with the prompt's `scores`, does not fit one message."""
    size = message_bytes_of(len(tokens), params.logprobs)
    if size + message_bytes_of(len(scores), params.prompt_logprobs) > MAX_MESSAGE_BYTES:
        raise InvalidRequest(
            f"the answer has {len(tokens)} tokens, which with their log-probabilities do not fit one "
            "message of 4 MiB: stream it, or ask for fewer tokens or log-probabilities",
            param="logprobs",
        )


def message_bytes_of(tokens: int, logprobs: int | None) -> int:
    """The most bytes that `tokens` with `logprobs` log-probabilities each take in a message."""
    return tokens * (5 if logprobs is None else 5 + 12 + 10 * logprobs)
