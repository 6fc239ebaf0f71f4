"""OpenTelemetry spans: begins and ends them, and sends them to a collector.

The extra `otel` installs the libraries, which are imported only if an endpoint is set. A
thread of the exporter sends spans in batches and drops spans that exceed its buffer, so a slow or
missing collector delays no call. Opened by `server.launch`, used by `server.telemetry.monitor`.
"""

import threading
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from quire.errors import ConfigurationError
from quire.observability.log import CallContext
from quire.version import __version__

TRACES_PATH = "/v1/traces"
"""The path that OTLP over HTTP appends to an address without a path."""

EXPORT_TIMEOUT_S = 5
FLUSH_TIMEOUT_S = 5.0


class Spans:
    """Begins spans on an OpenTelemetry provider, and shuts the provider down."""

    def __init__(self, provider: Any) -> None:
        """provider is an OpenTelemetry SDK TracerProvider. See `open_spans`."""
        # Imported here, because it is part of an extra.
        from opentelemetry import trace
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider = provider
        self._tracer = provider.get_tracer("quire", __version__)
        self._propagator = TraceContextTextMapPropagator()
        self._kind = trace.SpanKind.SERVER

    def begin(
        self, name: str, attributes: Mapping[str, object], call: CallContext | None
    ) -> "CallSpan":
        """Begin a span at the start of `call`, in the trace that the client's headers name, if any.

        Attributes that are None are left out.
        """
        carrier = {}
        if call is not None and call.traceparent:
            carrier = {"traceparent": call.traceparent, "tracestate": call.tracestate}
        span = self._tracer.start_span(
            name,
            context=self._propagator.extract(carrier),
            kind=self._kind,
            attributes=_without_none(attributes),
            start_time=call.began_at_ns if call is not None and call.began_at_ns else None,
        )
        return CallSpan(span)

    def close(self) -> None:
        """Send the remaining spans for at most FLUSH_TIMEOUT_S seconds, and end the thread."""
        # The libraries would wait for each batch separately, even if the endpoint accepts none.
        last = threading.Thread(target=self._provider.shutdown, name="quire-spans", daemon=True)
        last.start()
        last.join(FLUSH_TIMEOUT_S)


class CallSpan:
    """A span that has begun. `end` is called once."""

    __slots__ = ("_span",)

    def __init__(self, span: Any) -> None:
        self._span = span

    def add_event(self, name: str, attributes: Mapping[str, object]) -> None:
        """Add an event with the current time."""
        self._span.add_event(name, _without_none(attributes))

    def end(self, attributes: Mapping[str, object], failure: str | None = None) -> None:
        """End the span. failure describes the error; None means success."""
        # Imported here, because it is part of an extra.
        from opentelemetry.trace import Status, StatusCode

        self._span.set_attributes(_without_none(attributes))
        if failure is not None:
            self._span.set_status(Status(StatusCode.ERROR, failure))
        self._span.end()


def open_spans(endpoint: str, service_name: str = "quire") -> Spans:
    """Make spans that are sent to `endpoint` by OTLP over HTTP.

    endpoint is http://host:port, or the whole URL if the collector does not use /v1/traces. Raises
    ConfigurationError for other values, or without the extra.
    """
    url = _traces_url(endpoint)
    try:
        # Imported here, because it is an extra and slow to load.
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise ConfigurationError(
            "otlp_endpoint is set, but the OpenTelemetry libraries are not installed; run"
            " pip install opentelemetry-sdk opentelemetry-exporter-otlp-proto-http, or leave"
            " otlp_endpoint out"
        ) from error
    resource = Resource.create({"service.name": service_name, "service.version": __version__})
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    exporter = OTLPSpanExporter(endpoint=url, timeout=EXPORT_TIMEOUT_S)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return Spans(provider)


def _traces_url(endpoint: str) -> str:
    refusal = f"otlp_endpoint is {endpoint!r}, but must be a URL like http://127.0.0.1:4318"
    try:
        parts = urlsplit(endpoint)
    except ValueError as error:  # a broken address in brackets
        raise ConfigurationError(refusal) from error
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise ConfigurationError(refusal)
    if parts.path in ("", "/"):
        return parts._replace(path=TRACES_PATH).geturl()
    return endpoint


def _without_none(attributes: Mapping[str, object]) -> dict[str, Any]:
    return {name: value for name, value in attributes.items() if value is not None}
