"""Values that a front reads of a choice: pieces as they come, whole choices, and token counts."""

from __future__ import annotations

from dataclasses import dataclass, field

from ...core.messages import TokenLogprob
from ...text import TokenEntry
from ...text.events import Event

STOP, LENGTH, ABORT = "stop", "length", "abort"
"""Finish reasons; `abort` only where a request can be aborted by its id."""


@dataclass(slots=True)
class Piece:
    """New tokens of one choice, with their text.

    `tokens` include a stop token and end with the token that completed a stop string; `logprobs` has one entry for
    each, where requested. `entries` are log-probabilities aligned with `text`: a token's entry comes with its text.
    The first piece has the prompt's log-probabilities, from its second token on, where requested. The last piece has
    `finish_reason`, and the token or string that stopped the choice. `events` are its text as events, where the answer
    is read for reasoning or tool calls. `timed_out`: the request's own timeout ended the choice."""

    text: str = ""
    entries: tuple[TokenEntry, ...] = ()
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: str | None = None
    stop_token_id: int | None = None
    stop_string: str | None = None
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    events: tuple[Event, ...] = ()
    timed_out: bool = False

    @property
    def token_ids(self) -> tuple[int, ...]:
        """`tokens` without a stop token."""
        return self.tokens[:-1] if self.ends_with_stop_token else self.tokens

    @property
    def ends_with_stop_token(self) -> bool:
        """Whether the last of `tokens` is the stop token."""
        return self.stop_token_id is not None and self.tokens[-1:] == (self.stop_token_id,)


@dataclass(slots=True)
class WholeChoice:
    """All pieces of one choice, for answers that are sent at once."""

    text: list[str] = field(default_factory=list)
    entries: list[TokenEntry] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    finish_reason: str | None = None
    timed_out: bool = False
    stop_token_id: int | None = None
    stop_string: str | None = None

    def add(self, piece: Piece) -> None:
        self.text.append(piece.text)
        self.entries += piece.entries
        self.tokens += piece.tokens
        self.token_ids += piece.token_ids
        self.logprobs += piece.logprobs
        self.prompt_logprobs += piece.prompt_logprobs
        self.events += piece.events
        self.finish_reason = piece.finish_reason
        self.timed_out = piece.timed_out
        self.stop_token_id, self.stop_string = piece.stop_token_id, piece.stop_string


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of a whole request: each prompt once, the completions of all choices. `reasoning_tokens` are those
    of the completions that are reasoning; 0 where the answers are not read for it. `accepted_tokens` and
    `rejected_tokens` are draft tokens of a request with a prediction; None for others. Of prompts that were prefilled
    in part `scored_tokens` were scored, and `kept_tokens` are those of all prompts that were not left out; both None
    where nothing was scored."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    reasoning_tokens: int = 0
    accepted_tokens: int | None = None
    rejected_tokens: int | None = None
    scored_tokens: int | None = None
    kept_tokens: int | None = None

    @property
    def prompt_details(self) -> dict[str, int]:
        """Counts of prompts that were prefilled in part; empty where none was."""
        if self.scored_tokens is None or self.kept_tokens is None:
            return {}
        return {"scored_tokens": self.scored_tokens, "kept_tokens": self.kept_tokens}
