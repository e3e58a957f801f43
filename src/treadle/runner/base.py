"""Protocol of runners, which compute steps: the only module of `runner/` that `engine/` imports."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from ..core.capabilities import Capabilities
from ..core.grammar_state import GrammarStatus
from ..core.messages import BlockEvent, Constraint, Submit
from ..core.plan import Admit, StepPlan, StepResult
from ..core.statistics import RunnerStatistics


class RunnerBroken(Exception):
    """The runner's state can't be trusted any more (a fault of MLX's runtime): the owner must be replaced.

    Any other exception out of `start` or `finish` is taken as the fault of a row in that plan: the rows of the plan are
    released, recomputed from their tokens, and the guilty one found and failed alone. After one out of `start` that
    step does not exist, and those before it are finished as usual. After one out of `finish` no step exists any more:
    all that were started are void, and the rows of all of them are released.
    """


class JobContext(Protocol):
    """A job's view of its caller."""

    def cancelled(self) -> bool:
        """True once the caller no longer wants the result. Long jobs ask between chunks."""
        ...


Job = Callable[[JobContext, Mapping[str, Any]], Any]
Progress = Callable[[str], None]


class Runner(Protocol):
    """Computes steps. It lives and dies on the owner: built, used and closed by one thread."""

    def capabilities(self) -> Capabilities:
        """Facts about the model, and limits of this runner."""
        ...

    def warm_up(self) -> None:
        """Run every kind of step once and leave nothing behind, also when it raises (C2)."""
        ...

    def free_blocks(self) -> int:
        """Return how many of `Capabilities.kv.blocks` no sequence holds. Blocks of the prefix cache alone are free,
        those that started steps take are not. Not called if there are 0 blocks."""
        ...

    def match_prefix(self, admit: Admit) -> int:
        """Return how many tokens of prompt and history, without the last one, the prefix cache holds. A query without
        side effects: the tokens are taken over when the plan that admits the sequence with this number is started. Not
        called for sequences that compute their whole prompt."""
        ...

    def has_features(self, hash_: bytes) -> bool:
        """Return whether the features of the image with this hash are kept, or computed by steps that were started.
        They stay until the plan is started that admits a sequence which needs them, and from then on until it has
        computed the image's tokens."""
        ...

    def match_scored(self, request: Submit) -> int:
        """Return how many tokens of a prompt, without the last one, the scorer's cache holds. A query without side
        effects: they are taken over when the plan that begins to score it with this number is started. Not called where
        `SpecPrefillCapabilities` has no scorer."""
        ...

    def grammar_state(self, constraint: Constraint) -> GrammarStatus:
        """Return the state of a constraint's grammar. The first call begins to compile it, beside the steps. Asked
        before a sequence waits for a slot, and again in each plan that may admit it: one whose grammar is not READY is
        left out. If the grammar of an admitted sequence is gone by `start`, the result names it in `evicted`."""
        ...

    def notify_grammars(self, changed: Callable[[], None]) -> None:
        """Call `changed`, from any thread, whenever a PENDING grammar becomes READY or FAILED."""
        ...

    def start(self, plan: StepPlan) -> None:
        """Begin the plan's work. Cached tokens of all admitted sequences are taken over before anything is allocated.

        A row whose image lacks features, or the layers before those of the plan, is named in `evicted`.
        Up to `Capabilities.lookahead` more steps may be started before `finish` is called for the first of them. A row
        that fails in one of those may be in the next ones: there it fails again, or is left out of the result.
        Raises RunnerBroken when nothing can be trusted any more; any other exception fails this plan's rows only.
        """
        ...

    def finish(self) -> StepResult:
        """Wait for the oldest step that was started and not finished; its result. Raises like `start`."""
        ...

    def release(self, row_id: str) -> None:
        """Forget one row, wherever it stands. An unknown id is harmless. Steps in flight may hold the row: their
        results may still name it, and the id may be admitted anew before they are finished."""
        ...

    def trim_memory(self) -> None:
        """Return freed memory to the system; next steps are slower. Called when no sequence has lived for a while."""
        ...

    def statistics(self) -> RunnerStatistics:
        """Memory in use; cheap enough for every step."""
        ...

    def watch_blocks(self, salt: str, on: bool) -> None:
        """Record the events of the cached blocks of a salt, from what is there now on, or no longer. Not called where
        `KvCapabilities.prefix_block` is 0."""
        ...

    def block_events(self) -> tuple[BlockEvent, ...]:
        """Return the events of watched blocks since the last call, in order. It is asked again, without a step between,
        until it is empty."""
        ...

    def jobs(self) -> Mapping[str, Job]:
        """The named pieces of work that may be run between steps; none is in flight then."""
        ...

    def close(self) -> None:
        """Free everything, also with steps in flight. Nothing is called after it."""
        ...


RunnerFactory = Callable[[Progress], Runner]
"""Builds a runner on the calling thread, which becomes its owner; reports stages for people on the way."""
