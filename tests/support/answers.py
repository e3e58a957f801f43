"""Scripted answers of a model: texts with special tokens, one token a step or more."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from tests.support.tiny import EOS
from treadle.core.messages import Submit
from treadle.text import TextModel

Answer = str | Sequence[int]
"""A text, in which special tokens such as "<tool_call>" stand by name, or token ids."""


class Answers:
    """Script of a runner (`tests.fronts.runner.FrontRunner`): the answers to requests, each followed by `end`.

    An answer of `by_prompt` goes to each request whose decoded prompt contains its key. `queue` goes to other requests
    in the order in which they first decode; its last answer goes to all further ones. `steps` are the tokens of
    successive steps, repeated to the answer's end: (1,) is one token a step, (3, 1) three, one, three, ... A step with
    fewer tokens left gives those.

    `requests` are those answered so far, with their constraints, in order.

        answers = Answers(text, "<think>2+2</think>4", by_prompt={"weather": CALL}, steps=(3, 1))
        async with front(answers, text=text) as f: ...
    """

    def __init__(
        self,
        text: TextModel,
        *queue: Answer,
        by_prompt: Mapping[str, Answer] | None = None,
        steps: Sequence[int] = (1,),
        end: int = EOS,
    ) -> None:
        assert queue or by_prompt, "no answers"
        assert all(step > 0 for step in steps), "a step without a token"
        self.requests: list[Submit] = []
        self.draft_tokens = max(steps) - 1
        self._text = text
        self._queue = [self._ids(answer) for answer in queue]
        self._by_prompt = {marker: self._ids(answer) for marker, answer in (by_prompt or {}).items()}
        self._steps = tuple(steps)
        self._end = end
        self._given: dict[str, tuple[int, ...]] = {}

    def __call__(self, request: Submit, position: int) -> int:
        """Return the token of an answer at `position`."""
        return self.step(request, position, 1)[0]

    def step(self, request: Submit, position: int, most: int) -> tuple[int, ...]:
        """Return the tokens of an answer from `position` to the end of the step that it is in, at most `most`."""
        if request.id not in self._given:
            self.requests.append(request)
            self._given[request.id] = self._answer(request)
        answer = self._given[request.id]
        boundaries = itertools.accumulate(itertools.cycle(self._steps))
        step_end = next(boundary for boundary in boundaries if boundary > position)
        return answer[position : min(step_end, position + most)] or (self._end,)

    def _answer(self, request: Submit) -> tuple[int, ...]:
        prompt = self._text.decode(request.prompt, skip_special_tokens=False)
        for marker, answer in self._by_prompt.items():
            if marker in prompt:
                return answer
        assert self._queue, f"no answer for the prompt {prompt!r}"
        return self._queue.pop(0) if len(self._queue) > 1 else self._queue[0]

    def _ids(self, answer: Answer) -> tuple[int, ...]:
        if not isinstance(answer, str):
            return tuple(answer)
        ids = tuple(self._text.encode(answer, add_special_tokens=False))
        decoded = self._text.decode(ids, skip_special_tokens=False)
        assert decoded == answer, f"the tokenizer does not keep the answer: {decoded!r}"
        return ids
