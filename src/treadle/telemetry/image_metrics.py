"""Metrics of images: their encoding, and the features that are kept."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Gauge

from ..core.statistics import EngineStatistics
from .counters import StatisticsCounters

_ENCODED = (
    ("encoded", "encoded", "images encoded"),
    ("reused", "reused", "images whose features were taken over from other requests"),
    ("encode_s", "encode_seconds", "seconds of steps that encoded"),
)
_KEPT = (("evicted", "evicted", "images whose features were evicted"),)


class ImageMetrics:
    """Counts images, and shows what waits for them and what is kept."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._encoded = StatisticsCounters(registry, "treadle_images", "Vision", _ENCODED)
        self._kept = StatisticsCounters(registry, "treadle_image_features", "Vision", _KEPT)
        self._awaited = Gauge("treadle_images_awaited", "Vision: images that sequences wait for", registry=registry)
        self._bytes = Gauge("treadle_image_features_bytes", "Vision: bytes of features kept", registry=registry)

    def step(self, before: EngineStatistics, now: EngineStatistics) -> None:
        """Take over the statistics of a step; `before` are those of the one before, in the same engine."""
        if now.vision != before.vision:
            self._encoded.step(before.vision, now.vision)
            self._awaited.set(now.vision.awaited)
        if now.runner.features != before.runner.features:
            self._kept.step(before.runner.features, now.runner.features)
            self._bytes.set(now.runner.features.held_bytes)
