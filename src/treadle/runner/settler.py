"""Settling of finished steps: rows take over their tokens, constraints follow them, and caches are committed."""

from __future__ import annotations

from ..grammar.compiler import GrammarCompiler
from ..grammar.faults import has_failed
from .kv.backend import KvBackend
from .step import RunningRow, Step
from .verification import Speculation, Verified

NAN_TOKEN = 0
"""The token that is sampled from logits that are all NaN."""


class Settler:
    """Settles steps over `backend`, `least` forced tokens of whose sequences are taken at once (0: none). Those of
    `grammars` on which llguidance fails are compiled anew."""

    def __init__(self, backend: KvBackend, speculation: Speculation, grammars: GrammarCompiler) -> None:
        self._backend = backend
        self._speculation = speculation
        self._grammars = grammars

    def settle(self, step: Step, tokens: list[int], least: int) -> None:
        """Append the sampled tokens to their rows, and those that constraints force behind them, and let others reuse
        what was computed. Rows whose constraint can't follow them fail, as do those whose logits are NaN."""
        for place in step.places:
            row = step.rows[step.decodes[place].id]
            row.tokens.append(tokens[place])
            failure = row.sampling.accept(tokens[place])
            if failure or (least and row.sampling.limited):
                self._force(step, row, least, failure)
        self._backend.commit(step.segments)
        if step.ungrammatical or NAN_TOKEN in tokens:
            step.fail_with_nan(step.rows_with_nan(tokens))

    def settle_verified(self, step: Step, verified: Verified, least: int) -> None:
        """The same for a step that verifies drafts."""
        zeros = False
        for kept, failure in verified.settle():
            zeros = zeros or NAN_TOKEN in kept.tokens
            if failure or (least and kept.row.sampling.limited):
                self._force(step, kept.row, least, failure)
        verified.correct_logprobs()
        self._speculation.keep(step, verified.kept)
        if step.ungrammatical or zeros:
            step.fail_with_nan(verified.with_nan())

    def _force(self, step: Step, row: RunningRow, least: int, failure: str) -> None:
        """Append the tokens that the row's constraint forces, if they are `least` or more. A row that can't go on
        fails, as does one that has come with a `failure`."""
        if not failure:
            forced, failure = row.sampling.force(least)
            if forced:
                row.tokens += forced
                step.forced[row.id] = forced
        if failure:
            step.failed[row.id] = failure
            if not has_failed(failure):
                step.ungrammatical.add(row.id)
            elif row.request.constraint is not None:
                self._grammars.forget(row.request.constraint)
