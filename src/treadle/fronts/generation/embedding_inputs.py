"""Inputs of a request for embeddings that are in memory: texts and token ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...errors import ContextLengthExceeded, InvalidRequest
from ...text import TextView
from ..prepared import PreparedPrompts
from ..text_jobs import TextJobRunner, text_counted
from ..validate import Limits, check_prompt_ids, check_size

Input = str | Sequence[int]


@dataclass(frozen=True)
class ListedInputs:
    """Texts, for which special tokens are added as the tokenizer does, and lists of token ids. `param` is the field
    that refusals name."""

    inputs: Sequence[Input]
    param: str = "input"

    def __len__(self) -> int:
        return len(self.inputs)

    def size(self, text: TextView, limits: Limits) -> int:
        size = 0
        for place, one in enumerate(self.inputs):
            if isinstance(one, str):
                size += max(1, int(len(one.encode("utf-8", "surrogatepass")) / text.bytes_per_token))
            else:
                check_prompt_ids(one, limits, place_of(self.param, place, len(self)))
                size += len(one)
        check_size(size, len(self), limits, self.param)
        return size

    async def tokenize(self, pool: TextJobRunner, limits: Limits, tenant: str) -> PreparedPrompts:
        return PreparedPrompts(
            [await self._ids(place, one, pool, limits, tenant) for place, one in enumerate(self.inputs)]
        )

    async def _ids(self, place: int, one: Input, pool: TextJobRunner, limits: Limits, tenant: str) -> Sequence[int]:
        param = place_of(self.param, place, len(self))
        if not isinstance(one, str):
            check_count(len(one), limits, param)
            return one
        count, ids = await text_counted(pool, one, limits, tenant, param)
        check_count(count, limits, param)
        return ids


def place_of(param: str, place: int, inputs: int) -> str:
    """Return the name of an input in refusals."""
    return param if inputs == 1 else f"{param}[{place}]"


def check_count(count: int, limits: Limits, param: str) -> None:
    """Raise InvalidRequest for an input of no tokens, ContextLengthExceeded for one beyond the context."""
    if not count:
        raise InvalidRequest(f"{param} has no tokens: give text that has some", param=param)
    if count > limits.context:
        raise ContextLengthExceeded(
            f"{param} has {count} tokens and the model's context is {limits.context}: shorten it", param=param
        )
