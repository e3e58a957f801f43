"""Requests and answers that `/docs` shows if the OpenAPI document holds no example: those of the demo model."""

from __future__ import annotations

from typing import Any

_CHAT_ID = "chatcmpl-156f3d2b4f97a5716ea3853aa1be474d"
_CHUNK = {"id": _CHAT_ID, "object": "chat.completion.chunk", "created": 1795338816, "model": "demo"}


def _usage(prompt: int, completion: int, cached: int) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }


REQUESTS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "model": "demo",
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
        "max_tokens": 40,
    },
    "/v1/messages": {
        "model": "demo",
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
        "max_tokens": 40,
    },
    "/v1/messages/count_tokens": {
        "model": "demo",
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
    },
    "/v1/completions": {
        "model": "demo",
        "prompt": "Water boils at a temperature of",
        "max_tokens": 8,
        "temperature": 0,
    },
    "/tokenize": {"model": "demo", "prompt": "The capital of France is Paris."},
    "/detokenize": {"model": "demo", "tokens": [2, 9, 7]},
    "/v1/embeddings": {"model": "demo", "input": ["The capital of France is Paris.", "A loom weaves cloth."]},
}

FIELDS: dict[str, Any] = {
    "messages": [
        {"role": "system", "content": "Answer in one sentence."},
        {"role": "user", "content": "What is the capital of France?"},
        {"role": "assistant", "content": "The capital of France is Paris."},
        {"role": "user", "content": [{"type": "text", "text": "And of Italy?"}]},
    ],
    "prompt": ["The capital of France is", "The capital of Italy is"],
    "input": ["The capital of France is Paris.", "A loom weaves cloth."],
}

MODEL_CARD = {
    "id": "demo",
    "object": "model",
    "created": 1795338680,
    "owned_by": "treadle",
    "context_length": 32768,
    "max_model_len": 32768,
    "modalities": ["text"],
}

ANSWERS: dict[tuple[str, str], Any] = {
    ("post", "/v1/chat/completions"): {
        "id": _CHAT_ID,
        "object": "chat.completion",
        "created": 1795338816,
        "model": "demo",
        "system_fingerprint": "fp_96b894fc0957",
        "choices": [
            {
                "index": 0,
                "logprobs": None,
                "finish_reason": "stop",
                "message": {"role": "assistant", "content": " The capital of France is Paris.", "refusal": None},
            }
        ],
        "usage": _usage(13, 10, 12),
    },
    ("post", "/tokenize"): {
        "count": 8,
        "max_model_len": 32768,
        "tokens": [2, 818, 5279, 529, 7001, 563, 9079, 236761],
        "token_strs": None,
    },
    ("post", "/detokenize"): {"prompt": "<bos><unused3><unused1>"},
    ("get", "/tokenizer_info"): {
        "tokenizer_class": "GemmaTokenizer",
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "pad_token": "<pad>",
        "chat_template": "{{ bos_token }}…",
    },
    ("post", "/v1/completions"): {
        "id": "cmpl-a61640cc0f3385d111bf4a833e0d2286",
        "object": "text_completion",
        "created": 1795339023,
        "model": "demo",
        "system_fingerprint": "fp_96b894fc0957",
        "choices": [
            {"index": 0, "text": " 100 degrees Celsius.\n\n", "logprobs": None, "finish_reason": "length"},
        ],
        "usage": _usage(7, 8, 1),
    },
    ("post", "/v1/messages"): {
        "id": "msg_d4c1a0a7c0e34b0f9b4d8e5a6f1b2c3d",
        "type": "message",
        "role": "assistant",
        "model": "demo",
        "content": [{"type": "text", "text": " The capital of France is Paris.", "citations": None}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "stop_details": None,
        "container": None,
        "usage": {
            "input_tokens": 13,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
            "server_tool_use": None,
            "output_tokens": 10,
            "output_tokens_details": {"thinking_tokens": 0},
            "cache_creation": None,
            "inference_geo": None,
            "service_tier": "standard",
        },
    },
    ("post", "/v1/messages/count_tokens"): {"input_tokens": 13},
    ("get", "/"): {
        "name": "treadle",
        "version": "0.1.0",
        "model": "demo",
        "state": "ready",
        "ready": True,
        "reason": "",
        "base_url": "http://127.0.0.1:8000/v1",
        "links": {"docs": "/docs", "openapi": "/openapi.json", "status": "/v1/status", "metrics": "/metrics"},
    },
    ("get", "/v1/models"): {
        "object": "list",
        "data": [MODEL_CARD],
    },
    ("get", "/v1/models/{model}"): MODEL_CARD,
    ("get", "/health/live"): {"status": "ok", "state": "starting", "reason": "reading the weights"},
    ("get", "/health/ready"): {"status": "ok", "state": "ready", "reason": ""},
    ("get", "/health"): {"status": "ok", "state": "ready", "reason": ""},
    ("get", "/v1/status"): {
        "state": "ready",
        "ready": True,
        "reason": "",
        "path": "batched",
        "compute": {
            "summary": "contiguous, blas",
            "backend": "contiguous",
            "best": "contiguous",
            "fused": False,
            "lookahead": 0,
            "shared_prefill": True,
            "kernels": [{"name": "blas", "state": "active", "reason": "OpenBLAS 0.3.29, up to 8 threads"}],
            "why": [],
            "tested_tokens": 524,
            "deviation": 0.9,
        },
        "admission": {
            "capacity": 16,
            "max_waiting": 16,
            "max_wait_s": 4.0,
            "rows": 1,
            "accepted": 7,
            "refused": {"engine_unavailable": 1},
            "ended": {"stop": 4, "length": 2},
            "running": 1,
            "waiting": 0,
            "oldest_wait_s": 0.0,
        },
        "requests": [
            {
                "id": _CHAT_ID,
                "kind": "chat",
                "phase": "decode",
                "waits_for": None,
                "path": "batched",
                "age_s": 0.71,
                "prompt_tokens": 13,
                "prompt_tokens_done": 13,
                "completion_tokens": 4,
                "cached_tokens": 12,
                "max_tokens": 40,
            }
        ],
        "engine": {
            "state": "ready",
            "pid": 7665,
            "restarts": 0,
            "load_s": 15.39,
            "last_step": 41,
            "last_heard_s": 0.02,
        },
        "capabilities": {"model": "gemma-3-270m", "architecture": "gemma3_text", "context": 32768, "device": "cpu"},
        "model": "demo",
        "uptime_s": 137.035,
        "event_loop_lag": {"samples": 1200.0, "p50_ms": 0.295, "p99_ms": 5.047, "max_ms": 44.549},
        "prefix_cache": {"enabled": True, "looked_up_tokens": 25, "reused_tokens": 12, "hit_rate": 0.48},
    },
    ("post", "/v1/prefix_cache/reset"): {"dropped_tokens": 37},
    ("get", "/metrics"): (
        "# HELP treadle_running Sequences running, prefill included\n# TYPE treadle_running gauge\n"
        "treadle_running 1.0\n…"
    ),
}

ANSWERS["post", "/v1/embeddings"] = {
    "object": "list",
    "data": [
        {"object": "embedding", "index": 0, "embedding": [0.0123, -0.0456, 0.0311]},
        {"object": "embedding", "index": 1, "embedding": [0.0257, 0.0018, -0.0702]},
    ],
    "model": "demo",
    "usage": {"prompt_tokens": 16, "total_tokens": 16},
}
"""Of 640 numbers each, abridged."""

STREAM: dict[str, list[dict[str, Any]]] = {
    "/v1/chat/completions": [
        {**_CHUNK, "choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]},
        {**_CHUNK, "choices": [{"index": 0, "delta": {"content": " Paris"}, "finish_reason": None}]},
        {**_CHUNK, "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]},
        {**_CHUNK, "choices": [], "usage": _usage(13, 10, 12)},
    ],
}
"""Chunks of a stream, abridged."""
