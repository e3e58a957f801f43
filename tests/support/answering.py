"""`treadle serve` whose answers are scripted: `python -m tests.support.answering serve MODEL OPTION...`.

The server, its text workers and its engine's process are the real ones; only the runner is `FrontRunner`, with the
tokenizer of MODEL. The variable TREADLE_TEST_ANSWERS names a JSON file with the arguments of `Answers`: `queue`,
`by_prompt`, `steps`. Each answered request is appended as a line of JSON (a Submit) to the same path with ".requests"
behind it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from tests.fronts.runner import FrontRunner
from tests.support.answers import Answers
from treadle.compose.owner import OwnerSpec
from treadle.core.messages import Submit
from treadle.engine.owner import OwnerLimits
from treadle.runner.base import Progress, Runner, RunnerFactory
from treadle.text import TextModel

ENTRY = "tests.support.answering:owner_of"
VARIABLE = "TREADLE_TEST_ANSWERS"


class RecordedAnswers(Answers):
    """Answers that append each answered request to `record`."""

    def __init__(self, text: TextModel, record: Path, queue: list[str], **options: Any) -> None:
        super().__init__(text, *queue, **options)
        self._record = record

    def _answer(self, request: Submit) -> tuple[int, ...]:
        with self._record.open("ab") as file:
            file.write(msgspec.json.encode(request) + b"\n")
        return super()._answer(request)


def write_answers(path: Path, *queue: str, **options: Any) -> dict[str, str]:
    """Write the arguments of `Answers` to `path`; return the environment of a server that gives them."""
    path.write_text(json.dumps({"queue": queue, **options}), encoding="utf-8")
    return {VARIABLE: str(path)}


def answered(path: Path) -> list[Submit]:
    """Return the requests that the answers in `path` went to."""
    lines = path.with_name(path.name + ".requests").read_bytes().splitlines()
    return [msgspec.json.decode(line, type=Submit) for line in lines]


def owner_of(arguments: Mapping[str, Any]) -> tuple[RunnerFactory, OwnerLimits]:
    """Return the factory of the scripted runner, and the owner's limits."""
    spec = msgspec.convert(arguments, OwnerSpec)
    path = Path(os.environ[VARIABLE])

    def build(progress: Progress) -> Runner:
        text = TextModel.load(Path(spec.folder), context=spec.context)
        record = path.with_name(path.name + ".requests")
        answers = RecordedAnswers(text, record, **json.loads(path.read_text(encoding="utf-8")))
        return FrontRunner(answers, vocabulary=text.vocabulary, context=text.context)

    return build, spec.limits


if __name__ == "__main__":
    from treadle.cli import main
    from treadle.compose import engine

    engine.OWNER_ENTRY = ENTRY
    main()
