"""Prometheus set-up of both services: one registry a process, built in `app.py`. Runs in API processes; no torch.

Everything that is shown is in this process already when somebody asks: nothing waits for a rank. Labels have few,
known values. What every name means is in docs/metrics.md.
"""

from collections.abc import Callable, Iterator
from typing import Literal

from prometheus_client import (
    CollectorRegistry,
    GCCollector,
    PlatformCollector,
    ProcessCollector,
    disable_created_metrics,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from shared_schema.encode import SCHEMA_VERSION
from shared_schema.health import Health, RankState

Service = Literal["encoder", "diffusion"]
CONTENT_TYPE = CONTENT_TYPE_LATEST
_STATES: tuple[RankState, ...] = ("starting", "ready", "busy", "stuck", "dead")


def new_registry(service: Service, health: Callable[[], Health]) -> CollectorRegistry:
    """A registry that shows the process, which service it is, and `health`, looked at when somebody asks."""
    # When each series began: as many series again, which nobody looks at. (The function has no annotations.)
    disable_created_metrics()  # type: ignore[no-untyped-call]
    registry = CollectorRegistry()
    for standard in (ProcessCollector, PlatformCollector, GCCollector):
        standard(registry=registry)
    registry.register(_ServiceState(service, health))
    return registry


def exposition(registry: CollectorRegistry) -> bytes:
    """The body of `GET /metrics`, of type `CONTENT_TYPE`."""
    return generate_latest(registry)


class _ServiceState(Collector):
    """Readiness and ranks."""

    def __init__(self, service: Service, health: Callable[[], Health]) -> None:
        self._service = service
        self._health = health

    def collect(self) -> Iterator[Metric]:
        health = self._health()
        facts = {"service": self._service, "schema_version": str(SCHEMA_VERSION)}
        yield InfoMetricFamily("h3_service", "Which service this is.", facts)
        yield GaugeMetricFamily("h3_ready", "1 while /readyz is 200.", float(health.status == "healthy"))
        yield CounterMetricFamily("h3_rank_group_restarts", "How often the ranks were started anew.", health.restarts)
        ranks = GaugeMetricFamily("h3_ranks", "Ranks by state.", labels=["state"])
        for state in _STATES:
            ranks.add_metric([state], sum(rank.state == state for rank in health.ranks))
        yield ranks
        age = max((rank.beat_age_s for rank in health.ranks), default=0)
        yield GaugeMetricFamily("h3_rank_beat_age_seconds", "Of the rank that was silent longest.", age)
        weights = GaugeMetricFamily("h3_rank_weight_bytes", "Weights that a ready rank holds.", labels=["rank"])
        for rank in health.ranks:
            if rank.weight_bytes is not None:
                weights.add_metric([rank.name], rank.weight_bytes)
        yield weights
