"""Faulty requests, each with the refusal it must get."""

from __future__ import annotations

import json
from typing import Any

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
OK = {"prompt": "x", "max_tokens": 2}
NEST = 2000


def _body(**fields: Any) -> bytes:
    return json.dumps({**OK, **fields}).encode()


def _chat(messages: Any) -> bytes:
    return json.dumps({"messages": messages, "max_tokens": 2}).encode()


HTTP: tuple[tuple[str, bytes, int], ...] = (
    (COMPLETIONS, b"{", 400),
    (COMPLETIONS, b"[1]", 400),
    (COMPLETIONS, b"\xff\xfe", 400),
    (COMPLETIONS, b"[" * NEST, 400),
    (COMPLETIONS, _body(prompt=[]), 400),
    (COMPLETIONS, _body(prompt=[-1]), 400),
    (COMPLETIONS, _body(prompt=[10**30]), 400),
    (COMPLETIONS, _body(prompt=[1 << 20]), 400),
    (COMPLETIONS, _body(prompt={"a": 1}), 400),
    (COMPLETIONS, _body(max_tokens=-1), 400),
    (COMPLETIONS, _body(max_tokens=1.5), 400),
    (COMPLETIONS, _body(temperature="hot"), 400),
    (COMPLETIONS, _body(temperature=-1), 400),
    (COMPLETIONS, b'{"prompt":"x","temperature":NaN}', 400),
    (COMPLETIONS, _body(top_p=0), 400),
    (COMPLETIONS, _body(n=0), 400),
    (COMPLETIONS, _body(n=10**9), 400),
    (COMPLETIONS, _body(stop=[""]), 400),
    (COMPLETIONS, _body(logit_bias={"9999999": 1}), 400),
    (COMPLETIONS, _body(model="another"), 404),
    (CHAT, _chat("hello"), 400),
    (CHAT, _chat([]), 400),
    (CHAT, _chat([{"role": "user"}]), 400),
    (CHAT, _chat([{"role": 7, "content": "x"}]), 400),
    ("/v1/nowhere", _body(), 404),
)
"""Path, body, status."""

RPC: tuple[tuple[str, dict[str, Any], str], ...] = (
    ("empty", {"ids": []}, "INVALID_ARGUMENT"),
    ("beyond the vocabulary", {"ids": [1 << 20]}, "INVALID_ARGUMENT"),
    ("greatest id", {"ids": [2**32 - 1]}, "INVALID_ARGUMENT"),
    ("no input", {"ids": None}, "INVALID_ARGUMENT"),
    ("max_tokens 0", {"max_tokens": 0}, "INVALID_ARGUMENT"),
    ("hot", {"temperature": 9.0}, "INVALID_ARGUMENT"),
    ("not a number", {"temperature": float("nan")}, "INVALID_ARGUMENT"),
    ("top_p", {"top_p": 2.0}, "INVALID_ARGUMENT"),
    ("min_p", {"min_p": -1.0}, "INVALID_ARGUMENT"),
    ("bias", {"logit_bias": {99999999: 1.0}}, "INVALID_ARGUMENT"),
    ("stop token", {"stop_token_ids": [1 << 20]}, "INVALID_ARGUMENT"),
    ("no id", {"request_id": ""}, "INVALID_ARGUMENT"),
)
"""Fault, fields that cause it, status."""
