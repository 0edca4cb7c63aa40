"""Takes the spans that a server exports over HTTP, as an OpenTelemetry collector does."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


class Collector:
    """Listens while it is entered.

    Attributes:
        url: The address for spans.
    """

    def __init__(self) -> None:
        self._arrived = threading.Condition()
        self._spans: list[Any] = []
        take = self._take

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                take(self.rfile.read(int(self.headers["content-length"])))
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/v1/traces"

    def _take(self, body: bytes) -> None:
        request = ExportTraceServiceRequest.FromString(body)
        with self._arrived:
            self._spans += [s for r in request.resource_spans for scope in r.scope_spans for s in scope.spans]
            self._arrived.notify_all()

    def of_trace(self, trace_id: str, complete: Callable[[list[Any]], bool]) -> list[Any]:
        """Return the spans of a trace as soon as they are complete."""
        deadline = time.monotonic() + 30
        with self._arrived:
            while True:
                found = [span for span in self._spans if span.trace_id.hex() == trace_id]
                if complete(found):
                    return found
                assert self._arrived.wait(deadline - time.monotonic()), f"only {[span.name for span in found]}"

    def __enter__(self) -> Collector:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
