"""A receiver of traces: OTLP over gRPC and over HTTP, as collectors speak it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as pb
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc


@dataclass(frozen=True)
class Received:
    """A span as it came over the wire."""

    name: str
    trace_id: str
    span_id: str
    parent: str
    links: tuple[str, ...]  # trace ids
    attributes: dict[str, Any]
    service: dict[str, Any]


@dataclass
class Receiver:
    """What came so far; ``endpoint`` is where it listens."""

    endpoint: str = ""
    spans: list[Received] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def take(self, message: pb.ExportTraceServiceRequest) -> None:
        with self._lock:
            for of_process in message.resource_spans:
                service = _values(of_process.resource.attributes)
                for scope in of_process.scope_spans:
                    self.spans += [
                        Received(
                            span.name,
                            span.trace_id.hex(),
                            span.span_id.hex(),
                            span.parent_span_id.hex(),
                            tuple(link.trace_id.hex() for link in span.links),
                            _values(span.attributes),
                            service,
                        )
                        for span in scope.spans
                    ]

    def named(self, name: str) -> list[Received]:
        with self._lock:
            return [span for span in self.spans if span.name == name]


def _values(attributes: Any) -> dict[str, Any]:
    return {a.key: getattr(a.value, a.value.WhichOneof("value")) for a in attributes}


class _Service(trace_service_pb2_grpc.TraceServiceServicer):
    def __init__(self, receiver: Receiver) -> None:
        self._receiver = receiver

    def Export(self, message: pb.ExportTraceServiceRequest, context: Any) -> pb.ExportTraceServiceResponse:
        self._receiver.take(message)
        return pb.ExportTraceServiceResponse()


@contextmanager
def receives_grpc() -> Iterator[Receiver]:
    """A receiver over gRPC."""
    receiver, server = Receiver(), grpc.server(ThreadPoolExecutor(1))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(_Service(receiver), server)
    receiver.endpoint = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield receiver
    finally:
        server.stop(None).wait()


@contextmanager
def receives_http() -> Iterator[Receiver]:
    """A receiver over HTTP, of binary protobuf."""
    receiver = Receiver()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/v1/traces" and self.headers["content-type"] == "application/x-protobuf"
            data = self.rfile.read(int(self.headers["content-length"]))
            if self.headers.get("content-encoding") == "gzip":
                import gzip

                data = gzip.decompress(data)
            receiver.take(pb.ExportTraceServiceRequest.FromString(data))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    receiver.endpoint = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield receiver
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
