"""The scripted runner as the fronts' tests want it: each prompt token has a score of its own, and the cache of prompts
is counted and can be emptied."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from tests.support.answers import Answers
from tests.support.capabilities import capabilities
from tests.support.scripted import Script, ScriptedRunner
from treadle.cache.prefix_index import PrefixIndex
from treadle.core.image import VisionCapabilities
from treadle.core.messages import Submit, TokenLogprob
from treadle.core.plan import RowScores, StepPlan, StepResult
from treadle.core.statistics import PrefixStatistics, RunnerStatistics
from treadle.runner.base import Job, JobContext


def prompt_score(prompt: Sequence[int], at: int, top: int) -> TokenLogprob:
    """What the runner says of the prompt's token at this place."""
    logprob = -float(at) / 4
    return TokenLogprob(logprob=logprob, top=tuple((prompt[at] + i, logprob - i) for i in range(top)))


class FrontRunner(ScriptedRunner):
    """`prefix_cache` reuses prompts of rows that have ended; with `block` it tells of their full blocks. The cache
    holds `cache_tokens` tokens, 0: any number."""

    def __init__(
        self,
        script: Script,
        *,
        vocabulary: int,
        context: int = 4096,
        prefix_cache: bool = False,
        block: int = 0,
        cache_tokens: int = 0,
    ) -> None:
        super().__init__(script, vocabulary=vocabulary, context=context)
        self._can = capabilities(
            self._can, prefix_cache=prefix_cache, kv_block=1 if prefix_cache else self._can.kv.block
        )
        if cache_tokens:
            self._can = capabilities(self._can, kv_token_bytes=1, kv_budget_bytes=cache_tokens)
        kv = msgspec.structs.replace(self._can.kv, prefix_block=block)
        self._can = msgspec.structs.replace(self._can, kv=kv)
        if isinstance(script, Answers):
            self._can = capabilities(self._can, draft_tokens=script.draft_tokens)
        self.index = PrefixIndex(block) if block else None
        self.looked_up = self.reused = 0

    def see(self, modalities: tuple[str, ...]) -> None:
        """Read what `modalities` name."""
        tower = VisionCapabilities(layers=2, patch=4) if "image" in modalities else VisionCapabilities()
        self._can = capabilities(self._can, modalities=modalities, vision=tower)

    def sample(self, request: Submit, position: int, most: int) -> tuple[int, ...]:
        """Return the tokens of a step: of `Answers` as many as those give, one of another script."""
        if isinstance(self.script, Answers):
            return self.script.step(request, position, most)
        return super().sample(request, position, most)

    def execute(self, plan: StepPlan) -> StepResult:
        for admit in plan.admit:
            if admit.request.prompt_logprobs is None:
                self.looked_up += len(admit.request.prompt)
                self.reused += admit.cached_tokens
        result = super().execute(plan)
        starts = {chunk.id: chunk.start for chunk in plan.prefill}
        scores = tuple(self._scored(of, starts[of.id]) for of in result.scores)
        return msgspec.structs.replace(result, scores=scores)

    def _scored(self, scores: RowScores, start: int) -> RowScores:
        request = self.held[scores.id].request
        top = request.prompt_logprobs
        assert top is not None
        places = range(start + 1, start + 1 + len(scores.logprobs))
        return RowScores(id=scores.id, logprobs=tuple(prompt_score(request.prompt, at, top) for at in places))

    def statistics(self) -> RunnerStatistics:
        held = sum(len(tokens) for _, tokens in self._cached)
        prefix = PrefixStatistics(looked_up=self.looked_up, reused=self.reused, held=held, held_bytes=10 * held)
        return RunnerStatistics(prefix=prefix)

    def jobs(self) -> Mapping[str, Job]:
        return {"reset_prefix_cache": self._reset} if self._can.steps.prefix_cache else {}

    def _reset(self, context: JobContext, args: Mapping[str, Any]) -> int:
        dropped = self.statistics().prefix.held
        self._cached.clear()
        if self.index is not None:
            self.index.clear()
        return dropped
