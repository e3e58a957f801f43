"""Changes to bytes, JSON and protobuf messages, by a random generator."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Sequence
from typing import Any

NUMBERS = (-1, 0, 1, 2, 3, 255, 256, 261, 511, 512, 2**15, 2**31 - 1, 2**31, 2**32, 2**53 + 1, 2**63 - 1, 2**63, 2**64)
FRACTIONS = (0.0, -0.0, 0.5, 1.0, 1e-320, 1e-40, 1e-9, 2.0001, 1e30, 1e308, -1e308, float("nan"), float("inf"), -2.5)
TEXTS = (
    *(
        "",
        " ",
        "a",
        "\0",
        "\x1b[31m",
        "\u202e",
        "\ud800",
        "\udfff\ud800",
        "\ufdd0",
        "\U0001f468\u200d",
        "<|im_end|>",
        "<eos>",
    ),
    *(
        "true",
        "NaN",
        "0.5",
        "-1",
        "{}",
        "[]",
        "{{ 7 * 7 }}",
        "../../etc/passwd",
        "%s%n",
        "';--",
        "a" * 300,
        "\u0351" * 200,
    ),
    *("a" * 100_000, "user", "text", "json_schema", "file:///etc/passwd", "http://169.254.169.254/", "__class__"),
)
BYTES = (
    b"\0",
    b"\xff",
    b"\x80",
    b"\r\n",
    b"\n",
    b"\r",
    b" ",
    b"\t",
    b":",
    b",",
    b"\xed\xa0\x80",
    b"\xff" * 9,
    b"A" * 5000,
)
_DEEPEST = 300


def words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


def value(rng: random.Random, depth: int = 0) -> Any:
    """A JSON value of which any may be where any other is expected."""
    kind = rng.randrange(9)
    if kind == 0:
        return rng.choice((None, True, False))
    if kind <= 2:
        return rng.choice(NUMBERS) * rng.choice((1, 1, -1))
    if kind == 3:
        return rng.choice(FRACTIONS)
    if kind <= 5 or depth > 2:
        return rng.choice(TEXTS)
    if kind == 6:
        return [value(rng, depth + 1) for _ in range(rng.choice((0, 1, 2, 3)))]
    if kind == 7:
        return {rng.choice(TEXTS): value(rng, depth + 1) for _ in range(rng.choice((0, 1, 2)))}
    return nested(rng)


def nested(rng: random.Random) -> Any:
    """Lists in lists, or one value many times."""
    if rng.random() < 0.5:
        return [rng.choice((5, 5.5, "a", None))] * rng.choice((10, 1000, 20_000))
    found: Any = 1
    for _ in range(rng.randrange(_DEEPEST)):
        found = [found] if rng.random() < 0.5 else {"a": found}
    return found


def changed(rng: random.Random, original: Any, keys: Sequence[str], changes: int = 3) -> Any:
    """A copy of an object with up to `changes` changes: a value replaced, a member dropped, one of `keys` added."""
    result = copy.deepcopy(original)
    for _ in range(rng.randint(1, changes)):
        place = rng.choice(_places(result))
        if isinstance(place, dict) and (not place or rng.random() < 0.4):
            place[rng.choice((*keys, rng.choice(TEXTS)))] = value(rng)
        elif place:
            key = rng.choice(list(place)) if isinstance(place, dict) else rng.randrange(len(place))
            if rng.random() < 0.25:
                del place[key]
            else:
                place[key] = _near(rng, place[key]) if rng.random() < 0.4 else value(rng)
    return result


def _near(rng: random.Random, old: Any) -> Any:
    """A value of the same type."""
    if isinstance(old, bool) or old is None:
        return not old
    if isinstance(old, (int, float)):
        return rng.choice((-old, old + 1, old - 1, old * 1000, old / 3, *rng.sample(NUMBERS, 2), rng.choice(FRACTIONS)))
    if isinstance(old, str):
        return rng.choice((old + rng.choice(TEXTS), old[: len(old) // 2], old * 50, rng.choice(TEXTS)))
    if isinstance(old, list):
        return old * rng.choice((0, 2, 30))
    return {**old, rng.choice(TEXTS): value(rng)}


def _places(root: Any) -> list[Any]:
    """Every object and list of a JSON value, itself first."""
    found, pending = [], [root]
    while pending:
        item = pending.pop()
        if isinstance(item, (dict, list)):
            found.append(item)
            pending.extend(item.values() if isinstance(item, dict) else item[:50])
    return found


def written(rng: random.Random, document: Any) -> bytes:
    """JSON of a document, sometimes with a member twice or bytes that are none of it."""
    text = json.dumps(document, ensure_ascii=rng.random() < 0.7, allow_nan=True)
    if rng.random() < 0.05 and text.endswith("}") and len(text) > 2:
        text = text[:-1] + ", " + text[1:]
    data = text.encode("utf-8", "surrogatepass")
    return torn(rng, data) if rng.random() < 0.1 else data


def torn(rng: random.Random, data: bytes) -> bytes:
    """Bytes with one to four changes."""
    for _ in range(rng.randint(1, 4)):
        at, end = sorted((rng.randint(0, len(data)), rng.randint(0, len(data))))
        end = min(end, at + 64)
        change = rng.randrange(6)
        if change == 0:
            data = data[:at] + rng.choice(BYTES) + data[at:]
        elif change == 1:
            data = data[:at] + data[end:]
        elif change == 2:
            data = data[:end] + data[at:end] * rng.choice((1, 2, 100)) + data[end:]
        elif change == 3 and data:
            place = min(at, len(data) - 1)
            data = data[:place] + bytes([data[place] ^ (1 << rng.randrange(8))]) + data[place + 1 :]
        elif change == 4:
            data = data[:at] + rng.randbytes(rng.randint(1, 9)) + data[at:]
        else:
            data = data[: max(1, at)]
    return data
