"""Figures of a round: pure functions of its samples. Percentiles are observed values, never interpolated."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise

import msgspec

from .samples import Round, Sample

ENDS = ("stop", "tool_calls")


class Percentiles(msgspec.Struct, frozen=True):
    """Count, mean, percentiles and maximum of some values, in seconds unless noted otherwise."""

    count: int
    mean: float
    p50: float
    p90: float
    p99: float
    max: float


class Figures(msgspec.Struct, frozen=True):
    """Figures of a round, or of the requests of one role in it.

    `answers` counts outcomes and `reasons` the causes of those that are not ok. `gap` is between one piece of an answer
    and the next, `stream_tokens_per_s` per answer after its first piece, `tokens_per_s` over all of them and the whole
    time. `flatness` is TTFT max / median. `good` is the part of all requests that were answered within the workload's
    limits, `goodput_per_s` their number a second.
    """

    answers: dict[str, int]
    reasons: dict[str, int]
    ttft: Percentiles | None
    gap: Percentiles | None
    total: Percentiles | None
    stream_tokens_per_s: Percentiles | None
    refusal: Percentiles | None
    client_wait: Percentiles | None
    tokens: int
    prompt_tokens: int
    cached_tokens: int
    tokens_per_s: float
    requests_per_s: float
    flatness: float | None
    good: float
    goodput_per_s: float


def quantile(ordered: Sequence[float], q: float) -> float:
    """Return the smallest value that at least the part `q` of all values do not exceed (nearest rank)."""
    return ordered[max(0, math.ceil(q * len(ordered)) - 1)]


def percentiles(values: Iterable[float | None]) -> Percentiles | None:
    """Compute the percentiles; None if there are no values."""
    ordered = sorted(value for value in values if value is not None)
    if not ordered:
        return None
    return Percentiles(
        count=len(ordered),
        mean=statistics.fmean(ordered),
        p50=quantile(ordered, 0.5),
        p90=quantile(ordered, 0.9),
        p99=quantile(ordered, 0.99),
        max=ordered[-1],
    )


def figures(round_: Round, goodput: tuple[float, float], *, role: str | None = None) -> Figures:
    """Compute the figures of all samples, or of those with `role`."""
    samples = [sample for sample in round_.samples if role is None or sample.role == role]
    ok = [sample for sample in samples if sample.outcome == "ok"]
    answered = [sample for sample in samples if sample.piece_s]
    wall = max(_duration_s(samples), 1e-9)
    ttft = percentiles(sample.ttft_s for sample in answered)
    tokens = sum(sample.tokens for sample in samples)
    good = sum(_is_good(sample, goodput) for sample in ok)
    return Figures(
        answers=dict(Counter(sample.outcome for sample in samples)),
        reasons=dict(Counter(sample.reason for sample in samples if sample.reason)),
        ttft=ttft,
        gap=percentiles(gap for sample in answered for gap in sample.gaps_s),
        total=percentiles(sample.end_s for sample in ok),
        stream_tokens_per_s=percentiles(_stream_rate(sample) for sample in ok),
        refusal=percentiles(sample.end_s for sample in samples if sample.outcome == "refused"),
        client_wait=percentiles(sample.sent_s - sample.due_s for sample in samples),
        tokens=tokens,
        prompt_tokens=sum(sample.prompt_tokens or 0 for sample in samples),
        cached_tokens=sum(sample.cached_tokens or 0 for sample in samples),
        tokens_per_s=tokens / wall,
        requests_per_s=len(ok) / wall,
        flatness=_quotient(ttft.max, ttft.p50) if ttft else None,
        good=good / len(samples) if samples else 0.0,
        goodput_per_s=good / wall,
    )


def _duration_s(samples: Sequence[Sample]) -> float:
    """Return the seconds from the first request sent to the last one ended."""
    if not samples:
        return 0.0
    return max(s.sent_s + s.end_s for s in samples) - min(s.sent_s for s in samples)


def _stream_rate(sample: Sample) -> float | None:
    first, last = sample.piece_s[:1], sample.piece_s[-1:]
    if not first or last[0] <= first[0]:
        return None
    return (sample.tokens - 1) / (last[0] - first[0])


def _is_good(sample: Sample, limits: tuple[float, float]) -> bool:
    first_s, each_s = limits
    if sample.ttft_s is None or sample.ttft_s > first_s:
        return False
    return (sample.end_s - sample.ttft_s) <= each_s * max(1, sample.tokens - 1)


# Figures of single workloads -----------------------------------------------------------------------------------------


def workload_figures(workload: str, round_: Round) -> dict[str, float]:
    """Return the workload's own figures, and those of speculation and SpecPrefill, by name; those that the round can't
    give are left out."""
    compute = WORKLOAD_FIGURES.get(workload.split()[0])
    found = {**(compute(round_) if compute else {}), **_speculation(round_), **_spec_prefill(round_)}
    return {name: value for name, value in found.items() if value is not None and math.isfinite(value)}


def _speculation(round_: Round) -> dict[str, float | None]:
    """Share of accepted draft tokens, and tokens of a sequence and step that verified some, where any were verified."""
    rows, drafted, accepted = (round_.status.get(f"draft {name}", 0.0) for name in ("rows", "drafted", "accepted"))
    if not rows:
        return {}
    return {"drafts accepted": _quotient(accepted, drafted), "tokens a verification": _quotient(rows + accepted, rows)}


def _spec_prefill(round_: Round) -> dict[str, float | None]:
    """Share of scored prompt tokens that was kept, where any were scored."""
    scored, kept = (round_.status.get(f"sparse {name}", 0.0) for name in ("scored_tokens", "kept_tokens"))
    return {"prompt tokens kept": _quotient(kept, scored)} if scored else {}


def _burst(round_: Round) -> dict[str, float | None]:
    ttft = percentiles(sample.ttft_s for sample in round_.samples)
    return {"TTFT max / median": _quotient(ttft.max, ttft.p50) if ttft else None}


def _stall(round_: Round) -> dict[str, float | None]:
    """Compare gaps of the decoders during the long prompt's prefill with those before and after it (P3)."""
    kept = _kept(*_decoder_gaps(round_, "long"))
    return kept and {**kept, "long TTFT s": _role_ttft(round_, "long")}


def _images(round_: Round) -> dict[str, float | None]:
    """Compare gaps of the decoders while an image's first token is awaited with those before and after all images, and
    the second question about an image with the first."""
    times = [s.ttft_s for s in round_.samples if s.role == "first" and s.ttft_s is not None]
    first, second = _role_ttft(round_, "first"), _role_ttft(round_, "second")
    return {
        "image TTFT p50 s": first,
        "image TTFT max s": max(times, default=None),
        "second question TTFT / first": _quotient(second, first),
        **_kept(*_decoder_gaps(round_, "first", "second")),
    }


def _kept(alone: Sequence[float], during: Sequence[float]) -> dict[str, float | None]:
    """Compare the decoders' gaps under load with those without; nothing where either is missing."""
    idle, loaded = percentiles(alone), percentiles(during)
    if idle is None or loaded is None:
        return {}
    return {
        "gap p99 / idle gap p99": _quotient(loaded.p99, idle.p99),
        "longest gap / idle median": _quotient(loaded.max, idle.p50),
        "rate kept": _quotient(idle.mean, loaded.mean),
    }


def _decoder_gaps(round_: Round, *roles: str) -> tuple[list[float], list[float]]:
    """Return the decoders' gaps while all of them decode alone, before and after the requests of `roles`, and those
    while the first token of one was awaited."""
    decoders = [s for s in round_.samples if s.role == "decoder" and s.piece_s]
    others = [s for s in round_.samples if s.role in roles]
    if not decoders or not others:
        return [], []
    waits = [(s.sent_s, s.sent_s + (s.end_s if s.ttft_s is None else s.ttft_s)) for s in others]
    first, last = min(s.sent_s for s in others), max(s.sent_s + s.end_s for s in others)
    begin = max(s.sent_s + s.piece_s[0] for s in decoders)
    end = min(s.sent_s + s.piece_s[-1] for s in decoders)
    alone, during = list[float](), list[float]()
    for sample in decoders:
        for a, b in pairwise(sample.sent_s + piece for piece in sample.piece_s):
            if any(a < over and b > began for began, over in waits):
                during.append(b - a)
            elif begin <= a and b <= end and (b <= first or a >= last):
                alone.append(b - a)
    return alone, during


def _interactive(round_: Round) -> dict[str, float | None]:
    """Compare a short request's TTFT during a long prefill with that on an idle server (P4)."""
    loaded, alone = _role_ttft(round_, "short"), _role_ttft(round_, "alone")
    return {"short TTFT / unloaded": _quotient(loaded, alone)}


def _cancel(round_: Round) -> dict[str, float | None]:
    """Compare a follow-up's TTFT right after another client left with that on an idle server; and count the tokens
    computed for clients that had left."""
    follow, alone = _role_ttft(round_, "follow-up"), _role_ttft(round_, "alone")
    left = [s for s in round_.samples if s.outcome == "left"]
    made = round_.status.get("completion_tokens")
    wasted = None if made is None else made - sum(s.tokens for s in round_.samples)
    return {
        "follow-up TTFT / idle": _quotient(follow, alone),
        "wasted tokens a cancel": wasted / len(left) if wasted is not None and left else None,
    }


def _overload(round_: Round) -> dict[str, float | None]:
    refusal = percentiles(s.end_s for s in round_.samples if s.outcome == "refused")
    refused = [s for s in round_.samples if s.outcome == "refused"]
    with_retry_after = sum(s.retry_after_s is not None for s in refused)
    wrong = sum(s.outcome in ("failed", "incomplete") for s in round_.samples)
    return {
        "refusal p99 s": refusal.p99 if refusal else None,
        "refusals with Retry-After": with_retry_after / len(refused) if refused else None,
        "neither answered nor refused": float(wrong),
        "still waiting at the end": float(sum(s.outcome == "left" and not s.piece_s for s in round_.samples)),
    }


def _mixed(round_: Round) -> dict[str, float | None]:
    return {"short TTFT p50 s": _role_ttft(round_, "short"), "long TTFT s": _role_ttft(round_, "long")}


def _agents(round_: Round) -> dict[str, float | None]:
    first, later = _role_ttft(round_, "first turn"), _role_ttft(round_, "later turn")
    prompt = sum(s.prompt_tokens or 0 for s in round_.samples)
    cached = sum(s.cached_tokens or 0 for s in round_.samples)
    return {
        "later turn TTFT / first": _quotient(later, first),
        "prompt tokens reused": _quotient(cached, prompt),
    }


def _json(round_: Round) -> dict[str, float | None]:
    """Share of valid and of ended answers; and the gaps of free streams beside constrained ones, compared with those
    beside free ones (P16)."""
    constrained = [s for s in round_.samples if s.role == "constrained"]
    alone, beside = _role_gaps(round_, "baseline", "companion"), _role_gaps(round_, "free", "constrained")
    return {
        "valid answers": _valid(constrained),
        "ended answers": _ended(constrained),
        "constrained TTFT p50 s": _role_ttft(round_, "constrained"),
        **_free_gaps(alone, beside),
    }


def _free_gaps(alone: Percentiles | None, beside: Percentiles | None) -> dict[str, float | None]:
    if alone is None or beside is None:
        return {}
    return {
        "free gap p50 / unconstrained": _quotient(beside.p50, alone.p50),
        "free gap p99 / unconstrained": _quotient(beside.p99, alone.p99),
        "free rate kept": _quotient(alone.mean, beside.mean),
    }


def _tools(round_: Round) -> dict[str, float | None]:
    """Share of valid calls and of ended answers, and the cost of later turns."""
    return {"valid calls": _valid(round_.samples), "ended answers": _ended(round_.samples), **_agents(round_)}


def _valid(samples: Sequence[Sample]) -> float | None:
    return _quotient(sum(s.valid for s in samples), sum(s.checked for s in samples))


def _ended(samples: Sequence[Sample]) -> float | None:
    return _quotient(sum(s.finish_reason in ENDS for s in samples), len(samples))


def _role_gaps(round_: Round, role: str, beside: str) -> Percentiles | None:
    """Compute the gaps of one role that began while requests of the role `beside` ran."""
    times = [(s.sent_s, s.sent_s + s.end_s) for s in round_.samples if s.role == beside]
    return percentiles(
        gap
        for s in round_.samples
        if s.role == role
        for at, gap in zip(s.piece_s, s.gaps_s, strict=False)
        if any(began <= s.sent_s + at < ended for began, ended in times)
    )


def _quotient(a: float | None, b: float | None) -> float | None:
    """Return `a / b`; None if either is missing or `b` is 0."""
    return a / b if a is not None and b else None


def _role_ttft(round_: Round, role: str) -> float | None:
    times = percentiles(s.ttft_s for s in round_.samples if s.role == role)
    return times.p50 if times else None


WORKLOAD_FIGURES: dict[str, Callable[[Round], dict[str, float | None]]] = {
    "burst": _burst,
    "stall": _stall,
    "interactive": _interactive,
    "cancel": _cancel,
    "overload": _overload,
    "mixed-length": _mixed,
    "agents": _agents,
    "images": _images,
    "json": _json,
    "tools": _tools,
}
