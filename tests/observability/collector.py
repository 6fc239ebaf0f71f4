"""A collector of OpenTelemetry spans on this machine, for tests."""

import contextlib
import http.server
import threading
from collections.abc import Iterator
from typing import Any


class Collector:
    """Where spans are posted to. posted: (path, body) of each call."""

    def __init__(self, url: str, posted: list[tuple[str, bytes]]) -> None:
        self.url = url
        self.posted = posted

    def resource_spans(self) -> list[Any]:
        """What has come so far, as the protocol has it."""
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
            ExportTraceServiceRequest,
        )

        found = [ExportTraceServiceRequest.FromString(body) for _, body in self.posted]
        return [each for request in found for each in request.resource_spans]

    def spans(self) -> list[Any]:
        return [
            span
            for each in self.resource_spans()
            for scope in each.scope_spans
            for span in scope.spans
        ]


@contextlib.contextmanager
def running_collector() -> Iterator[Collector]:
    """It takes what is posted until the end of the block."""
    posted: list[tuple[str, bytes]] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            posted.append((self.path, self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            """Nothing: tests print nothing."""

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        yield Collector(f"http://127.0.0.1:{server.server_address[1]}", posted)
        server.shutdown()
        thread.join(10)
