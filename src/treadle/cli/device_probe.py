"""Probe of this machine's MLX in a short-lived child process: if MLX crashes or hangs, the doctor survives.

    python -m treadle.cli.device_probe REQUEST

REQUEST is JSON. The child writes one JSON line for each part of the result as soon as it is known: `blas`, `mlx`,
`mlx-lm` and, with a model folder, `text` (not of a sketch), `model` and, with a draft model's, `draft`, and with a
scorer's, `scorer`; the first missing part names the place of a crash. Its standard output holds nothing else.
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

from ..compose.unused_packages import hide_unused_packages
from ..engine.process import describe_exit
from ..environment import without_secrets
from ..errors import ModelError, TreadleError, spell

PROBE_S = 120.0
DEVICE_PARTS = ("blas", "mlx", "mlx-lm")
MODEL_PARTS = ("text", "model")
_COMMAND = (sys.executable, "-m", "treadle.cli.device_probe")


class ProbeRequest(msgspec.Struct, frozen=True):
    """Input of the probe. `folder` is a checked model folder, or None for the device alone. A `sketch` of a folder has
    no tokenizer to load. `draft` is the folder of a draft model, `scorer` that of one which scores prompts of
    `scored_min` tokens or more."""

    folder: str | None = None
    threads: int | None = None
    context: int | None = None
    memory: int | None = None
    chat_template: str | None = None
    kv_bits: int | None = None
    kernels: str = "auto"
    structured: str = "auto"
    tool_parser: str = "auto"
    reasoning_parser: str = "auto"
    sketch: bool = False
    draft: str | None = None
    scorer: str | None = None
    scored_min: int = 8192
    spelling: dict[str, str] = {}


@dataclass(frozen=True)
class ProbeResult:
    """`parts` by name, each with `error` in it if it failed. `ended` is the reason why parts are missing: empty if the
    child ran to its end."""

    parts: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    ended: str = ""
    last_line: str = ""


Probe = Callable[[ProbeRequest], ProbeResult]


def probe(request: ProbeRequest, *, command: Sequence[str] = _COMMAND, timeout_s: float = PROBE_S) -> ProbeResult:
    """Run a child and wait at most `timeout_s` seconds. Crashes and hangs of the child raise nothing."""
    process = subprocess.Popen(
        [*command, msgspec.json.encode(request).decode()],
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
    if not ended and (process.returncode or not _is_complete(parts, request)):
        ended = f"the process that asked it ended: {describe_exit(process.returncode)}"
    return ProbeResult(parts, ended, _last_line(err))


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill the child and the processes it started, which would hold its pipes open."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _is_complete(parts: Mapping[str, Mapping[str, Any]], request: ProbeRequest) -> bool:
    """Whether all parts are there, up to a failed one that the next ones depend on."""
    for name in _names(request):
        if name not in parts:
            return False
        if _is_last(name, parts[name]):
            return True
    return True


def _names(request: ProbeRequest) -> tuple[str, ...]:
    if request.folder is None:
        return DEVICE_PARTS
    if request.sketch:
        return DEVICE_PARTS + MODEL_PARTS[1:]
    others = {"draft": request.draft, "scorer": request.scorer}
    return (*DEVICE_PARTS, *MODEL_PARTS, *(name for name, folder in others.items() if folder is not None))


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
    """Compute and print the parts of the request in `argv`."""
    request = msgspec.json.decode(argv[0], type=ProbeRequest)
    hide_unused_packages()
    output = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # keep the output of libraries out of the result
    known: dict[str, Any] = {}
    for name in _names(request):
        try:
            known[name] = _PARTS[name](request, known)
        except TreadleError as error:
            known[name] = {"error": spell(error.message, request.spelling)}
        except Exception as error:  # any error of MLX or of a model's code is the result
            known[name] = {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"}
        print(json.dumps({"part": name, **known[name]}), file=output, flush=True)
        if _is_last(name, known[name]):
            break
    return 0


def _blas(request: ProbeRequest, known: Mapping[str, Any]) -> dict[str, Any]:
    from ..runner.device import blas

    report = blas.prepare(request.threads)
    return {"text": str(report), "threads": report.threads, "warning": report.warning}


def _mlx(request: ProbeRequest, known: Mapping[str, Any]) -> dict[str, Any]:
    from ..runner.device.require_mlx import try_mlx

    if (found := try_mlx()) is not None:
        return {"error": found.message, "fix": found.fix}
    from ..runner.device import memory

    device = memory.device()
    part: dict[str, Any] = {"kind": device.kind, "name": device.name, "usable_bytes": memory.usable_bytes(device.kind)}
    if device.kind == "cuda" and request.kernels != "off":
        part["programs"] = _programs()
    return part


def _programs() -> dict[str, Any]:
    """Return where compiled kernels are kept, after one was tried, and the reasons where that does not work."""
    from ..environment import cache_folder
    from ..runner.device.programs import FOLDER, kernel_programs

    reasons = kernel_programs().report().reasons
    return {"folder": str(cache_folder(os.environ) / FOLDER), "reasons": list(reasons)}


def _mlx_lm(request: ProbeRequest, known: Mapping[str, Any]) -> dict[str, Any]:
    from ..runner import mlxlm

    return {"version": mlxlm.connect().version}


def _text(request: ProbeRequest, known: Mapping[str, Any]) -> dict[str, Any]:
    from ..text import TextModel

    assert request.folder is not None
    template = None if request.chat_template is None else Path(request.chat_template)
    text = TextModel.load(
        Path(request.folder),
        chat_template=template,
        context=request.context,
        tool_parser=request.tool_parser,
        reasoning_parser=request.reasoning_parser,
    )
    return {
        "vocabulary": text.vocabulary,
        "eos_token_ids": list(text.eos_token_ids),
        "chat_template": text.chat_template is not None,
        "no_chats": text.no_chats,
        "default_sampling": dict(text.default_sampling),
        "tool_parser": text.formats.tools,
        "reasoning_parser": text.formats.reasoning,
        "structured": _structured(request),
    }


def _structured(request: ProbeRequest) -> dict[str, Any]:
    """Return whether llguidance can use the model's tokenizer for structured output."""
    from importlib.metadata import version

    assert request.folder is not None
    found: dict[str, Any] = {"llguidance": version("llguidance"), "on": request.structured != "off"}
    if found["on"]:
        from ..compose.owner import begin_vocabulary

        try:
            begin_vocabulary(Path(request.folder)).result()
        except ModelError as error:
            found["error"] = error.message
    return found


def _model(request: ProbeRequest, known: Mapping[str, Any]) -> dict[str, Any]:
    from .estimate import estimate

    found = estimate(request, known["mlx"]["kind"], known["mlx"]["usable_bytes"])
    return msgspec.structs.asdict(found)


def _draft(request: ProbeRequest, known: Mapping[str, Any]) -> dict[str, Any]:
    from .draft_fit import draft_fit

    return msgspec.structs.asdict(draft_fit(request, *_served(known)))


def _scorer(request: ProbeRequest, known: Mapping[str, Any]) -> dict[str, Any]:
    from .scorer_fit import scorer_fit

    return msgspec.structs.asdict(scorer_fit(request, *_served(known)))


def _served(known: Mapping[str, Any]) -> tuple[Mapping[str, Any], str, int]:
    """Return what a second model is compared with: the served one's estimate, the device's kind, and its memory."""
    if "error" in known["model"]:
        raise ModelError("it can't be compared with a model that would not run")
    return known["model"], known["mlx"]["kind"], known["mlx"]["usable_bytes"]


_PARTS: dict[str, Callable[[ProbeRequest, Mapping[str, Any]], dict[str, Any]]] = {
    "blas": _blas,
    "mlx": _mlx,
    "mlx-lm": _mlx_lm,
    "text": _text,
    "model": _model,
    "draft": _draft,
    "scorer": _scorer,
}


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stderr.flush()
    os._exit(code)  # the interpreter's teardown may abort under MLX's threads, which would look like a crash
