"""Facts about this machine from MLX, asked in a short-lived child: where MLX crashes or hangs, the doctor lives on.

    python -m treadle.cli.device_probe QUESTION

QUESTION is JSON. The child writes one JSON line for each part of the answer as soon as it is known: `blas`, `mlx`,
`mlx-lm` and, with a model folder, `text` (not of a sketch) and `model`; the first part that is missing is where it
ended. Nothing else is on its standard output.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from ..engine.process import describe_exit
from ..environment import without_secrets
from ..errors import TreadleError, spell

PROBE_S = 120.0
DEVICE_PARTS = ("blas", "mlx", "mlx-lm")
MODEL_PARTS = ("text", "model")
_COMMAND = (sys.executable, "-m", "treadle.cli.device_probe")


class Question(msgspec.Struct, frozen=True):
    """What the child is to find out; `folder` is a checked model folder, or None for the device alone. A `sketch` of a
    folder has no tokenizer that could be asked."""

    folder: str | None = None
    threads: int | None = None
    context: int | None = None
    memory: int | None = None
    chat_template: str | None = None
    kv_bits: int | None = None
    sketch: bool = False
    spelling: dict[str, str] = {}


@dataclass(frozen=True)
class Answer:
    """`parts` are the parts that came, each with `error` in it where it is a failure. `ended` says why no more came:
    empty when the child got to its end."""

    parts: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    ended: str = ""
    last_words: str = ""


Ask = Callable[[Question], Answer]


def ask(question: Question, *, command: Sequence[str] = _COMMAND, timeout_s: float = PROBE_S) -> Answer:
    """Ask a child and wait at most `timeout_s`. Never raises for what the child does."""
    process = subprocess.Popen(
        [*command, msgspec.json.encode(question).decode()],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        env=without_secrets(),
    )
    ended = ""
    with process:
        try:
            out, err = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            ended = f"no answer within {timeout_s:g} s"
            _end(process)
            out, err = process.communicate()
        except BaseException:
            _end(process)
            raise
    parts = _parts(out)
    if not ended and (process.returncode or not _is_complete(parts, question)):
        ended = f"the process that asked it ended: {describe_exit(process.returncode)}"
    return Answer(parts, ended, _last_line(err))


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the child and whatever it started, which would hold its pipes open."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _is_complete(parts: Mapping[str, Mapping[str, Any]], question: Question) -> bool:
    """Whether every part is there, up to one that could not be answered and without which the next ones can't be."""
    for name in _names(question):
        if name not in parts:
            return False
        if _is_last(name, parts[name]):
            return True
    return True


def _names(question: Question) -> tuple[str, ...]:
    if question.folder is None:
        return DEVICE_PARTS
    return DEVICE_PARTS + (MODEL_PARTS[1:] if question.sketch else MODEL_PARTS)


def _is_last(name: str, part: Mapping[str, Any]) -> bool:
    return "error" in part and name in ("mlx", "mlx-lm")


def _parts(out: bytes) -> dict[str, Mapping[str, Any]]:
    parts: dict[str, Mapping[str, Any]] = {}
    for line in out.splitlines():
        with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError):
            value = json.loads(line)
            parts[value.pop("part")] = value
    return parts


def _last_line(err: bytes) -> str:
    lines = err.decode("utf-8", "replace").strip().splitlines()
    return lines[-1][:300] if lines else ""


# The child ----------------------------------------------------------------------------------------------------------


def main(argv: Sequence[str]) -> int:
    """Answer the question in `argv`, part by part."""
    question = msgspec.json.decode(argv[0], type=Question)
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # whatever a library prints is no answer
    known: dict[str, Any] = {}
    for name in _names(question):
        try:
            known[name] = _ANSWERS[name](question, known)
        except TreadleError as error:
            known[name] = {"error": spell(error.message, question.spelling)}
        except Exception as error:  # whatever MLX or a model's code raises is the answer
            known[name] = {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"}
        print(json.dumps({"part": name, **known[name]}), file=answers, flush=True)
        if _is_last(name, known[name]):
            break
    return 0


def _blas(question: Question, known: Mapping[str, Any]) -> dict[str, Any]:
    from ..runner.device import blas

    report = blas.prepare(question.threads)
    return {"text": str(report), "threads": report.threads, "warning": report.warning}


def _mlx(question: Question, known: Mapping[str, Any]) -> dict[str, Any]:
    from ..runner.device.require_mlx import try_mlx

    if (found := try_mlx()) is not None:
        return {"error": found.what, "fix": found.fix}
    from ..runner.device import memory

    device = memory.device()
    return {"kind": device.kind, "name": device.name, "usable_bytes": memory.usable_bytes(device.kind)}


def _mlx_lm(question: Question, known: Mapping[str, Any]) -> dict[str, Any]:
    from ..runner import mlxlm

    return {"version": mlxlm.connect().version}


def _text(question: Question, known: Mapping[str, Any]) -> dict[str, Any]:
    from ..text import TextModel

    assert question.folder is not None
    template = None if question.chat_template is None else Path(question.chat_template)
    text = TextModel.load(Path(question.folder), chat_template=template, context=question.context)
    return {
        "vocabulary": text.vocabulary,
        "eos_token_ids": list(text.eos_token_ids),
        "chat_template": text.chat_template is not None,
        "default_sampling": dict(text.default_sampling),
    }


def _model(question: Question, known: Mapping[str, Any]) -> dict[str, Any]:
    from .estimate import estimate

    found = estimate(question, known["mlx"]["kind"], known["mlx"]["usable_bytes"])
    return msgspec.structs.asdict(found)


_ANSWERS: dict[str, Callable[[Question, Mapping[str, Any]], dict[str, Any]]] = {
    "blas": _blas,
    "mlx": _mlx,
    "mlx-lm": _mlx_lm,
    "text": _text,
    "model": _model,
}


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stderr.flush()
    os._exit(code)  # the interpreter's teardown may abort under MLX's threads, which would look like a crash
