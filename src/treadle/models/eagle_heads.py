"""Recognition of EAGLE-3 heads: folders that hold no model, but layers that draft tokens of another one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def is_eagle_head(config: Mapping[str, Any]) -> bool:
    """Return whether `config` is that of an EAGLE-3 head, in Speculators' layout or in the original one, which SGLang
    writes too."""
    names = config.get("architectures")
    named = names if isinstance(names, list) else ()
    return (
        any(isinstance(name, str) and "eagle3" in name.lower() for name in named)
        or "eagle3" in (config.get("speculators_model_type"), config.get("model_type"))
        or "draft_vocab_size" in config
    )
