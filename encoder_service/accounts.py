"""What the encoder service counts besides its transport, for Prometheus. Runs in its API process."""

from collections.abc import Callable, Iterator, Mapping
from typing import Final

from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from shared_schema.tasks import Task

PHASES: Final = ("media", "text", "vae", "pack")
"""Parts of an encoding, in order, as the leader timed them."""
_SECONDS: Final = tuple(step * 10.0**power for power in (-3, -2, -1, 0, 1) for step in (1, 2, 5))


class EncodeAccounts:
    """Encodings that were finished."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._whole = Histogram(
            "h3_encode_seconds", "One encoding, on the leader.", ["task"], buckets=_SECONDS, registry=registry
        )
        self._phases = Histogram(
            "h3_encode_phase_seconds", "Parts of encodings.", ["task", "phase"], buckets=_SECONDS, registry=registry
        )

    def encoded(self, task: Task, timings: Mapping[str, float]) -> None:
        """One more; `timings` are seconds by phase."""
        self._whole.labels(task.value).observe(sum(timings.values()))
        for phase in PHASES:
            if phase in timings:
                self._phases.labels(task.value, phase).observe(timings[phase])


class EncodingCollector(Collector):
    """What waits, looked at when somebody asks."""

    def __init__(self, queued: Callable[[], int], waiting: Callable[[], int]) -> None:
        self._queued = queued
        self._waiting = waiting

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Two gauges."""
        yield GaugeMetricFamily("h3_encodings_queued", "Requests that wait for the ranks.", self._queued())
        yield GaugeMetricFamily("h3_encodings_waiting", "Finished and not pushed yet.", self._waiting())
