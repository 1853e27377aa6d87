"""What a transport has done, as Prometheus metrics. Runs in both API processes; no torch.

A sender's service counts its pushes, the receiver's counts what arrived, how long it waited for room, and its slab.
"""

from collections.abc import Callable, Iterator
from typing import Literal

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from shared_runtime.transport.slab import SlabStats

TransportName = Literal["shm", "nixl", "inline"]
_SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10)
_RATES = tuple(step * 10**power for power in (7, 8, 9, 10) for step in (1, 2, 5))
_WAITS = (0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 300)


class TransportAccounts:
    """Pushes of one service, by transport."""

    def __init__(self, registry: CollectorRegistry) -> None:
        label = ["transport"]
        self._bytes = Counter("h3_transport_bytes", "Payload bytes pushed.", label, registry=registry)
        self._seconds = Histogram(
            "h3_transport_seconds", "Of one push, its copy alone.", label, buckets=_SECONDS, registry=registry
        )
        self._rate = Histogram(
            "h3_transport_bytes_per_second", "Rate of one push.", label, buckets=_RATES, registry=registry
        )
        self._waits = Histogram(
            "h3_transport_wait_seconds",
            "Pushes that waited for room in the slab, and how long.",
            label,
            buckets=_WAITS,
            registry=registry,
        )
        self._failures = Counter(
            "h3_transport_failures",
            "Pushes that failed, by error code.",
            ["transport", "code"],
            registry=registry,
        )

    def pushed(self, transport: TransportName, nbytes: int, seconds: float) -> None:
        """One push is complete; `seconds` are those of its copy."""
        self._bytes.labels(transport).inc(nbytes)
        self._seconds.labels(transport).observe(seconds)
        if seconds > 0:
            self._rate.labels(transport).observe(nbytes / seconds)

    def waited(self, transport: TransportName, seconds: float) -> None:
        """One push found no room at once."""
        self._waits.labels(transport).observe(seconds)

    def failed(self, transport: TransportName, code: str) -> None:
        """One push did not arrive; `code` is an error's of `shared_schema.errors`."""
        self._failures.labels(transport, code).inc()


class SlabCollector(Collector):
    """The receiver's slab, looked at when somebody asks."""

    def __init__(self, transport: TransportName, stats: Callable[[], SlabStats]) -> None:
        self._transport = transport
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        """Gauges of now and counters since the start."""
        stats = self._stats()
        for name, text, value in (
            ("h3_slab_bytes", "Size of the slab.", stats.size),
            ("h3_slab_used_bytes", "Reserved, held and quarantined, rounding included.", stats.bytes_in_use),
            ("h3_slab_high_water_bytes", "The most that was used.", stats.high_water),
            ("h3_slab_landings", "Landings that are reserved or held.", stats.landings),
            ("h3_slab_quarantined_landings", "Given up, while a sender may still write.", stats.quarantined),
        ):
            gauge = GaugeMetricFamily(name, text, labels=["transport"])
            gauge.add_metric([self._transport], value)
            yield gauge
        for name, text, value in (
            ("h3_transport_reservations", "Landings reserved.", stats.reserved_total),
            ("h3_transport_lapses", "Leases that ended without a verified push.", stats.lapsed_total),
            ("h3_transport_sweeps", "Slabs of dead owners removed at start.", stats.swept_total),
        ):
            counter = CounterMetricFamily(name, text, labels=["transport"])
            counter.add_metric([self._transport], value)
            yield counter
