"""Named workloads: pure functions of a seed, a round and options to timed requests. Rounds differ in their words only:
a server that caches prompts must not be faster in the second."""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from .errors import BenchError
from .lorem import Source, text
from .pictures import Picture
from .plan import Moment, PromptMessage, Request, Workload
from .structured import json_requests, tool_requests

MOST = 1_000_000
"""The greatest value of any option."""
SWEEP = (1, 2, 4, 8, 16, 32, 64, 128, 256)
SWEEP_ABOUT = "the same requests by 1, 2, 4 ... `most` clients at once: throughput against concurrency"
SWEEP_DEFAULTS = {"most": float(SWEEP[-1]), "prompt": 32.0, "tokens": 32.0, "each": 2.0}
Options = Mapping[str, float]


@dataclass(frozen=True)
class WorkloadKind:
    """One named workload: its purpose, its options with their defaults, and the function that makes it."""

    about: str
    defaults: dict[str, float]
    make: Callable[[random.Random, Options], Sequence[Request]]
    concurrency: str = ""  # the option that bounds the client's open requests


def build(name: str, seed: int, overrides: Options | None = None, *, round_: int = 1) -> list[Workload]:
    """Build the workload called `name`, or for `sweep` one per concurrency. Raises BenchError for unknown names,
    options and values."""
    if name == "sweep":
        return _sweep(seed, dict(overrides or {}), round_)
    kind = KINDS.get(name)
    if kind is None:
        raise BenchError(f"there is no workload '{name}': use one of {', '.join([*KINDS, 'sweep'])}")
    options = _options(name, kind.defaults, overrides or {})
    requests = tuple(kind.make(Source(f"{name} {seed} {round_}"), options))
    concurrency = int(options[kind.concurrency]) if kind.concurrency else 0
    return [Workload(_label(name, overrides or {}), seed, options, requests, concurrency)]


def _label(name: str, overrides: Options) -> str:
    """Return the name with the given options, such as "burst c=16", so that a run may have the same workload in several
    sizes."""
    return " ".join([name, *(f"{key}={value:g}" for key, value in overrides.items())])


def digest(*rounds: Workload) -> str:
    """Return a hash of the requests."""
    return hashlib.sha256(b"".join(map(msgspec.json.encode, rounds))).hexdigest()[:16]


def _options(name: str, defaults: Options, overrides: Options) -> dict[str, float]:
    for key, value in overrides.items():
        if key not in defaults:
            raise BenchError(f"workload '{name}' has no option '{key}': it has {', '.join(defaults)}")
        if not 0 <= value < float("inf") or (not value and not key.endswith("_s")):
            raise BenchError(f"option {key}={value:g} of workload '{name}' must be above 0")
        if value > MOST:
            raise BenchError(f"option {key}={value:g} of workload '{name}' must be {MOST:,} or less")
    return dict(defaults) | dict(overrides)


def _user(rng: random.Random, words: float) -> tuple[PromptMessage, ...]:
    return (PromptMessage("user", text(rng, int(words))),)


def _burst(rng: random.Random, options: Options) -> list[Request]:
    return [
        Request(f"{i}", _user(rng, options["prompt"]), int(options["tokens"]), at_s=i * options["every_s"])
        for i in range(4 * int(options["c"]))
    ]


def _closed(rng: random.Random, options: Options) -> list[Request]:
    """Clients that each send their next request when the last one is answered."""
    requests = []
    for client in range(int(options["c"])):
        for turn in range(int(options["each"])):
            after = Moment(f"{client}.{turn - 1}") if turn else None
            prompt = _user(rng, options["prompt"])
            requests.append(Request(f"{client}.{turn}", prompt, int(options["tokens"]), after=after))
    return requests


def _agents(rng: random.Random, options: Options) -> list[Request]:
    """Agents of one application: a system prompt they share, then turns that each carry the whole conversation. The
    assistant's turns are scripted, so that every server reads the same."""
    system = PromptMessage("system", text(rng, int(options["system"])))
    requests = []
    for agent in range(int(options["agents"])):
        conversation: tuple[PromptMessage, ...] = (system,)
        for turn in range(int(options["turns"])):
            conversation = (*conversation, PromptMessage("user", text(rng, int(options["turn"]))))
            requests.append(
                Request(
                    f"{agent}.{turn}",
                    conversation,
                    int(options["tokens"]),
                    at_s=agent * options["every_s"],
                    after=Moment(f"{agent}.{turn - 1}") if turn else None,
                    role="later turn" if turn else "first turn",
                    session=f"{agent}",
                )
            )
            conversation = (*conversation, PromptMessage("assistant", text(rng, int(options["tokens"]))))
    return requests


def _decoders(rng: random.Random, options: Options, leave: Moment) -> list[Request]:
    return [
        Request(f"decoder {i}", _user(rng, 20), int(options["tokens"]), leave=leave, role="decoder")
        for i in range(int(options["decoders"]))
    ]


def _warm(decoders: Sequence[Request], options: Options) -> Moment:
    """The moment at which all decoders have run alone for a while."""
    return Moment(decoders[-1].id, "token", int(options["lead"]), delay_s=options["alone_s"])


def _stall(rng: random.Random, options: Options) -> list[Request]:
    """Decoders run alone, with a long prompt, and alone again: a machine's speed drifts."""
    decoders = _decoders(rng, options, Moment("long", delay_s=options["alone_s"]))
    warm = _warm(decoders, options)
    return [*decoders, Request("long", _user(rng, options["prompt"]), 1, after=warm, role="long")]


def _interactive(rng: random.Random, options: Options) -> list[Request]:
    """Short requests on an idle server, then short ones while a long prompt prefills beside decoders."""
    short = [_user(rng, options["short"]) for _ in range(2 * int(options["times"]))]
    times, tokens = int(options["times"]), int(options["short_tokens"])
    alone = [
        Request(f"alone {i}", short[i], tokens, after=Moment(f"alone {i - 1}") if i else None, role="alone")
        for i in range(times)
    ]
    begin = Moment(alone[-1].id)
    decoders = [msgspec.structs.replace(request, after=begin) for request in _decoders(rng, options, Moment("long"))]
    warm = Moment(decoders[-1].id, "token", 4)
    long = Request("long", _user(rng, options["prompt"]), 1, after=warm, role="long")
    short_requests = [
        Request(
            f"short {i}",
            short[times + i],
            tokens,
            after=Moment(f"short {i - 1}") if i else Moment("long", "sent", delay_s=options["delay_s"]),
            leave=Moment("long"),
            role="short",
        )
        for i in range(times)
    ]
    return [*alone, *decoders, long, *short_requests]


def _cancel(rng: random.Random, options: Options) -> list[Request]:
    """First follow-ups alone; then a storm: a client leaves at a random phase, and a follow-up comes at once."""
    tokens, short = int(options["tokens"]), int(options["short_tokens"])
    alone = [
        Request(
            f"alone {i}",
            _user(rng, options["prompt"]),
            short,
            after=Moment(f"alone {i - 1}") if i else None,
            role="alone",
        )
        for i in range(5)
    ]
    storm: list[Request] = []
    before = alone[-1].id
    for i in range(int(options["times"])):
        id_ = f"leaver {i}"
        in_stream = rng.random() < 0.7
        leave = (
            Moment(id_, "token", rng.randint(1, tokens // 2))
            if in_stream
            else Moment(id_, "sent", delay_s=rng.random() * options["early_s"])
        )
        storm.append(
            Request(id_, _user(rng, options["prompt"]), tokens, after=Moment(before), leave=leave, role="leaver")
        )
        before = f"follow-up {i}"
        storm.append(Request(before, _user(rng, options["prompt"]), short, after=Moment(id_), role="follow-up"))
    return [*alone, *storm]


def _overload(rng: random.Random, options: Options) -> list[Request]:
    """Clients numbering `times` times `fits`, each sending its next request about `pause_s` after its last one ended.
    After `lasts_s` they all leave, so that a server which queues everyone is measured too."""
    clients = int(options["times"] * options["fits"])
    pause_s, lasts_s = options["pause_s"], options["lasts_s"]
    over = Moment("0.0", "sent", delay_s=lasts_s)
    requests = []
    for client in range(clients):
        at_s = rng.random() if client else 0.0
        for turn in range(math.ceil(lasts_s / max(pause_s, 0.1))):
            pause = Moment(f"{client}.{turn - 1}", delay_s=pause_s * rng.uniform(0.5, 1.5))
            requests.append(
                Request(
                    f"{client}.{turn}",
                    _user(rng, options["prompt"]),
                    int(options["tokens"]),
                    at_s=0.0 if turn else at_s,
                    after=pause if turn else None,
                    leave=over,
                )
            )
    return requests


def _mixed(rng: random.Random, options: Options) -> list[Request]:
    """One long context decodes among short requests."""
    long = Request(
        "long", _user(rng, options["prompt"]), int(options["long_tokens"]), role="long", leave=Moment("short last")
    )
    count = int(options["requests"])
    names = [*(f"short {i}" for i in range(count - 1)), "short last"]
    started = Moment("long", "token")
    width = int(options["c"])
    shorts = [
        Request(
            name,
            _user(rng, options["short"]),
            int(options["tokens"]),
            after=started if i < width else Moment(names[i - width]),
            role="short",
        )
        for i, name in enumerate(names)
    ]
    return [long, *shorts]


def _images(rng: random.Random, options: Options) -> list[Request]:
    """Decoders of text run alone; then clients send images, each with a question and with a second one about the same
    image. Then the decoders run alone again."""
    count, width = int(options["images"]), int(options["c"])
    decoders = _decoders(rng, options, Moment(f"second {count - 1}", delay_s=options["alone_s"]))
    warm = _warm(decoders, options)
    requests = []
    for i in range(count):
        picture = Picture(int(options["width"]), int(options["height"]), rng.getrandbits(53))
        after = warm if i < width else Moment(f"second {i - width}")
        for role in ("first", "second"):
            asked = PromptMessage("user", text(rng, int(options["prompt"])), pictures=(picture,))
            requests.append(Request(f"{role} {i}", (asked,), int(options["answer"]), after=after, role=role))
            after = Moment(f"first {i}")
    return [*decoders, *requests]


def _poisson(rng: random.Random, options: Options) -> list[Request]:
    at, requests = 0.0, list[Request]()
    for i in range(int(options["requests"])):
        requests.append(Request(f"{i}", _user(rng, options["prompt"]), int(options["tokens"]), at_s=at))
        at += rng.expovariate(options["rate"])
    return requests


def _sweep(seed: int, overrides: dict[str, float], round_: int) -> list[Workload]:
    options = _options("sweep", SWEEP_DEFAULTS, overrides)
    largest = options.pop("most")
    levels = [c for c in SWEEP if c <= largest]
    if not levels:
        raise BenchError(f"option most={largest:g} of workload 'sweep' must be at least 1")
    return [
        Workload(
            f"sweep c={c}",
            seed,
            options | {"c": float(c)},
            tuple(_closed(Source(f"sweep {c} {seed} {round_}"), options | {"c": float(c)})),
            c,
        )
        for c in levels
    ]


KINDS: dict[str, WorkloadKind] = {
    "burst": WorkloadKind(
        "requests that come every 100 ms, c of them at a time: is the time to first token flat?",
        {"c": 4, "every_s": 0.1, "prompt": 16, "tokens": 64},
        _burst,
        "c",
    ),
    "chat": WorkloadKind(
        "clients that chat: D(100,256)", {"c": 4, "each": 3, "prompt": 100, "tokens": 256}, _closed, "c"
    ),
    "agent": WorkloadKind(
        "clients with long prompts: D(2500,256)", {"c": 2, "each": 2, "prompt": 2500, "tokens": 256}, _closed, "c"
    ),
    "agents": WorkloadKind(
        "agents that share a long system prompt and grow their conversation turn by turn",
        {"agents": 4, "turns": 4, "system": 1000, "turn": 60, "tokens": 48, "every_s": 0.5},
        _agents,
    ),
    "json": WorkloadKind(
        "c clients, half of them with a JSON schema: are answers valid, and what do the free ones lose?",
        {"c": 4, "each": 3, "prompt": 32, "tokens": 96, "json_tokens": 256, "properties": 6, "schemas": 4},
        json_requests,
    ),
    "tools": WorkloadKind(
        "agents that must call one tool in each turn, with the results of earlier calls: are the calls valid?",
        {
            "agents": 4,
            "turns": 3,
            "system": 100,
            "turn": 30,
            "tokens": 256,
            "tools": 4,
            "properties": 4,
            "every_s": 0.5,
        },
        tool_requests,
    ),
    "stall": WorkloadKind(
        "one long prompt joins decoding clients: do they keep their rate?",
        {"decoders": 4, "prompt": 2000, "tokens": 4096, "lead": 24, "alone_s": 1.0},
        _stall,
    ),
    "interactive": WorkloadKind(
        "short requests while a long prompt is read: how long do they wait?",
        {"decoders": 2, "prompt": 2000, "tokens": 1024, "short": 12, "short_tokens": 2, "times": 5, "delay_s": 0.3},
        _interactive,
    ),
    "cancel": WorkloadKind(
        "clients that leave at random phases, and a follow-up after each",
        {"times": 20, "prompt": 60, "tokens": 128, "short_tokens": 2, "early_s": 0.3},
        _cancel,
    ),
    "overload": WorkloadKind(
        "many times the clients that fit, each trying again until `lasts_s` are over",
        {"times": 10, "fits": 32, "lasts_s": 30, "prompt": 16, "tokens": 16, "pause_s": 1.0},
        _overload,
    ),
    "mixed-length": WorkloadKind(
        "short requests while one long context decodes",
        {"prompt": 2000, "long_tokens": 1024, "short": 16, "tokens": 32, "requests": 16, "c": 4},
        _mixed,
    ),
    "images": WorkloadKind(
        "images come while text decodes: do decoders keep their rate, and is a second question about an image cheap?",
        {
            "decoders": 4,
            "tokens": 4096,
            "lead": 24,
            "alone_s": 1.0,
            "images": 8,
            "c": 4,
            "width": 1024,
            "height": 1024,
            "prompt": 12,
            "answer": 16,
        },
        _images,
    ),
    "poisson": WorkloadKind(
        "requests that come at random, `rate` a second",
        {"rate": 1.0, "requests": 30, "prompt": 100, "tokens": 64},
        _poisson,
    ),
}
