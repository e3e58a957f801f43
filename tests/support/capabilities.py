"""Capabilities of test runners, given by flat names as in `/v1/status`."""

from __future__ import annotations

from typing import Any

import msgspec

from treadle.core.capabilities import Capabilities, KvCapabilities, SpeculationCapabilities, StepCapabilities

_SPECULATION = {*SpeculationCapabilities.__struct_fields__} - {"lookahead"}
_PLAIN = Capabilities(model="test", architecture="none", vocabulary=1000, context=100, device="cpu", dtype="float32")


def capabilities(base: Capabilities = _PLAIN, **fields: Any) -> Capabilities:
    """Return `base` with other `fields`: its own, those of `steps` and of `speculation`, and those of `kv` with `kv_`
    before them. A step may follow one that verifies drafts, unless `drafts_resolved` is False."""
    kv = {name: fields.pop(f"kv_{name}") for name in KvCapabilities.__struct_fields__ if f"kv_{name}" in fields}
    steps = {name: fields.pop(name) for name in StepCapabilities.__struct_fields__ if name in fields}
    drafts = {name: fields.pop(name) for name in _SPECULATION if name in fields}
    replace = msgspec.structs.replace
    if drafts:
        resolved = fields.pop("drafts_resolved", True)
        steps["speculation"] = replace(base.steps.speculation, lookahead=resolved, **drafts)
    return replace(base, kv=replace(base.kv, **kv), steps=replace(base.steps, **steps), **fields)
