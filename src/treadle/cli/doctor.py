"""`treadle doctor`: report on a server that would run here, and its obstacles. This process never imports MLX."""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from .. import installation
from ..config import Settings
from ..errors import StartFailed
from ..runner.device import blas
from ..units import count, size
from . import machine, model_location, scorer_fit
from .device_probe import Probe, ProbeRequest, ProbeResult, probe
from .draft_fit import CURE
from .findings import Finding, Findings, Mark, show
from .head_fit import EAGLE
from .model_location import MODEL, ModelLocation

ENGINE = "MLX"
_STAGES = {
    "blas": "choosing a BLAS",
    "mlx": "MLX's first use",
    "mlx-lm": "mlx-lm's self-check",
    "text": "the model's tokenizer",
    "model": "the model's architecture",
    "draft": "the draft model",
    "scorer": "the scorer",
}


def run(settings: Settings, *, check: bool, as_json: bool, probe: Probe = probe) -> int:
    """Print the findings, with `check` also those of a running engine. Returns 0 if Treadle could serve (and does),
    else 1."""
    findings = examine(settings, probe)
    if check and findings.ok:
        return _run_check(settings, findings, as_json)
    if as_json:
        print(json.dumps(findings.to_plain(), indent=2))
    else:
        show(findings, Console(highlight=False))
    return 0 if findings.ok else 1


def run_brief(settings: Settings, probe: Probe = probe) -> int:
    """Print one line: versions, device, and that the model can be served. Returns 0.

    Raises StartFailed with all that is not installed, or with the first failure and its cure.
    """
    from ..compose.checks import require_installed

    require_installed(settings.model)
    found = examine(settings, probe)
    if not found.ok:
        raise StartFailed(f"can't serve {settings.model}: {found.first_failure()}")
    print(f"{summary(found)}: can serve {settings.model}")
    return 0


def summary(found: Findings) -> str:
    """Format the device and the versions as one line."""
    device, library = found.of(ENGINE, "device"), found.of(ENGINE, "BLAS")
    on = [item.value for item in (device, library) if item is not None and item.value != blas.DEVICE]
    names = {"mlx": "MLX", "mlx-lm": "mlx-lm", "Python": "Python"}
    versions = [f"{label} {_version(found, name)}" for name, label in names.items()]
    return f"Treadle {_version(found, 'treadle')} on {', '.join(on)}; {', '.join(versions)}"


def _version(found: Findings, name: str) -> str:
    item = found.of(machine.SOFTWARE, name)
    return str(item.facts["version"]) if item is not None and item.facts else "?"


def _run_check(settings: Settings, findings: Findings, as_json: bool) -> int:
    from ..telemetry.logs import configure
    from .engine_checks import check_model

    configure("critical", sys.stderr)  # the report holds the effects of the checks
    report = asyncio.run(check_model(settings, Console(stderr=True, highlight=False)))
    if as_json:
        print(json.dumps({**findings.to_plain(), "check": report.to_plain()}, indent=2))
    else:
        print(report.to_markdown(findings))
    return 0 if report.ok else 1


def examine(settings: Settings, probe: Probe = probe) -> Findings:
    """Find out everything that needs no reading of a model's weights. The hub is asked only for a model that is not on
    this disk, and not with `offline`."""
    with tempfile.TemporaryDirectory(prefix="treadle-doctor-") as scratch:
        location = model_location.find(settings, Path(scratch))
        result = probe(_probe_request(settings, location))
        return Findings(
            (
                *machine.system(),
                *machine.software(),
                *_engine(result),
                *location.findings,
                *_text(result),
                *_prospects(settings, location, result),
                *_draft(settings, location, result),
                *_scorer(settings, location, result),
            )
        )


def _probe_request(settings: Settings, location: ModelLocation) -> ProbeRequest:
    return ProbeRequest(
        folder=None if location.folder is None else str(location.folder),
        threads=settings.threads,
        context=settings.context,
        memory=settings.memory,
        chat_template=None if settings.chat_template is None else str(settings.chat_template),
        kv_bits=settings.kv_bits,
        kernels=settings.kernels,
        structured=settings.structured,
        tool_parser=settings.tool_parser,
        reasoning_parser=settings.reasoning_parser,
        sketch=location.sketch,
        draft=None if location.draft is None else str(location.draft),
        scorer=None if location.scorer is None else str(location.scorer),
        scored_min=settings.spec_prefill_min,
        spelling=dict(settings.spelling),
    )


def _engine(result: ProbeResult) -> list[Finding]:
    """Return the probe's findings about MLX, and its early end, if it ended early."""
    found = [
        make(result.parts[name])
        for name, make in (("mlx", _device), ("blas", _blas), ("mlx-lm", _adapter))
        if name in result.parts
    ]
    if "programs" in result.parts.get("mlx", {}):
        found.append(_programs(result.parts["mlx"]["programs"]))
    if result.ended:
        found.append(_ended(result))
    return found


def _ended(result: ProbeResult) -> Finding:
    """Return the finding of a probe that crashed or hung: its stage and the last line of its output."""
    at = next((stage for name, stage in _STAGES.items() if name not in result.parts), "its end")
    tail = f" ({result.last_line})" if result.last_line else ""
    facts = {"at": at, "ended": result.ended, "last_words": result.last_line}
    fix = "choose another model, or newer versions of mlx and mlx-lm"
    if "mlx-lm" not in result.parts:
        fix = f"install MLX anew: {installation.reinstall_command()}"
    return Finding(ENGINE, "probe", f"failed at {at}: {result.ended}{tail}", Mark.FAIL, fix, facts)


def _device(part: Mapping[str, Any]) -> Finding:
    if "error" in part:
        return Finding(ENGINE, "device", part["error"], Mark.FAIL, part.get("fix", ""), part)
    memory = f", {size(part['usable_bytes'])} usable" if part["usable_bytes"] else ""
    return Finding(ENGINE, "device", f"{part['kind']}: {part['name']}{memory}", facts=part)


def _programs(part: Mapping[str, Any]) -> Finding:
    """Return the finding of compiled kernels; where they are not kept, each start takes longer."""
    name, folder = "compiled kernels", part["folder"]
    if not part["reasons"]:
        return Finding(ENGINE, name, f"kept in {folder}", facts=part)
    value = f"{'; '.join(part['reasons'])}: each start compiles them anew"
    fix = f"make {folder} a folder of this user, and install nvidia-cuda-runtime where headers are missing"
    return Finding(ENGINE, name, value, Mark.WARN, fix, part)


def _blas(part: Mapping[str, Any]) -> Finding:
    if "error" in part:
        return Finding(ENGINE, "BLAS", part["error"], Mark.WARN, installation.install_command("cpu"), part)
    if part.get("warning"):
        return Finding(ENGINE, "BLAS", f"{part['text']}; {part['warning']}", Mark.WARN, facts=part)
    if part["threads"] > (limit := blas.default_threads()):
        value = f"{part['text']}, and {limit} can run at once: more are many times slower"
        return Finding(ENGINE, "BLAS", value, Mark.WARN, f"--threads {limit}", part)
    return Finding(ENGINE, "BLAS", part["text"], facts=part)


def _adapter(part: Mapping[str, Any]) -> Finding:
    if "error" in part:
        return Finding(ENGINE, "mlx-lm", part["error"], Mark.FAIL, facts=part)
    return Finding(ENGINE, "mlx-lm", f"{part['version']} passes the self-check", facts=part)


def _text(result: ProbeResult) -> list[Finding]:
    """Return the findings about tokenizer and template. A broken tokenizer fails the start; a template that is missing
    or refuses every chat costs the chat routes only."""
    part = result.parts.get("text")
    if part is None:
        return []
    if "error" in part:
        return [Finding(MODEL, "tokenizer", part["error"], Mark.FAIL, facts=part)]
    value = f"{part['vocabulary']:,} tokens"
    if part["no_chats"]:
        why = part["no_chats"] if part["chat_template"] else "no chat template"
        fix = f"{installation.command()} serve --chat-template FILE, or use /v1/completions only"
        tokenizer = Finding(MODEL, "tokenizer", f"{value}, {why}: chats are refused", Mark.WARN, fix, part)
        return [tokenizer, _structured(part)]
    return [
        Finding(MODEL, "tokenizer", f"{value}, with a chat template", facts=part),
        _answers(part),
        _structured(part),
    ]


def _answers(part: Mapping[str, Any]) -> Finding:
    """Return the finding of the formats of tool calls and reasoning."""
    tools, reasoning = part["tool_parser"], part["reasoning_parser"]
    markers = "no markers of reasoning" if reasoning is None else f"reasoning with the markers of {reasoning}"
    facts = {"tool_parser": tools, "reasoning_parser": reasoning}
    return Finding(MODEL, "answers", f"tool calls in the format of {tools}, {markers}", facts=facts)


def _structured(part: Mapping[str, Any]) -> Finding:
    """Return the finding of structured output; without it, requests for it are refused."""
    name, facts = "structured output", part["structured"]
    if not facts["on"]:
        return Finding(MODEL, name, "off (--structured off): requests for it are refused", facts=facts)
    if "error" in facts:
        fix = "choose another model, or send no schemas and grammars"
        return Finding(MODEL, name, f"{facts['error']}: requests for it are refused", Mark.WARN, fix, facts)
    return Finding(MODEL, name, f"llguidance {facts['llguidance']} takes the tokenizer", facts=facts)


def _prospects(settings: Settings, location: ModelLocation, result: ProbeResult) -> list[Finding]:
    part = result.parts.get("model")
    if location.folder is None or part is None:
        return _budget(settings, result)
    if "error" in part:
        reason = part["error"].replace(str(location.folder), settings.model)
        return [Finding(MODEL, "would run", reason, Mark.FAIL, facts={"error": reason})]
    shape = f"{part['architecture']}, {count(part['parameters'])} parameters, {part['dtype']}"
    return [
        Finding(MODEL, "would run", f"{shape}, {size(part['weight_bytes'])} in memory", facts=part),
        _path(settings, part),
        Finding(MODEL, "context", f"{part['context']:,} tokens", facts={"tokens": part["context"]}),
        _cache(settings, part),
    ]


def _draft(settings: Settings, location: ModelLocation, result: ProbeResult) -> list[Finding]:
    """Return the finding of the draft model: whether it fits. One that the start would refuse is a failure."""
    return _second("draft model", settings.draft, settings, location, result.parts.get("draft"), CURE)


def _scorer(settings: Settings, location: ModelLocation, result: ProbeResult) -> list[Finding]:
    """Return the finding of the scorer, like that of the draft model."""
    part = result.parts.get("scorer")
    return _second("scorer", settings.spec_prefill, settings, location, part, scorer_fit.CURE)


def _second(
    name: str, model: str | None, settings: Settings, location: ModelLocation, part: Mapping[str, Any] | None, cure: str
) -> list[Finding]:
    if location.sketch and model is not None:
        value = f"{model} is compared once the model is on this disk"
        return [Finding(MODEL, name, value, Mark.WARN, f"{installation.command()} pull {settings.model}")]
    if part is None:
        return []
    if "error" in part:
        reason, *_ = part["error"].split(": give a smaller model")  # of the start, whose cure is the same
        reason, less, own = reason.partition(": give less")
        return [Finding(MODEL, name, reason, Mark.FAIL, f"give less{own}" if less else cure, part)]
    shape = f"{part['architecture']}, {count(part['parameters'])} parameters, {part['dtype']}"
    same = "sizes" if part["architecture"] == EAGLE else "tokens"
    value = f"{model} fits: the same {same}; {shape}, {size(part['weight_bytes'])} in memory"
    return [Finding(MODEL, name, value, facts=part)]


def _budget(settings: Settings, result: ProbeResult) -> list[Finding]:
    """Return the finding of a budget that exceeds the device's memory, for any model."""
    usable = result.parts.get("mlx", {}).get("usable_bytes")
    if settings.memory is None or not usable or settings.memory <= usable:
        return []
    value = f"--memory is {size(settings.memory)}, and {size(usable)} are usable here"
    return [Finding(MODEL, "capacity", value, Mark.FAIL, "give less --memory, or leave it out")]


def _path(settings: Settings, part: Mapping[str, Any]) -> Finding:
    """The expected KV backend; a failure where `--kernels require` asks for a better one."""
    backend, best = part["backend"], part["best"]
    reuse = f"prefix reuse: {part['prefixes']}"
    value = "; ".join([f"{backend} expected: {part['path']}", reuse, *part["why"], "the start tests it"])
    facts = {name: part[name] for name in ("backend", "best", "prefixes", "why")} | {"kernels": settings.kernels}
    if settings.kernels == "require" and backend != best:
        why = f"{value}; --kernels require asks for {best}, this device's best"
        return Finding(MODEL, "compute path", why, Mark.FAIL, "leave --kernels out, or choose another model", facts)
    return Finding(MODEL, "compute path", value, facts=facts)


def _cache(settings: Settings, part: Mapping[str, Any]) -> Finding:
    """Return the finding of the capacity: sequences that may run, and sequences of a whole context that fit."""
    running, budget, token_bytes = settings.max_running, part["kv_budget_bytes"], part["kv_token_bytes"]
    facts = {"max_running": running, "budget_bytes": budget, "token_bytes": token_bytes, "whole_contexts": None}
    value = f"up to {running} at once" + (f" in {size(budget)} of cache" if budget else "")
    if not budget:
        return Finding(MODEL, "capacity", value, facts=facts)
    row = part["kv_row_bytes"] + part["context"] * token_bytes
    fit = budget // max(1, row)
    facts["whole_contexts"] = fit
    value += f", {token_bytes / 1024:g} KiB a token: {min(fit, running)} of them with the whole context"
    if budget < part["kv_least_bytes"] + running * part["kv_least_row_bytes"]:
        fix = "lower --max-running, give more --memory, or use a smaller model"
        return Finding(MODEL, "capacity", f"{value}; too little to start", Mark.FAIL, fix, facts)
    if fit < 1:
        fix = "give a smaller --context, more --memory, or use a smaller model"
        return Finding(MODEL, "capacity", value, Mark.WARN, fix, facts)
    return Finding(MODEL, "capacity", value, facts=facts)
