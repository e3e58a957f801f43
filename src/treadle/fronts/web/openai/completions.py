"""POST /v1/completions: its fields, prompts and answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ....errors import InvalidRequest
from ....text import TextView
from ....text.work.stages import TOKENIZING
from ...answer_options import AnswerOptions
from ...generation.pieces import Piece, Usage, WholeChoice
from ...output_fields import FIELDS as OUTPUT_FIELDS
from ...output_fields import read_output
from ...prepared import PreparedPrompts
from ...text_jobs import Enter, prepared_text
from ...validate import Limits, ValidatedRequest, check_prompt_ids
from ..echo import Echo
from ..neutral_fields import refuse_beyond_neutral
from ..parsed import Head
from ..parsing import read
from .echo import echo_ids, echo_logprobs, echo_text, joined
from .field_aliases import Renamed
from .ignored_fields import COMPLETION_NEUTRAL
from .parsed import ParsedOpenAi, outline_of, raw_params_of
from .schema import MAX_PROMPT_IDS, MAX_PROMPTS, CompletionFields, CompletionRequest
from .wire import ChunkWriter, encode, head_fields, legacy_logprobs, stop_reason, usage_json

if TYPE_CHECKING:
    from ....text import TextModel

ACTED_ON = frozenset(CompletionFields.model_fields) - {"prompt", *OUTPUT_FIELDS}
Prompt = str | Sequence[int]


class ParsedCompletion(ParsedOpenAi):
    """One completion request, parsed."""

    kind = "completion"
    id_prefix = "cmpl-"
    prompt_param = "prompt"

    def __init__(self, value: dict[str, Any]) -> None:
        refuse_beyond_neutral(value, COMPLETION_NEUTRAL)
        _check_counts(value.get("prompt"))
        body = read(CompletionRequest, value)
        super().__init__(body)
        given = self.given = Renamed(body)
        self.inputs = _prompts(body)
        self.echo = bool(body.echo)
        self.options = AnswerOptions(output=read_output(value, close_at_limit=bool(body.close_at_limit)))
        self.add_special_tokens = body.add_special_tokens is not False
        scores = body.logprobs if self.echo else None
        self.params = raw_params_of(
            body, given, max_tokens=given["max_tokens"], logprobs=body.logprobs, prompt_logprobs=scores
        )
        self.least_tokens = 0
        self.spellings = {"prompt_logprobs": "logprobs", **given.names}

    @property
    def prompts(self) -> int:
        return len(self.inputs)

    def check_against(self, limits: Limits) -> ValidatedRequest:
        for prompt in self.inputs:
            if not isinstance(prompt, str):
                check_prompt_ids(prompt, limits)
        return super().check_against(limits)

    def _size(self, model: TextView) -> int:
        ids = sum(len(prompt) for prompt in self.inputs if not isinstance(prompt, str))
        return ids + self.tokens_of(sum(len(p.encode()) for p in self.inputs if isinstance(p, str)), model)

    def tokenize(self, model: TextModel, enter: Enter, most: int) -> PreparedPrompts:
        enter(TOKENIZING)
        prompts = [self._ids(prompt, model, most) for prompt in self.inputs]
        if self.echo:
            self.echoes = [self._echo(*both, model) for both in zip(self.inputs, prompts, strict=True)]
        return PreparedPrompts(prompts, prepared_text(model, self.options, enter, prompts))

    def outline(self, value: dict[str, Any]) -> dict[str, Any]:
        return outline_of(value, ACTED_ON, {"prompt": ["x"] * self.prompts})

    def _ids(self, prompt: Prompt, model: TextModel, most: int) -> Sequence[int]:
        if not isinstance(prompt, str):
            return prompt
        return model.encode(prompt, add_special_tokens=self.add_special_tokens, most=most)

    # Answers -----------------------------------------------------------------------------------------------------

    def chunks(self, head: Head) -> ChunkWriter:
        return ChunkWriter(head, "text_completion", with_usage=self.include_usage)

    def first_events(self, writer: ChunkWriter, index: int, piece: Piece, model: TextView) -> bytes:
        if not self.echo:
            return b""
        echo = self._echo_of(index)
        choice = {"index": index, "text": echo.text, "logprobs": self._echoed_logprobs(echo, piece, model)}
        return writer.choice(choice | {"finish_reason": None})

    def events(self, writer: ChunkWriter, index: int, piece: Piece, model: TextView) -> bytes:
        if not (piece.text or piece.entries or piece.finish_reason or (self.return_token_ids and piece.token_ids)):
            return b""
        return writer.choice(self._choice(index, piece.text, piece, model))

    def whole(self, head: Head, choices: Sequence[WholeChoice], usage: Usage, model: TextView) -> bytes:
        answer = head_fields(head, "text_completion")
        answer["choices"] = [self._whole_choice(i, choice, model) for i, choice in enumerate(choices)]
        answer["usage"] = usage_json(usage)
        return encode(answer)

    def _whole_choice(self, index: int, choice: WholeChoice, model: TextView) -> dict[str, Any]:
        text = "".join(choice.text)
        if not self.echo:
            return self._choice(index, text, choice, model)
        echo = self._echo_of(index)
        whole = self._choice(index, echo.text + text, choice, model)
        before = self._echoed_logprobs(echo, choice, model)
        return whole if before is None else whole | {"logprobs": joined(before, whole["logprobs"])}

    def _choice(self, index: int, text: str, part: Piece | WholeChoice, model: TextView) -> dict[str, Any]:
        top = self.params.logprobs
        offset = len(self._echo_of(index).text) if self.echo else 0
        logprobs = None if top is None else legacy_logprobs(part.entries, model, top=top > 0, offset=offset)
        choice = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": part.finish_reason}
        choice |= stop_reason(part)
        return choice | {"token_ids": part.token_ids} if self.return_token_ids else choice

    # The prompt before the answer --------------------------------------------------------------------------------

    def _echo(self, prompt: Prompt, ids: Sequence[int], model: TextView) -> Echo:
        if isinstance(prompt, str):
            scored = self.params.prompt_logprobs is not None
            return echo_text(prompt, ids, model, special=self.add_special_tokens) if scored else Echo(prompt)
        return echo_ids(ids, model, skip_special_tokens=self.skip_special_tokens)

    def _echo_of(self, index: int) -> Echo:
        return self.echoes[index // (self.params.n or 1)]

    def _echoed_logprobs(self, echo: Echo, part: Piece | WholeChoice, model: TextView) -> dict[str, Any] | None:
        top = self.params.prompt_logprobs
        return None if top is None else echo_logprobs(echo, part.prompt_logprobs, model, top=top > 0)


def _check_counts(prompt: Any) -> None:
    """Raise InvalidRequest for too many prompts or ids, before each is read."""
    if not isinstance(prompt, list):
        return
    ids = bool(prompt) and isinstance(prompt[0], int)
    most, what = (MAX_PROMPT_IDS, "token ids") if ids else (MAX_PROMPTS, "prompts")
    if len(prompt) > most:
        raise InvalidRequest(f"prompt has {len(prompt)} {what}: give at most {most}", param="prompt")


def _prompts(body: CompletionFields) -> list[Prompt]:
    """Return the prompts of each form as a list. Raises InvalidRequest."""
    given: Any = body.prompt
    prompts: list[Prompt] = [given] if isinstance(given, str) or (given and isinstance(given[0], int)) else list(given)
    if not prompts:
        raise InvalidRequest("prompt is empty: give at least one", param="prompt")
    for i, prompt in enumerate(prompts):
        if not prompt:
            at = "prompt" if len(prompts) == 1 else f"prompt[{i}]"
            raise InvalidRequest(f"{at} is empty: give at least one character or token", param="prompt")
    return prompts
