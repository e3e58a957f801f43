"""Statistics of the owner."""

from __future__ import annotations

from treadle.core.statistics import PrefixStatistics


def test_what_was_counted_before_is_taken_from_counts_and_not_from_what_is_held() -> None:
    """C2: the warm-up's tokens are nobody's."""
    before = PrefixStatistics(looked_up=5, reused=4, copied_bytes=3, stored=2, evicted=1, held=7, held_bytes=8)
    now = PrefixStatistics(looked_up=15, reused=14, copied_bytes=13, stored=12, evicted=11, held=2, held_bytes=3)
    counted = PrefixStatistics(looked_up=10, reused=10, copied_bytes=10, stored=10, evicted=10, held=2, held_bytes=3)
    assert now.since(before) == counted
