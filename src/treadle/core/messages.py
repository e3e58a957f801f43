"""Messages between fronts and owner: frozen structs of plain values.

To the owner: Submit, Cancel, RunJob, CancelJob, WatchBlocks, Ping, Stop.
From the owner: Loading, Ready, Failed, StepReport, JobDone, Pong, Stopped.

Each struct is tagged, so one decoder per direction reads a whole stream of them (see `engine/framing.py`).
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any

import msgspec

from .capabilities import Capabilities
from .image import Image as Image
from .pooling import Pooling as Pooling
from .statistics import EngineStatistics


class Message(msgspec.Struct, frozen=True, omit_defaults=True):
    """Base class of all messages: immutable plain values."""


# To the owner -------------------------------------------------------------------------------------------------


class Sampling(Message, frozen=True):
    """Sampling parameters of one request. The defaults are greedy and change nothing.

    `temperature` 0 is greedy. `top_p` 1, `top_k` 0, `min_p` 0, `repetition_penalty` 1 and the other penalties 0 are
    off. `logit_bias` pairs a token id with what is added to its logit. `seed` makes the sequence reproducible
    whatever else is in the batch; the front draws one where the client gave none.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int = 0


class Constraint(Message, frozen=True):
    """A grammar that generated tokens follow.

    `grammar` is a grammar of llguidance, as text: Lark, or the JSON that `LLMatcher.grammar_from_json_schema` and its
    siblings return. `kind` names its origin for status and metrics, such as "json_schema", "regex" or "tool".

    Without `triggers` it holds from the first token behind the reasoning. With them tokens are free until one of these
    texts was generated; the grammar begins with that text. When the grammar is complete and nothing can follow, only a
    stop token may; with `then_free` the sequence is free again instead, until the next trigger. `close_at_limit`:
    where `max_tokens` comes near, only tokens are allowed that complete the grammar in time. `param` is the request's
    field that asked for it, for errors.
    """

    kind: str
    grammar: str
    triggers: tuple[str, ...] = ()
    then_free: bool = False
    close_at_limit: bool = False
    param: str = ""


class Thinking(Message, frozen=True):
    """The reasoning of a sequence: it stands between the token ids `open_ids` and `close_ids`, and begins open where
    the prompt ends with `open_ids` (`opened`). After `budget` tokens of reasoning `close_ids` are forced (None: no
    limit). A constraint begins behind `close_ids`, or with the first token where no reasoning begins. With `reopens`
    more reasoning may begin anywhere in front of a constraint, and counts towards the same budget."""

    open_ids: tuple[int, ...]
    close_ids: tuple[int, ...]
    opened: bool = False
    budget: int | None = None
    reopens: bool = False


class Submit(Message, frozen=True, tag=True):
    """One sequence to generate, or to pool.

    `id` is unique among everything the engine has not finished. `prompt` are token ids, at least one. `max_tokens`
    already fits the context; 0 only computes the prompt, for its log-probabilities. `stop_token_ids` end the sequence
    (the token counts, and is reported as matched), and cannot be sampled before `min_tokens` tokens were. `logprobs` is
    None for none, or how many of the top tokens come with each chosen one (0: the chosen one alone); `prompt_logprobs`
    is the same for every prompt token but the first. What is cached of a prompt is reused by requests of the same
    `salt` only. `max_wait_s` bounds the time from arrival to admission. Sequences of one client request share a
    `group`: once one of them runs, the others' waits do not end. A lower `priority` goes first; within a priority the
    `tenant` with the fewest running rows does. `arrival` numbers sequences in the order in which they came, from 1, and
    stays when one is replayed: of one priority, the lower has the better claim to memory. 0 where there is no number:
    then they count in the order in which they are sent. `constraint` and `thinking` limit the tokens that can be
    sampled; they count in `generated` ones too. With `pooling`, and `max_tokens` 0, it ends with a vector: the pooled
    hidden states of its whole prompt (`Finish.vector`). With `speculate` its tokens may be drafted, which changes none
    of them; `prediction` are tokens that the client expects in the answer, a source of drafts; None where it says
    nothing. `sparse_prefill` false prefills the whole prompt where the engine has SpecPrefill; true asks for it.
    `images` are those of the prompt, in its order.

    A replayed sequence ran in an earlier life of the engine, or another one of its group did: `resumed` is true,
    `generated` are the tokens that it gained then, `scored` counts the prompt log-probabilities that were told. It goes
    on from there like a preempted one: `max_tokens`, `min_tokens`, penalties and draws count from the first generated
    token, and no token and no log-probability is told again; its admission and `cached_tokens` are. It waits before all
    others, for as long as it takes.
    """

    id: str
    prompt: tuple[int, ...]
    max_tokens: int
    sampling: Sampling = Sampling()
    stop_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    salt: str = ""
    priority: int = 0
    max_wait_s: float = 0.0
    group: str = ""
    tenant: str = ""
    arrival: int = 0
    constraint: Constraint | None = None
    thinking: Thinking | None = None
    pooling: Pooling | None = None
    speculate: bool = True
    prediction: tuple[int, ...] | None = None
    sparse_prefill: bool | None = None
    images: tuple[Image, ...] = ()
    generated: tuple[int, ...] = ()
    scored: int = 0
    resumed: bool = False

    @property
    def computes_whole_prompt(self) -> bool:
        """Whether results of each prompt token are needed, so that no cached ones are reused."""
        return self.prompt_logprobs is not None or self.pooling in (Pooling.MEAN, Pooling.CLS)


class CancelReason(StrEnum):
    """Reason for a cancel."""

    CLIENT = "client"  # the client left or asked for it
    STOP = "stop"  # the front found a stop string: a good end
    STALLED = "stalled"  # the client no longer reads
    SHUTDOWN = "shutdown"


class Cancel(Message, frozen=True, tag=True):
    """Cancel one sequence. Idempotent; an unknown id is remembered for a while, in case its Submit comes later."""

    id: str
    reason: CancelReason = CancelReason.CLIENT


class RunJob(Message, frozen=True, tag=True):
    """Run a named job on the owner, between steps. `args` are plain values."""

    id: str
    name: str
    args: dict[str, Any] = {}


class CancelJob(Message, frozen=True, tag=True):
    """Ask a job to stop at its next check."""

    id: str


class WatchBlocks(Message, frozen=True, tag=True):
    """Report the events of the cached blocks of one salt, or with `on` false no longer: BlocksCleared, a BlockStored
    for each block that is there, then each change. For a salt that is watched already it starts anew."""

    salt: str
    on: bool = True


class Ping(Message, frozen=True, tag=True):
    """Ask the owner for a Pong between two steps. An idle owner sends nothing by itself."""


class Stop(Message, frozen=True, tag=True):
    """End the owner. Every live sequence gets its terminal event first."""


ToOwner = Submit | Cancel | RunJob | CancelJob | WatchBlocks | Ping | Stop


# From the owner -----------------------------------------------------------------------------------------------


class FinishReason(StrEnum):
    """Reason of the terminal event of a sequence."""

    STOP = "stop"  # a stop token, or a stop string found in front
    LENGTH = "length"
    CANCELLED = "cancelled"
    EXPIRED = "expired"  # waited longer than it may
    ERROR = "error"


class Finish(Message, frozen=True):
    """End of a sequence. `code` and `message` belong to ERROR, `stop_token_id` to STOP by a token. `vector` is the
    result of one with `pooling`: float32 in the machine's byte order, not normalized."""

    reason: FinishReason
    stop_token_id: int | None = None
    code: str = ""
    message: str = ""
    vector: bytes = b""


class TokenLogprob(Message, frozen=True):
    """Natural-log probabilities at one position, from the model's raw logits: the chosen token's, and the top ones'
    as (token id, logprob), best first."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class WaitReason(StrEnum):
    """Reason why a sequence waits for admission."""

    SLOT = "slot"  # or for memory
    GRAMMAR = "grammar"  # the grammar of its constraint is being compiled


class Output(Message, frozen=True):
    """Result of one step for one request. `tokens` are new; `logprobs`, when asked for, are one per token. Of `drafted`
    draft tokens that the step verified, `accepted` are among `tokens`.

    `waits_for` comes when it changes; it is SLOT at first. `wait_s` comes with `admitted`: how long the request waited
    for its slot, on the owner's clock. `prompt_tokens_done` is how much of the prompt is in the cache, while it
    prefills; `cached_tokens`, told once, how much of it was there before: with `admitted`, or later where the row first
    waits for another of its group to compute the prompt they share. `prompt_logprobs` are new ones, in the prompt's
    order from its second token on. Of a prompt that is prefilled in part, `scored_tokens` were scored and `kept_tokens`
    are in the cache, those that were there before included; told once, or again as 0 where the whole prompt is
    prefilled instead.
    """

    id: str
    waits_for: WaitReason | None = None
    admitted: bool = False
    wait_s: float = 0.0
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    drafted: int = 0
    accepted: int = 0
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    prompt_tokens_done: int | None = None
    cached_tokens: int | None = None
    scored_tokens: int | None = None
    kept_tokens: int | None = None
    finish: Finish | None = None


class BlockStored(Message, frozen=True, tag=True, array_like=True):
    """A full block of tokens can be reused by requests of `salt`. `parent` is the id of the block before it, 0 at the
    beginning of a prompt."""

    salt: str
    id: int
    parent: int
    tokens: tuple[int, ...]


class BlockRemoved(Message, frozen=True, tag=True, array_like=True):
    """A block can't be found any more."""

    salt: str
    id: int


class BlocksCleared(Message, frozen=True, tag=True, array_like=True):
    """No block of `salt` counts that was stored before. With `lost`, events were dropped: those that follow don't count
    either, until the next BlocksCleared."""

    salt: str
    lost: bool = False


BlockEvent = BlockStored | BlockRemoved | BlocksCleared


class Loading(Message, frozen=True, tag=True):
    """The owner is building the runner; `stage` is a short phrase for people."""

    stage: str


class Ready(Message, frozen=True, tag=True):
    """The owner is warmed up and takes work."""

    capabilities: Capabilities
    pid: int
    load_s: float = 0.0


class Failed(Message, frozen=True, tag=True):
    """The owner could not start, or can't go on, and ends itself. Live sequences get no end of their own: the client
    replays or ends them."""

    code: str
    message: str


class StepReport(Message, frozen=True, tag=True):
    """All outputs of one step, in one message. `events` are in order."""

    step: int
    outputs: tuple[Output, ...] = ()
    events: tuple[BlockEvent, ...] = ()
    statistics: EngineStatistics = EngineStatistics()


class JobDone(Message, frozen=True, tag=True):
    """Terminal event of a job: a plain result, or an error."""

    id: str
    result: Any = None
    code: str = ""
    message: str = ""


class Pong(Message, frozen=True, tag=True):
    """The answer to a Ping."""


class Stopped(Message, frozen=True, tag=True):
    """The owner has ended; no message follows."""


FromOwner = Loading | Ready | Failed | StepReport | JobDone | Pong | Stopped
