"""Statistics of the owner: its steps, the runner's memory, the prefix cache and the grammars."""

from __future__ import annotations

import msgspec
from msgspec.structs import replace


class PrefixStatistics(msgspec.Struct, frozen=True, omit_defaults=True):
    """Statistics of the prefix cache. Since the owner started: tokens looked up, reused, stored and evicted, and bytes
    copied to reuse them. Now: tokens held, and their bytes."""

    looked_up: int = 0
    reused: int = 0
    copied_bytes: int = 0
    stored: int = 0
    evicted: int = 0
    held: int = 0
    held_bytes: int = 0

    def since(self, before: PrefixStatistics) -> PrefixStatistics:
        """Return the statistics with what was counted after `before`."""
        counted = ("looked_up", "reused", "copied_bytes", "stored", "evicted")
        return replace(self, **{name: getattr(self, name) - getattr(before, name) for name in counted})


class GrammarStatistics(msgspec.Struct, frozen=True, omit_defaults=True):
    """Statistics of grammars. Since the owner started: grammars `compiled` and `failed`, seconds of compiling, and
    sequences with `close_at_limit` for which no completion was found (`not_closed`). Now: grammars in the cache, and
    characters of their texts."""

    compiled: int = 0
    failed: int = 0
    compile_s: float = 0.0
    not_closed: int = 0
    cached: int = 0
    cached_chars: int = 0


class DrafterStatistics(msgspec.Struct, frozen=True, omit_defaults=True):
    """Cache of a drafter with a model or a head: bytes that running sequences hold, tokens that it has yet to compute
    of those that have no drafts until then (`backlog`), and its prefix cache."""

    kv_bytes: int = 0
    backlog: int = 0
    prefix: PrefixStatistics = PrefixStatistics()


class ScorerStatistics(msgspec.Struct, frozen=True, omit_defaults=True):
    """Cache of the scorer of SpecPrefill: `prompts` in it that are being scored, the bytes that they hold, and its
    prefix cache."""

    prompts: int = 0
    kv_bytes: int = 0
    prefix: PrefixStatistics = PrefixStatistics()


class FeatureStatistics(msgspec.Struct, frozen=True, omit_defaults=True):
    """Features of images that the runner keeps. Since the owner started: images `stored` and `evicted`. Now: images
    held, and their bytes, of which running sequences need `needed_bytes`."""

    stored: int = 0
    evicted: int = 0
    held: int = 0
    held_bytes: int = 0
    needed_bytes: int = 0


class VisionStatistics(msgspec.Struct, frozen=True, omit_defaults=True):
    """Statistics of images. Since the owner started: images `encoded`, and those that sequences took over from others
    (`reused`), without those in cached prefixes; seconds of encoding. Now: images that sequences wait for."""

    encoded: int = 0
    reused: int = 0
    encode_s: float = 0.0
    awaited: int = 0


class RunnerStatistics(msgspec.Struct, frozen=True, omit_defaults=True):
    """Memory of the runner in bytes; `kv_bytes` is what running sequences hold."""

    active_bytes: int = 0
    peak_bytes: int = 0
    cache_bytes: int = 0
    kv_bytes: int = 0
    prefix: PrefixStatistics = PrefixStatistics()
    grammars: GrammarStatistics = GrammarStatistics()
    drafter: DrafterStatistics = DrafterStatistics()
    scorer: ScorerStatistics = ScorerStatistics()
    features: FeatureStatistics = FeatureStatistics()


class SpeculationStatistics(msgspec.Struct, frozen=True, omit_defaults=True):
    """Statistics of speculative decoding. Since the owner started: `steps` that verified draft tokens, for `rows`
    sequences in all, which had `drafted` tokens verified and `accepted` of them, and so `gained` more tokens than in
    plain steps. Now: whether drafts are verified (`on`), the `reason` if not, the `chances` of the first places, if
    those before are accepted, and those of looked up drafts' first places, by the least number of matching tokens
    (`match_chances`)."""

    steps: int = 0
    rows: int = 0
    drafted: int = 0
    accepted: int = 0
    gained: int = 0
    on: bool = False
    reason: str = ""
    chances: tuple[float, ...] = ()
    match_chances: tuple[tuple[int, float], ...] = ()


class SpecPrefillStatistics(msgspec.Struct, frozen=True, omit_defaults=True):
    """Statistics of SpecPrefill. Since the owner started: `prompts` that are prefilled in part, the tokens of theirs
    that were scored, and those that were `kept_tokens` of these; prompts that could not be scored (`failed`), which are
    prefilled whole, with the last `reason`; and seconds of scoring. Now: prompts that are being scored."""

    prompts: int = 0
    scored_tokens: int = 0
    kept_tokens: int = 0
    failed: int = 0
    reason: str = ""
    scoring_s: float = 0.0
    scoring: int = 0


class EngineStatistics(msgspec.Struct, frozen=True, omit_defaults=True):
    """Statistics of the owner after a step. Counters count since it started; times are in seconds. `preempted` are
    sequences that gave up their cache memory for others; `cached_tokens` were reused instead of computed. Of the
    `completion_tokens`, `forced_tokens` were not sampled, as a grammar allowed no others. Of the `waiting` sequences,
    `awaiting_grammar` wait for their grammars."""

    steps: int = 0
    running: int = 0
    prefilling: int = 0
    waiting: int = 0
    awaiting_grammar: int = 0
    oldest_wait_s: float = 0.0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    forced_tokens: int = 0
    finished: int = 0
    cancelled: int = 0
    expired: int = 0
    failed: int = 0
    recovered_steps: int = 0
    preempted: int = 0
    cached_tokens: int = 0
    step_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    speculation: SpeculationStatistics = SpeculationStatistics()
    spec_prefill: SpecPrefillStatistics = SpecPrefillStatistics()
    vision: VisionStatistics = VisionStatistics()
    runner: RunnerStatistics = RunnerStatistics()
