"""Sends finished spans to an OpenTelemetry collector, over OTLP and HTTP. API processes; needs the extra `otel`.

Loaded by name, where the deploy file asks for it.
"""

from collections.abc import Sequence

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import SpanContext, TraceFlags

from shared_schema.trace import Span


class Collector:
    """The way to one collector. A thread of its own sends; what cannot be sent is dropped, and that is logged."""

    def __init__(self, endpoint: str, service: str) -> None:
        """`endpoint` is the whole URL, as in `http://127.0.0.1:4318/v1/traces`."""
        self._resource = Resource.create({"service.name": service})
        self._processor = BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint))

    def export(self, trace: str, spans: Sequence[Span]) -> None:
        """Take finished spans of one trace; they leave within some seconds."""
        for span in spans:
            self._processor.on_end(
                ReadableSpan(
                    name=span.name,
                    context=_context(trace, span.id),
                    parent=None if span.parent is None else _context(trace, span.parent),
                    resource=self._resource,
                    attributes={"process": span.process},
                    start_time=int(span.begin * 1e9),
                    end_time=int((span.begin + span.seconds) * 1e9),
                )
            )

    def close(self) -> None:
        """Send what is left."""
        self._processor.shutdown()  # type: ignore[no-untyped-call]


def _context(trace: str, span: str) -> SpanContext:
    return SpanContext(int(trace, 16), int(span, 16), is_remote=False, trace_flags=TraceFlags(TraceFlags.SAMPLED))
