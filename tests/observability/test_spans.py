"""Spans begin, belong to their client's trace, end, and reach a collector over HTTP."""

import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest
from tests.observability.collector import running_collector

from quire.errors import ConfigurationError
from quire.observability import spans as spans_module
from quire.observability.log import CallContext
from quire.observability.spans import Spans, _traces_url, open_spans

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.fixture
def memory() -> Iterator[tuple[Spans, Any]]:
    """Spans that end in a list: (spans, exporter)."""
    pytest.importorskip("opentelemetry.sdk")
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    yield Spans(provider), exporter
    provider.shutdown()


def test_a_span_has_its_call_s_beginning_and_what_it_was_told(memory: tuple[Spans, Any]) -> None:
    spans, exporter = memory
    call = CallContext("req-1", began_at_ns=1_700_000_000_000_000_000)
    span = spans.begin("chat m", {"a": 1, "left_out": None}, call)
    span.add_event("first", {"b": 2})
    span.end({"c": ["x", "y"]})
    (found,) = exporter.get_finished_spans()
    assert (found.name, found.start_time, found.kind.name) == ("chat m", call.began_at_ns, "SERVER")
    assert dict(found.attributes) == {"a": 1, "c": ("x", "y")}
    assert [(event.name, dict(event.attributes)) for event in found.events] == [("first", {"b": 2})]
    assert found.parent is None and found.status.status_code.name == "UNSET"


def test_a_failure_is_the_span_s_status(memory: tuple[Spans, Any]) -> None:
    spans, exporter = memory
    spans.begin("m", {}, None).end({}, "StepFailedError: no")
    (found,) = exporter.get_finished_spans()
    assert found.status.status_code.name == "ERROR"
    assert found.status.description == "StepFailedError: no"


def test_a_client_s_trace_goes_on(memory: tuple[Spans, Any]) -> None:
    spans, exporter = memory
    call = CallContext("req-1", traceparent=f"00-{TRACE}-{PARENT}-01", tracestate="vendor=1")
    spans.begin("m", {}, call).end({})
    (found,) = exporter.get_finished_spans()
    assert f"{found.context.trace_id:032x}" == TRACE
    assert f"{found.parent.span_id:016x}" == PARENT
    assert found.context.trace_state.get("vendor") == "1"


def test_a_client_that_does_not_sample_is_obeyed(memory: tuple[Spans, Any]) -> None:
    spans, exporter = memory
    span = spans.begin("m", {}, CallContext("a", traceparent=f"00-{TRACE}-{PARENT}-00"))
    span.add_event("first", {})
    span.end({})
    assert exporter.get_finished_spans() == ()


@pytest.mark.parametrize("traceparent", ["", "nonsense", "00-" + "0" * 32 + f"-{PARENT}-01", "ü"])
def test_a_broken_traceparent_begins_a_trace_of_its_own(
    memory: tuple[Spans, Any], traceparent: str
) -> None:
    spans, exporter = memory
    spans.begin("m", {}, CallContext("a", traceparent=traceparent)).end({})
    (found,) = exporter.get_finished_spans()
    assert found.parent is None


def test_spans_reach_a_collector_over_http() -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    with running_collector() as collector:
        spans = open_spans(collector.url, "quire-test")
        for index in range(3):
            spans.begin(f"chat {index}", {"quire.num_prompts": index}, None).end({})
        spans.close()
    assert {path for path, _ in collector.posted} == {"/v1/traces"}
    assert sorted(span.name for span in collector.spans()) == ["chat 0", "chat 1", "chat 2"]
    resource = collector.resource_spans()[0].resource
    attributes = {attribute.key: attribute.value.string_value for attribute in resource.attributes}
    assert attributes["service.name"] == "quire-test"


@pytest.mark.alone
def test_a_collector_that_is_gone_costs_nothing_but_the_spans(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The libraries go on trying in a thread of theirs; nobody waits for that."""
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    monkeypatch.setattr(spans_module, "EXPORT_TIMEOUT_S", 30)
    monkeypatch.setattr(spans_module, "FLUSH_TIMEOUT_S", 0.2)
    spans = open_spans("http://127.0.0.1:9")  # the discard port: nobody listens
    began_s = time.monotonic()
    spans.begin("m", {}, None).end({})
    assert time.monotonic() - began_s < 5
    spans.close()
    assert time.monotonic() - began_s < 10


@pytest.mark.parametrize("endpoint", ["localhost:4318", "ftp://a", "", "http://", "http://[::1"])
def test_an_endpoint_that_is_no_url_is_refused(endpoint: str) -> None:
    with pytest.raises(ConfigurationError, match=r"otlp_endpoint is .*but must be a URL like"):
        open_spans(endpoint)


@pytest.mark.parametrize(
    ("endpoint", "url"),
    [
        ("http://a:4318", "http://a:4318/v1/traces"),
        ("https://a/", "https://a/v1/traces"),
        ("http://a/otlp/traces", "http://a/otlp/traces"),
    ],
)
def test_an_address_without_a_path_gets_the_usual_one(endpoint: str, url: str) -> None:
    assert _traces_url(endpoint) == url


def test_without_the_extra_the_error_says_how_to_get_it() -> None:
    program = (
        "import sys; sys.modules['opentelemetry.sdk.trace'] = None\n"
        "from quire.errors import ConfigurationError\n"
        "from quire.observability.spans import open_spans\n"
        "try:\n    open_spans('http://127.0.0.1:9')\n"
        "except ConfigurationError as error:\n    print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert "pip install opentelemetry-sdk opentelemetry-exporter-otlp-proto-http" in done.stdout


def test_nothing_is_imported_before_it_is_needed() -> None:
    program = (
        "import sys, quire.observability.spans;"
        "sys.exit(any(name.startswith('opentelemetry') for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", program], timeout=60).returncode == 0
