"""What the diffusion service counts besides its transport, for Prometheus. Runs in its API process."""

from collections.abc import Callable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from diffusion_service.conditioning_cache import CacheStats


class CacheCollector(Collector):
    """The conditioning cache, looked at when somebody asks."""

    def __init__(self, stats: Callable[[], CacheStats]) -> None:
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        """Gauges of now and counters since the start."""
        stats = self._stats()
        yield GaugeMetricFamily(
            "h3_conditioning_cache_entries", "Payloads that are kept; each is a landing.", stats.entries
        )
        yield GaugeMetricFamily("h3_conditioning_cache_bytes", "Of these payloads.", stats.bytes)
        yield CounterMetricFamily("h3_conditioning_cache_hits", "Jobs that were not encoded again.", stats.hits)
        yield CounterMetricFamily("h3_conditioning_cache_misses", "Jobs whose payload was not there.", stats.misses)
