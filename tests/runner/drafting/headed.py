"""Tiny models with MTP heads, loaded, and references for what their heads draft."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import mlx.core as mx
import numpy as np

from tests.runner.drafting.test_draft_in_steps import mixed
from tests.runner.speculated import Speculated
from tests.support.mtp_models import head_tensors, make_headed, text_config
from tests.support.mtp_reference import Array, HeadReference
from tests.support.scripted_drafter import ScriptedDrafter
from treadle.runner.drafting.drafter import DraftedRow, NewStates
from treadle.runner.drafting.head import HeadDrafter
from treadle.runner.loading.headed import HeadedModel
from treadle.runner.loading.loader import load
from treadle.runner.loading.model import LoadedModel
from treadle.runner.loading.mtp import load_head
from treadle.runner.mlxlm.hooks import SelectingNorm
from treadle.runner.model_runner import ModelRunner

OPTIONS: dict[str, Any] = {"max_running": 8, "memory": 64 << 20}


@dataclass
class Headed:
    """A tiny model of a `family`, as it was loaded from `folder`."""

    family: str
    folder: Path
    plain: LoadedModel

    @cached_property
    def model(self) -> HeadedModel:
        return load_head(self.plain, self.folder, OPTIONS)

    @cached_property
    def reference(self) -> HeadReference:
        text, inner = self._text, self._text.model
        embedding, output = np.array(inner.embed_tokens.weight), np.array(text.lm_head.weight)
        return HeadReference(self.family, head_tensors(self.family), text_config(self.family), embedding, output)

    @property
    def _text(self) -> Any:
        return getattr(self.plain.module, "language_model", self.plain.module)

    def states(self, tokens: Sequence[int]) -> Array:
        """Return the hidden states (n, D) that the head takes of `tokens`, computed by mlx-lm's layers alone."""
        inner, library = self._text.model, self.plain.library
        norm = inner.norm.norm if isinstance(inner.norm, SelectingNorm) else inner.norm
        caches = library.new_caches(self.plain.module)
        x, causal = inner.embed_tokens(mx.array([list(tokens)])), mx.tri(len(tokens), dtype=mx.bool_)
        for layer, cache in zip(inner.layers, caches, strict=True):
            x = layer(x, causal if "self_attn" in layer else None, cache)
        return np.array((x if self.family == "mimo" else norm(x))[0], np.float64)

    def drafts(self, tokens: Sequence[int], count: int, start: int = 0) -> list[int]:
        """Return what a new head drafts behind `tokens`, having seen states from that of token `start` on."""
        states = self.states(tokens[:-1])[start:]
        return self.reference.drafts(states, tokens[start:], count)


def maker(folder: Path) -> Callable[[str], Headed]:
    """Return what loads families, each once, from new folders in `folder`."""
    known: dict[str, Headed] = {}

    def get(family: str) -> Headed:
        if family not in known:
            path = make_headed(folder / family, family)
            known[family] = Headed(family, path, load(path, **OPTIONS))
        return known[family]

    return get


class Shadow(ScriptedDrafter):
    """Proposes what is scripted, and notes what `drafter` would have."""

    reads_states = True

    def __init__(self, drafter: HeadDrafter, answers: dict[str, list[int]]) -> None:
        super().__init__(answers, 0.6)
        self.drafter = drafter
        self.noted: list[tuple[list[int], int, Sequence[int]]] = []

    def observe(self, found: Sequence[NewStates]) -> None:
        self.drafter.observe(found)

    def propose(self, rows: Sequence[DraftedRow], most: Sequence[int]) -> list[Sequence[int]]:
        drafts = self.drafter.propose(rows, most)
        for row, tokens in zip(rows, drafts, strict=True):
            known = self.drafter._rows[row.id]
            assert tokens, "there are drafts in every verifying step"
            self.noted.append((list(row.tokens), known.start, tokens))
        return super().propose(rows, most)

    def release(self, row_id: str) -> None:
        super().release(row_id)
        self.drafter.release(row_id)


class References(Protocol):
    """A model as it was loaded, and what a new head drafts for it."""

    @property
    def plain(self) -> LoadedModel: ...

    def drafts(self, tokens: Sequence[int], count: int, start: int = 0) -> list[int]: ...


def check_drafts(one: References, model: HeadedModel) -> None:
    """Check that `model`'s drafts are those of a new head that sees the whole row. Prompts come in chunks, drafts are
    accepted in part, and rows join, leave and come back."""
    some = mixed(1)[:5]
    wanted = Speculated(ModelRunner(one.plain), some, drafts=0).run()
    drafter = HeadDrafter(model)
    shadow = Shadow(drafter, wanted)
    run = Speculated(ModelRunner(model.target, drafter=shadow), some, drafts=3, chunk=50)
    assert run.run(preempt=3) == wanted
    assert 0 < run.accepted < run.drafted
    assert drafter.statistics().kv_bytes == 0, "nothing is held for those that have gone"
    assert any(start for _, start, _ in shadow.noted), "some come back to a cached prefix"
    for tokens, start, drafts in shadow.noted[:: max(1, len(shadow.noted) // 12)]:
        assert drafts == one.drafts(tokens, len(drafts), start)
