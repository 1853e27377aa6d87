"""What the diffusion service counts besides its transport and its jobs, for Prometheus. Runs in its API process."""

from collections.abc import Callable, Iterator
from typing import Final, Literal

from prometheus_client import CollectorRegistry, Counter
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from diffusion_service.conditioning_cache import CacheStats

Delivery = Literal["delivered", "refused", "unreachable"]
_DELIVERIES: Final[tuple[Delivery, ...]] = ("delivered", "refused", "unreachable")


class WebhookAccounts:
    """Tries to tell the end of jobs."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._tries = Counter("h3_webhook_tries", "Messages sent, by what came of it.", ["result"], registry=registry)
        self._given_up = Counter("h3_webhook_given_up", "Messages that are not tried again.", registry=registry)
        for result in _DELIVERIES:
            self._tries.labels(result)

    def tried(self, result: Delivery) -> None:
        """A message was sent once."""
        self._tries.labels(result).inc()

    def given_up(self) -> None:
        """It will not be sent again, and was not delivered."""
        self._given_up.inc()


class EncoderCollector(Collector):
    """How many encoders may be asked, looked at when somebody asks."""

    def __init__(self, ready: Callable[[], int], known: int) -> None:
        self._ready = ready
        self._known = known

    def collect(self) -> Iterator[Metric]:
        """One gauge."""
        encoders = GaugeMetricFamily("h3_encoders", "Encoder services that this one was told of.", labels=["state"])
        ready = self._ready()
        encoders.add_metric(["ready"], ready)
        encoders.add_metric(["away"], self._known - ready)
        yield encoders


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
