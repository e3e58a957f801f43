"""KV backends driven by the names of sequences, as the runner drives them by its registry."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace

from treadle.runner.forward.ragged import RaggedBatch
from treadle.runner.forward.segments import ForwardOutput, KvSequence, RowSegment
from treadle.runner.kv.backend import KvConfig
from treadle.runner.loading.model import LoadedModel


def segment(name: str, tokens: Sequence[int], start: int, **fields: Any) -> RowSegment:
    """A segment of a sequence that is only known by name."""
    return RowSegment(KvSequence(name, "", ()), tokens, start, **fields)


@dataclasses.dataclass(frozen=True)
class Placed:
    """A sequence's part of a batch: tokens `first` to `first + count`, at positions `start` to `end`."""

    id: str
    first: int
    count: int
    start: int

    @property
    def end(self) -> int:
        return self.start + self.count


def placed(batch: RaggedBatch) -> list[Placed]:
    """Each segment's place in the batch."""
    firsts = batch.firsts.tolist()
    return [Placed(s.id, first, len(s.tokens), s.start) for s, first in zip(batch.segments, firsts, strict=True)]


class Driven:
    """The backend of `config`, or of a `runner`, and the registry of its sequences."""

    def __init__(self, config: KvConfig | None = None, module: Any = None, *, runner: Any = None) -> None:
        self.live: dict[str, KvSequence] = {} if runner is None else runner._rows
        self.backend: Any = runner._backend if config is None else config.build(module, self.live, time.monotonic)

    def reuse(self, name: str, salt: str, tokens: Sequence[int]) -> int:
        self.release(name)
        self.live[name] = KvSequence(name, salt, [*tokens, 0])
        count = int(self.backend.match(salt, tokens))
        assert self.backend.reuse([(self.live[name], count)]) == [count], "it gets what was found"
        return count

    def admit(self, name: str, salt: str = "", tokens: Sequence[int] = ()) -> None:
        sequence = self.live.setdefault(name, KvSequence(name, salt, tokens))
        sequence.tokens = tokens
        self.backend.admit(sequence)

    def known(self, segments: Sequence[RowSegment]) -> list[RowSegment]:
        """The segments, of the sequences that live."""
        return [replace(one, sequence=self.live[one.id]) for one in segments]

    def order(self, segments: Sequence[RowSegment]) -> list[RowSegment]:
        return list(self.backend.order(segments))

    def begin(self, segments: Sequence[RowSegment]) -> RaggedBatch:
        """The batch of ordered segments, begun."""
        batch = RaggedBatch([one if one.padding else self.known([one])[0] for one in segments])
        self.backend.begin(batch)
        return batch

    def compute(self, segments: Sequence[RowSegment], previous: Any | None = None) -> ForwardOutput:
        done: ForwardOutput = self.backend.compute(self.known(segments), previous)
        return done

    def commit(self, name: str, count: int) -> None:
        self.backend.commit([RowSegment(self.live[name], (0,) * count, 0)])

    def release(self, name: str) -> None:
        sequence = self.live.pop(name, None)
        if sequence is not None:
            self.backend.release(sequence)

    def invalidate(self, *names: str) -> None:
        self.backend.invalidate([self.live.pop(name) for name in names])


def configured(model: LoadedModel, **changed: Any) -> LoadedModel:
    """The model with another configuration of its backend."""
    config: Any = model.choice.config
    return dataclasses.replace(
        model, choice=dataclasses.replace(model.choice, config=dataclasses.replace(config, **changed))
    )
