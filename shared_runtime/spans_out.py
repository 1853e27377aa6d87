"""Where spans go besides the job's own trace: to a collector, if the deploy file names one. API processes; no torch."""

import importlib
from collections.abc import Callable, Sequence
from typing import Protocol

from shared_schema.errors import DeployError
from shared_schema.trace import Span

Export = Callable[[str, Sequence[Span]], None]
"""Takes finished spans of the trace with that id, and waits for nobody."""


class SpanSink(Protocol):
    """Takes finished spans and waits for nobody."""

    def export(self, trace: str, spans: Sequence[Span]) -> None:
        """Spans of the trace with that id."""

    def close(self) -> None:
        """No more will come."""


class NoSink:
    """Nobody wants them."""

    def export(self, trace: str, spans: Sequence[Span]) -> None:
        """See `SpanSink`."""

    def close(self) -> None:
        """See `SpanSink`."""


def span_sink(endpoint: str | None, service: str) -> SpanSink:
    """The collector at `endpoint`, which is told that spans come from `service`.

    Raises:
        DeployError: the extra is not installed.
    """
    if endpoint is None:
        return NoSink()
    try:
        module = importlib.import_module("shared_runtime.otel")
    except ModuleNotFoundError as error:
        raise DeployError(
            f"service.otlp_endpoint needs OpenTelemetry ({error.name}): "
            "pip install opentelemetry-sdk opentelemetry-exporter-otlp-proto-http"
        ) from error
    sink: SpanSink = module.Collector(endpoint, service)
    return sink
