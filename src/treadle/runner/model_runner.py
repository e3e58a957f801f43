"""The runner of text models: computes the steps that plans describe.

Rules: a plan says which sequences compute how many tokens of their prompts, and which sample a token. Sampled tokens
are read when a step is finished. The next step may be started before, and takes them from the device. After an
exception the sequences of unfinished steps are lost until they are released and admitted again; others are not
affected.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any

import mlx.core as mx

from ..core.capabilities import Capabilities, SpecPrefillCapabilities
from ..core.grammar_state import NO_GRAMMARS, GrammarStatus
from ..core.image import keyed
from ..core.messages import BlockEvent, Constraint, Submit
from ..core.plan import Admit, DraftTrial, RowScores, StepPlan, StepResult
from ..core.statistics import PrefixStatistics, RunnerStatistics, ScorerStatistics
from ..grammar.compiler import GrammarCompiler
from .admission import Admission
from .base import Job, JobContext
from .capabilities import capabilities_of
from .device import memory
from .device.owner_thread import OutOfMemory, OwnerThread, leave_thread, mlx_runtime
from .device.staging import Staging, direct
from .drafting.drafter import Drafter
from .image_support import no_images, up_to_images, with_images
from .kv.backend import WarmLimits, WarmPass
from .loading.draft_costs import TOKENS, choose_launches
from .loading.model import LoadedModel, build_backend
from .loading.step_costs import StepCosts, measure
from .loading.warm_images import warm_up_images
from .loading.warmup import warm_up, warm_up_pooling
from .scoring.scorer import Scorer, looks_ahead
from .settler import Settler
from .step import RunningRow, Step
from .step_builder import StepBuilder
from .step_sampler import StepSampler
from .verification import Speculation, Verified
from .vision.encoder import ImageEncoder

_log = logging.getLogger(__name__)

TRIM_EVERY_S = 5.0  # the warm-up rests hundreds of times


class ModelRunner:
    """Computes steps for `model`. The thread that builds it owns it: any other that calls it gets WrongThread.

    With `fast_forward`, tokens that a constraint forces are taken in one step, where the KV backend gains by that.
    """

    def __init__(
        self,
        model: LoadedModel,
        clock: Callable[[], float] = time.monotonic,
        before_step: Callable[[], None] = lambda: None,
        grammars: GrammarCompiler | None = None,
        drafter: Drafter | None = None,
        scorer: Scorer | None = None,
    ) -> None:
        self._owner = OwnerThread()
        self._model = model
        self._clock = clock
        self._before_step = before_step
        self._grammars = grammars or GrammarCompiler(None, unavailable=NO_GRAMMARS)
        self._rows: dict[str, RunningRow] = {}  # the registry of live sequences
        self._backend = build_backend(model, self._rows, clock)
        self._images = ImageEncoder(model.vision, no_images(model, self._backend))
        self._vision = None if model.vision is None else model.vision.capabilities
        self._put = Staging().put if model.staged else direct
        self._sampler = StepSampler(model, self._put, self._backend)
        self._speculation = Speculation(drafter, self._backend, model.vocabulary)
        self._scorer = scorer
        self._builder = StepBuilder(
            self._rows,
            self._backend,
            Admission(model, self._backend, self._rows, self._grammars, self._images),
            self._speculation,
            self._images,
            forget=self._forget,
            least_forced=self._least_forced,
        )
        self._settler = Settler(self._backend, self._speculation, self._grammars)
        budget = model.kv_budget_bytes + model.draft_budget_bytes
        self._pool = memory.free_pool(model.device, budget, model.max_running * model.vocabulary)
        self._started: deque[Step] = deque()
        self._finished_at = 0.0
        self._trimmed = clock()
        self._costs = StepCosts()
        self._warmed = PrefixStatistics()  # what the warm-up counted
        self.fast_forward = True
        self.verifies_in_graphs = model.graphs is None  # without a switch MLX has decided
        if self._backend.name == "serial":
            reason = model.details.get("not batched", "it cannot be batched")
            _log.warning("%s decodes its requests one by one: %s; use another model to serve many", model.name, reason)

    def capabilities(self) -> Capabilities:
        """Facts about the model, and limits of this runner."""
        self._owner.check()
        grammars = not self._grammars.unavailable
        scoring = SpecPrefillCapabilities() if self._scorer is None else self._scorer.capabilities()
        can = capabilities_of(self._model, self._backend, self._costs, self._speculation, scoring, grammars=grammars)
        return with_images(can, self._model, self._backend, self._vision)

    def warm_up(self) -> None:
        """Run every kind of step; leaves nothing behind (C2)."""
        self._owner.check()
        model, drafter = self._model, self._speculation.drafter
        if drafter is not None:
            drafter.warm_up()
        if self._scorer is not None:
            with self._graphs(alike=False):
                self._scorer.warm_up()
            self._scorer.warm_up_look_ahead()
        if model.embedding.whole:
            warm_up_pooling(self, model.embedding.poolings[0])
        else:
            drafts = self._speculation.draft_tokens
            limits = WarmLimits(model.max_running, model.context, model.prefill_tokens, drafts)
            passes = self._backend.warm_passes(limits)
            warm_up(self, passes, drafts)
            if model.graphs is not None and drafts and model.context > TOKENS:
                self._choose_launches([one for one in passes if one.drafts])
            if model.vision is not None and not no_images(model, self._backend):
                self._vision = warm_up_images(self, model.vision, passes, limits)
            self._costs = measure(self, model)
        self.forget_prefixes()
        self._warmed = self._backend.statistics()

    def _choose_launches(self, passes: Sequence[WarmPass]) -> None:
        """Let steps that verify drafts use CUDA graphs if that makes them shorter, and make the graphs of `passes`."""
        drafts = self._speculation.draft_tokens
        self._model.details["verifying steps"] = choose_launches(self, self._model.max_running, drafts, self._clock)
        if self.verifies_in_graphs:
            warm_up(self, passes, drafts)

    @contextmanager
    def filled_drafts(self) -> Iterator[None]:
        """Fill up the drafter's proposals to what plans ask for, inside the block."""
        self._speculation.fills = True
        try:
            yield
        finally:
            self._speculation.fills = False

    @property
    def no_positions(self) -> str:
        """The reason why tokens have no positions apart from their index; empty where they may."""
        return self._backend.no_positions

    def free_blocks(self) -> int:
        """Blocks of cache memory that no sequence holds."""
        return self._backend.free_blocks()

    def match_prefix(self, admit: Admit) -> int:
        """Return how many tokens of a new sequence the prefix cache holds."""
        self._owner.check()
        request = admit.request
        tokens = (*keyed(request.prompt, request.images), *admit.history)[:-1]
        return self._backend.match(request.salt, tokens if admit.reusable < 0 else tokens[: admit.reusable])

    def match_scored(self, request: Submit) -> int:
        """Return how many tokens of a prompt the scorer has cached."""
        self._owner.check()
        return 0 if self._scorer is None else self._scorer.match(request)

    def continuation(self, salt: str, tokens: Sequence[int], most: int) -> Sequence[int]:
        """Return up to `most` tokens that the prefix cache holds behind `tokens`; none where it has no index."""
        self._owner.check()
        index = self._backend.index
        return () if index is None else up_to_images(index.continuation(salt, tokens, most))

    def grammar_state(self, constraint: Constraint) -> GrammarStatus:
        """Return the state of a constraint's grammar, which is compiled in the background."""
        return self._grammars.state(constraint)

    def has_features(self, hash_: bytes) -> bool:
        """Return whether the features of the image with this hash are kept."""
        return self._images.has_features(hash_)

    def notify_grammars(self, changed: Callable[[], None]) -> None:
        """Call `changed`, from a background thread, whenever a grammar has been compiled or has failed."""
        self._grammars.notify(changed)

    def execute(self, plan: StepPlan) -> StepResult:
        """Start a step and finish it. No other step may be in flight."""
        assert not self._started
        self.start(plan)
        return self.finish()

    def start(self, plan: StepPlan) -> None:
        """Begin the plan's work. Raises RunnerBroken when MLX's runtime failed; after any other exception the plan's
        sequences are lost."""
        self._owner.check()
        assert len(self._started) <= self._backend.lookahead <= 1, "one step at most runs ahead"
        assert not (self._started and self._started[-1].drafts), "drafts are verified in lock-step"
        self._before_step()
        before = self._started[-1] if self._started else None
        with self._graphs(not plan.encode):
            step = self._builder.build(plan, self._clock(), before)
        self._started.append(step)
        try:
            with self._graphs(not plan.prefill and (self.verifies_in_graphs or not plan.verifies)):
                self._launch(step, before)
            if plan.score and self._scorer is not None:
                scored = [(self._rows[chunk.id], chunk) for chunk in plan.score if chunk.id in self._rows]
                with self._graphs(all(looks_ahead(row, chunk) for row, chunk in scored)):
                    step.scoring = self._scorer.start(scored)
        except BaseException:
            self._started.pop()
            self._invalidate(step)
            raise

    def finish(self) -> StepResult:
        """Wait for the oldest step in flight, and return its result. After an exception no step is in flight, and the
        sequences of all of them are lost."""
        self._owner.check()
        step = self._started[0]
        try:
            result = self._read(step)
        except BaseException:
            for lost in self._started:
                self._invalidate(lost)
            self._started.clear()
            raise
        self._started.popleft()
        return result

    def release(self, row_id: str) -> None:
        """Forget a sequence. Its memory is free at once, or at the next decode step if others share its batch."""
        self._owner.check()
        self._forget(row_id)

    def _forget(self, row_id: str) -> None:
        sequence = self._rows.pop(row_id, None)
        if self._scorer is not None:
            self._scorer.release(row_id)
        if self._speculation.drafter is not None:
            self._speculation.drafter.release(row_id)
        if sequence is not None:
            self._images.release(sequence.images)
            with suppress(OutOfMemory), mlx_runtime("keeping what a row leaves"):  # or not
                self._backend.release(sequence)

    def trim_memory(self) -> None:
        """Return freed memory to the system. That takes milliseconds, and so does having it again."""
        self._owner.check()
        memory.give_back()
        if self._clock() - self._trimmed >= TRIM_EVERY_S:
            memory.trim()
            self._trimmed = self._clock()

    def statistics(self) -> RunnerStatistics:
        """Memory in use. Between two steps this also bounds what MLX keeps of freed buffers."""
        self._owner.check()
        now, kv_bytes = memory.statistics_of(), self._backend.kv_bytes()
        if self._pool is not None:
            self._pool.follow(now["active_bytes"])
        return RunnerStatistics(
            **now,
            kv_bytes=kv_bytes,
            prefix=self._backend.statistics().since(self._warmed),
            grammars=self._grammars.statistics,
            drafter=self._speculation.statistics(),
            scorer=ScorerStatistics() if self._scorer is None else self._scorer.statistics(),
            features=self._images.statistics(),
        )

    def watch_blocks(self, salt: str, on: bool) -> None:
        """Record the events of a salt's cached blocks, or no longer."""
        self._owner.check()
        assert self._backend.index is not None
        self._backend.index.watch(salt, on)

    def block_events(self) -> tuple[BlockEvent, ...]:
        """Return the events of watched blocks since the last call."""
        self._owner.check()
        return () if self._backend.index is None else self._backend.index.drain_events()

    def jobs(self) -> Mapping[str, Job]:
        """`memory` answers with bytes by kind; `release_memory` gives freed buffers back and says how many bytes;
        `reset_prefix_cache` forgets what is kept of rows that have gone and says how many tokens."""
        return {
            "memory": self._memory_job,
            "release_memory": self._release_memory_job,
            "reset_prefix_cache": lambda context, args: self.forget_prefixes(),
        }

    def forget_prefixes(self) -> int:
        """Clear the prefix cache, those of drafter and scorer, and features of images; the number of tokens in the
        first."""
        self._owner.check()
        self._images.clear()
        if self._speculation.drafter is not None:
            self._speculation.drafter.reset()
        if self._scorer is not None:
            self._scorer.reset()
        return self._backend.reset()

    def close(self) -> None:
        """Free rows, caches and weights, and end MLX on this thread unless it is the main one."""
        self._owner.check()
        self._started.clear()
        self._grammars.close()
        if self._speculation.drafter is not None:
            self._speculation.drafter.close()
        if self._scorer is not None:
            self._scorer.close()
        self._backend.close()
        self._rows.clear()
        del self._model, self._backend, self._sampler, self._speculation, self._settler, self._images, self._scorer
        del self._builder
        memory.give_back()
        leave_thread()

    # Jobs ----------------------------------------------------------------------------------------------------------

    def _memory_job(self, context: JobContext, args: Mapping[str, Any]) -> dict[str, int]:
        self._owner.check()
        return {**memory.statistics_of(), "kv_bytes": self._backend.kv_bytes()}

    def _release_memory_job(self, context: JobContext, args: Mapping[str, Any]) -> dict[str, int]:
        self._owner.check()
        return {"released_bytes": memory.give_back()}

    # Starting ------------------------------------------------------------------------------------------------------

    def _invalidate(self, step: Step) -> None:
        """Invalidate the sequences of a step that failed, except those released since, whatever their ids mean now."""
        lost = [row for id_, row in step.rows.items() if self._rows.get(id_) is row]
        for row in lost:
            del self._rows[row.id]
            self._images.release(row.images)
        self._images.drop(step.encoded)
        self._backend.invalidate(lost)
        with suppress(Exception):  # the first error is the one to report
            memory.give_back()

    def _graphs(self, alike: bool) -> AbstractContextManager[None]:
        """Let MLX use CUDA graphs for passes that are `alike`, where it can be told to: those of sequences that decode
        beside no prompt, if they verify nothing or that was found to be faster, those of drafts, and of a scorer's
        look-ahead."""
        switch = self._model.graphs
        return nullcontext() if switch is None or alike else switch.single_launches()

    def _launch(self, step: Step, before: Step | None) -> None:
        """Build the step's graph and hand it to the device."""
        with mlx_runtime("computing a step"):
            sampled = None if before is None else before.sampled(self._put)
            hidden = bool(step.pooled) or step.observed
            done = step.computed = self._backend.compute(step.segments, sampled, hidden=hidden)
            early, done.early = done.early, ()
            if step.drafts:  # nothing is in flight, and the device waits for this step
                for array in early:
                    mx.async_eval(array)  # type: ignore[no-untyped-call]
            done.arrays += step.encoding
            if step.observed:
                done.arrays += done.hidden.values()
            for id_, message in done.refused.items():
                self.release(id_)
                step.failed[id_] = message
            step.decodes = [decode for decode in step.decodes if decode.id not in step.failed]
            step.scores = step.prompt_scores(self._put)
            step.pool()
            self._sampler.start(step, before)

    # Finishing -----------------------------------------------------------------------------------------------------

    def _read(self, step: Step) -> StepResult:
        with mlx_runtime("finishing a step"):
            if self._speculation.draft_tokens and len(self._started) == 1:  # nothing follows yet: that may verify
                self._backend.prepare()
            verified = Verified(step) if step.drafts else None
            tokens, found, redrawn = step.read() if verified is None else ([], {}, False)
            redrawn = (verified is None and step.settle(tokens, found)) or redrawn
            if not step.groups:
                mx.eval(step.computed.arrays)
            scores = {id_: score.read() for id_, score in step.scores.items()}
            vectors = tuple(step.read_vectors()) if step.vectors else ()
            least = self._least_forced(len(step.decodes))
            if verified is None:
                self._settler.settle(step, tokens, least)
            else:
                self._settler.settle_verified(step, verified, least)
            if redrawn:
                step.correct(tokens)
            self._continue_later_steps(step, redrawn)
        kept = () if step.scoring is None or self._scorer is None else tuple(self._scorer.read(step.scoring))
        ended = self._clock()
        seconds = ended - max(step.began, self._finished_at)
        self._finished_at = ended
        if step.observed:
            self._speculation.observe(step, self._rows)
        trials = self._follow(step, seconds) if step.propose else ()
        offer = self._speculation.offer if step.propose else None
        began = self._clock()
        rows = tuple(step.gained(tokens, found, offer) if verified is None else verified.gained(offer))
        return StepResult(
            rows=rows,
            proposing_s=self._clock() - began if step.propose else 0.0,
            trials=trials,
            scores=tuple(RowScores(id=id_, logprobs=logprobs) for id_, logprobs in scores.items()),
            vectors=vectors,
            kept=kept,
            failures=step.failures(),
            evicted=tuple(step.evicted | (set() if step.scoring is None else step.scoring.evicted)),
            **step.times(seconds),
        )

    def _least_forced(self, decoding: int) -> int:
        return self._backend.least_forced(decoding) if self.fast_forward else 0

    def _follow(self, step: Step, seconds: float) -> tuple[DraftTrial, ...]:
        """Let the drafter follow the rows that have gained tokens, and have not left."""
        rows = [step.rows[step.decodes[place].id] for place in step.places]
        some = [row for row in rows if row.id not in step.failed and self._rows.get(row.id) is row]
        return self._speculation.follow(some, seconds)

    def _continue_later_steps(self, step: Step, redrawn: bool) -> None:
        """Sample the rows of later steps that waited for this one's tokens. If a token has changed since, compute those
        steps again, which writes over what they wrote."""
        before = step
        for later in list(self._started)[1:]:
            later.supersede([step.rows[id_] for id_ in step.forced])
            if redrawn:
                later.drop([id_ for id_, row in later.rows.items() if self._rows.get(id_) is not row])
                self._launch(later, before)
            self._sampler.defer_limited(later)
            self._sampler.draw_deferred(later)
            before = later
