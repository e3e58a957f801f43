"""Observations of one request and of one round: plain values that are written to the result file as they are."""

from __future__ import annotations

from typing import Literal

import msgspec

Outcome = Literal["ok", "refused", "failed", "incomplete", "left"]


class Sample(msgspec.Struct):
    """One request as the client saw it.

    `due_s` and `sent_s` are seconds from the start of the round; all later times are seconds from `sent_s`, so that a
    wait for the client's own concurrency never counts as the server's. `piece_s` are the times of the pieces of the
    answer (one or more tokens each). `outcome`: "ok" is a complete answer; "refused" a 429 or 503 before any of it;
    "failed" another error, also one inside a 200; "incomplete" an answer that broke off or stopped coming; "left" one
    that the client dropped on purpose. `reason` details the last four. Of a structured answer, `checked` counts the
    parts that have a schema (the text, or each tool call; 1 where none came), `valid` those that match it.
    """

    id: str
    role: str
    due_s: float
    sent_s: float
    session: str = ""
    status: int = 0
    header_s: float | None = None
    piece_s: list[float] = []
    end_s: float = 0.0
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    finish_reason: str = ""
    outcome: Outcome = "failed"
    reason: str = ""
    retry_after_s: float | None = None
    checked: int = 0
    valid: int = 0

    @property
    def ttft_s(self) -> float | None:
        """Seconds from sending to the first piece of the answer."""
        return self.piece_s[0] if self.piece_s else None

    @property
    def gaps_s(self) -> list[float]:
        """Seconds between one piece and the next."""
        return [b - a for a, b in zip(self.piece_s, self.piece_s[1:], strict=False)]

    @property
    def tokens(self) -> int:
        """Tokens of the answer: the server's count, else the number of pieces."""
        return len(self.piece_s) if self.completion_tokens is None else self.completion_tokens


class Control(msgspec.Struct):
    """One request to a control route (`/health`, `/v1/models`) during load. `status` 0: no answer."""

    path: str
    at_s: float
    took_s: float
    status: int


class Round(msgspec.Struct):
    """One run of a workload against one target. `lag_s` are samples of the lateness of the client's own event loop;
    `status` is the difference of `/v1/status` counters over the round, if the target has them. `crash` describes the
    end of a server that was started for the run; it is started again for the next round."""

    target: str
    number: int
    wall_s: float
    samples: list[Sample]
    control: list[Control] = []
    lag_s: list[float] = []
    status: dict[str, float] = {}
    crash: str = ""


class TargetInfo(msgspec.Struct):
    """A server under test: its name in tables, its URL, its model, and its command if it was started here. `compute` is
    the compute path that a Treadle server reports, in one line."""

    name: str
    url: str
    model: str
    command: str = ""
    version: str = ""
    compute: str = ""


class Machine(msgspec.Struct):
    """The machine of the figures."""

    system: str
    processor: str
    cores: int
    memory_bytes: int
    python: str
    treadle: str
    accelerator: str = ""


class Result(msgspec.Struct):
    """A whole `treadle bench run`, as its JSON file holds it. `workloads` has one entry per workload that was run, with
    its seed and options; `rounds[name]` are its rounds in the order in which they ran, targets interleaved. `stopped`
    is the reason for which the run ended early, empty if it did not. `rounds_planned` counts the rounds of all
    workloads together, and `rounds_done` those that every target has finished; both are 0 in older files."""

    format: int
    started: str
    machine: Machine
    targets: list[TargetInfo]
    endpoint: str
    workloads: dict[str, WorkloadInfo]
    rounds: dict[str, list[Round]]
    stopped: str = ""
    rounds_done: int = 0
    rounds_planned: int = 0


class WorkloadInfo(msgspec.Struct):
    """Identity of a workload: two runs can be compared if these are equal."""

    seed: int
    options: dict[str, float]
    requests: int
    concurrency: int
    digest: str
    goodput: tuple[float, float] = (2.0, 0.2)
