"""How a model's rows are kept on a device, and in how much memory."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import mlx.core as mx

from ...errors import ConfigError
from ..device import memory as mem
from ..device.guard import OutOfMemory
from ..kv.paged.backend import PAGE
from ..mlxlm import MlxLm
from .own_backend import Own, paged, stock
from .profile_run import steps_bytes

_log = logging.getLogger(__name__)
ENOUGH = 0.4
"""Of the memory that the weights leave: less for caches means shorter steps."""
LEAST_STEP = 256
_FIX = "leave `kv_bits` out, and lower `context` or `max_running` where memory is short"


@dataclass(frozen=True)
class Kept:
    """Rows in a layout of this server's own, or why not; what a row costs there, the bytes there are for all, and how
    many tokens of prompts a step may compute beside them (0: as many as are asked for)."""

    own: Own | str
    kv: mem.KvCost
    budget: int
    prefill_tokens: int = 0


def check_bits(kv_bits: int | None, device: str) -> None:
    """Raises ConfigError for keys and values of so many bits where nothing reads them at a gain."""
    if kv_bits == 4:
        raise ConfigError(
            f"keys and values of 4 bits change what a model says (docs/performance.md has figures): use 8, or {_FIX}",
            param="kv_bits",
        )
    if kv_bits and device != "cuda":
        raise ConfigError(
            f"only the CUDA kernels read keys and values of {kv_bits} bits at a gain, and this is {device}: {_FIX}",
            param="kv_bits",
        )


@dataclass(frozen=True)
class Asked:
    """A device, and what is wanted there: bytes for all rows, if anyone said how many, for up to `max_running` of them;
    whether prefixes are kept for others; keys and values of so many bits, if not the model's own; and steps of up to
    `prefill_tokens` tokens of prompts."""

    device: str
    memory: int | None
    max_running: int
    keeps: bool
    bits: int | None = None
    prefill_tokens: int = 2048


def left_to_mlx_lm(measured: mem.KvCost, asked: Asked) -> Kept:
    """In mlx-lm's caches, whatever the model."""
    return Kept("not asked for", measured, mem.kv_budget(asked.memory, asked.device))


def choose(library: MlxLm, module: Any, measured: mem.KvCost, asked: Asked) -> Kept:
    """In pages where the kernels can read them, in buffers of their own elsewhere. `measured` is what a row costs in
    mlx-lm's caches. Raises ConfigError where bits were asked for and can't be had."""
    device = asked.device
    if device == "cuda":
        budget = mem.kv_budget(asked.memory, device, mem.PAGES_SHARE)
        own = paged(library, module, budget=budget, keeps=asked.keeps, bits=asked.bits or 16)
        if isinstance(own, Own):
            return _measured(own, module, budget, asked)
        if asked.bits:
            raise ConfigError(f"no keys and values of {asked.bits} bits for this model: {own}. {_FIX}", param="kv_bits")
        _log.warning("attention kernels are not used: %s", own)
    budget = mem.kv_budget(asked.memory, device)
    blocks = mem.blocks(measured, budget, asked.max_running)
    own = stock(library, module, blocks=blocks, budget=budget, keeps=asked.keeps, device=device)
    return Kept(own, measured, budget)


def _measured(own: Own, module: Any, budget: int, asked: Asked) -> Kept:
    """In no more pages than steps leave memory for, where nobody said how many; in shorter steps where those of the
    length that was asked for would leave too little."""
    kv = mem.KvCost(own.page_bytes // PAGE, 0)
    if asked.memory is not None or own.pages is None:
        return Kept(own, kv, budget)
    tokens = asked.prefill_tokens
    while (left := _left(own, module, tokens, asked.device)) < ENOUGH * budget and tokens > LEAST_STEP:
        tokens = max(LEAST_STEP, tokens // 2)
    if not left:
        raise ConfigError(
            f"the weights leave no memory for a step of {tokens} tokens of prompts: use a smaller or a quantized model",
            param="prefill_tokens",
        )
    if tokens < asked.prefill_tokens:
        _log.info("steps of up to %d tokens of prompts, not %d: memory is short", tokens, asked.prefill_tokens)
    budget = min(budget, left)
    new_layout = partial(own.pages, budget // own.page_bytes, asked.keeps)
    return Kept(replace(own, new_layout=new_layout), kv, budget, tokens)


def _left(own: Own, module: Any, tokens: int, device: str) -> int:
    """Bytes that steps of so many tokens leave; 0 where not even these fit."""
    try:
        steps = steps_bytes(own, module, tokens)
    except OutOfMemory:
        return 0
    finally:
        mx.clear_cache()
    return mem.left_by(steps, device)
