"""What the HTTP front takes of connections, over real sockets, with either parser: heads, bodies, pipelines, stalls."""

from __future__ import annotations

import asyncio
import http.client
import importlib.util
import json
import logging
import re
import socket
import ssl
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from certificates import self_signed
from echo_server import PATIENCE, EchoEngine, config
from prometheus_client import generate_latest

from mmserve.errors import ConfigError
from mmserve.http import connections, front
from mmserve.http.front import HttpFront
from mmserve.rpc.server import Server
from mmserve.tenants import TenantConfig

PARSERS = ["h11", *(["httptools"] if importlib.util.find_spec("httptools") else [])]
LIMIT = 4 << 20
CHAT = "/v1/chat/completions"


class Served:
    """The front of a server with an engine that echoes, on an event loop of its own."""

    def __init__(self, tenants: tuple[TenantConfig, ...] = (), **settings: Any) -> None:
        self.engine = EchoEngine()
        self.loop = asyncio.new_event_loop()
        whole = replace(config({"max_message_bytes": LIMIT, **settings}), tenants=tenants)
        self.server = Server(whole, {"echo": self.engine})
        self.front = HttpFront(self.server, 0)
        self.server.attach(self.front)
        self._thread = threading.Thread(target=self.loop.run_forever)

    def __enter__(self) -> Served:
        self._thread.start()
        self.run(self.server.start())
        return self

    def __exit__(self, *_: Any) -> None:
        self.engine.go.set()
        self.run(self.server.stop())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()

    def run(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(PATIENCE)

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.front.port), PATIENCE)

    def send(self, *parts: bytes) -> bytes:
        """What comes back until the server closes; each part is sent by itself."""
        with self.connect() as connection:
            try:
                for part in parts:
                    connection.sendall(part)
                    if len(parts) > 1:
                        time.sleep(0.01)  # a packet of its own, if the machine is not too busy
            except OSError:  # it has closed already
                pass
            return rest(connection)


def rest(connection: socket.socket) -> bytes:
    """All that comes until the end."""
    found = b""
    try:
        while part := connection.recv(1 << 16):
            found += part
    except ConnectionError:
        pass
    return found


def wait_for(what: str, condition: Callable[[], Any]) -> None:
    limit = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < limit, f"waited in vain: {what}"
        time.sleep(0.005)


def using(parser: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have fronts that begin now parse with ``parser``."""
    if parser == "h11":
        monkeypatch.setattr(front, "connection_class", lambda: connections.H11Connection)
    else:
        assert front.connection_class().__name__ == "LlhttpConnection"


@pytest.fixture(scope="module", params=PARSERS)
def served(request: pytest.FixtureRequest) -> Iterator[Served]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        using(request.param, monkeypatch)
        with Served(message_seconds=PATIENCE) as found:
            yield found
            assert b" 200 OK" in found.send(ask("still here"))


def test_without_httptools_h11_parses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "mmserve.http.llhttp", raising=False)
    monkeypatch.setitem(sys.modules, "httptools", None)
    assert connections.connection_class() is connections.H11Connection


def body_of(text: str, **options: Any) -> bytes:
    return json.dumps({"model": "echo", "messages": [{"role": "user", "content": text}], **options}).encode()


def ask(text: str, *lines: str, body: bytes | None = None, close: bool = True, **options: Any) -> bytes:
    """A chat completion that is right but for ``lines`` of its head."""
    data = body_of(text, **options) if body is None else body
    head = [f"POST {CHAT} HTTP/1.1", "host: localhost", "content-type: application/json", *lines]
    head += [f"content-length: {len(data)}"] * (not any("content-length" in x or "transfer-" in x for x in lines))
    return "\r\n".join([*head, *(["connection: close"] if close else []), "", ""]).encode("latin-1") + data


def chunked(data: bytes, size: int = 32, extension: bytes = b"") -> bytes:
    pieces = [data[i : i + size] for i in range(0, len(data), size)]
    return b"".join(b"%x%s\r\n%s\r\n" % (len(each), extension, each) for each in pieces)


def statuses(answers: bytes) -> list[int]:
    return [int(each) for each in re.findall(rb"HTTP/1\.1 (\d{3}) ", answers)]


def texts(answers: bytes) -> list[str]:
    return [text.decode() for text in re.findall(rb'"role": ?"assistant", ?"content": ?"([^"]*)"', answers)]


CHUNKED = "transfer-encoding: chunked"
#: As Java's client sends a first request.
OTHER = ("connection: upgrade, http2-settings, close", "upgrade: h2c", "http2-settings: AAEAAEAAAAIAAAABAAMAAABk")
UPGRADE = ask("a b", *OTHER, close=False)
UPGRADE_IN_CHUNKS = ask("a b", *OTHER, CHUNKED, body=chunked(body_of("a b")) + b"0\r\n\r\n", close=False)
TAKEN = {
    "plain": (ask("a b"),),
    "in pieces": tuple(ask("a b")[i : i + 7] for i in range(0, len(ask("a b")), 7)),
    "chunked": (ask("a b", CHUNKED, body=chunked(body_of("a b")) + b"0\r\n\r\n"),),
    "extensions": (ask("a b", CHUNKED, body=chunked(body_of("a b"), extension=b";a=b") + b"0\r\n\r\n"),),
    "a trailer": (ask("a b", CHUNKED, body=chunked(body_of("a b")) + b"0\r\nx-sum: 1\r\n\r\n"),),
    "an upgrade that is not made": (UPGRADE,),
    "the same in pieces": (
        UPGRADE[:-20],
        UPGRADE[-20:],
    ),
    "the same in chunks": (UPGRADE_IN_CHUNKS,),
    "a large head": (ask("a b", *(f"x-{i}: {'y' * 1000}" for i in range(60))),),
    "a large head in pieces": tuple(
        ask("a b", *(f"x-{i}: {'y' * 1000}" for i in range(60)))[i : i + 20_000] for i in range(0, 80_000, 20_000)
    ),
    "a query": (ask("a b").replace(b"completions ", b"completions?a=%zz&b ", 1),),
    "older": (ask("a b").replace(b"HTTP/1.1", b"HTTP/1.0", 1),),
}


@pytest.mark.parametrize("parts", TAKEN.values(), ids=TAKEN)
def test_what_is_taken(served: Served, parts: tuple[bytes, ...]) -> None:
    found = served.send(*parts)
    assert statuses(found) == [200] and texts(found) == ["a b"], found


BODY = body_of("a b")
REFUSED = {
    "two lengths": ask("a b", f"content-length: {len(BODY)}", "content-length: 1"),
    "a list of lengths": ask("a b", f"content-length: {len(BODY)}, 1"),
    "a signed length": ask("a b", f"content-length: +{len(BODY)}"),
    "a negative length": ask("a b", "content-length: -1"),
    "a length and chunks": ask("a b", f"content-length: {len(BODY)}", CHUNKED),
    "chunks and a length": ask("a b", CHUNKED, f"content-length: {len(BODY)}"),
    "two codings": ask("a b", "transfer-encoding: gzip, chunked"),
    "chunks twice": ask("a b", CHUNKED, CHUNKED),
    "chunks that are not": ask("a b", "transfer-encoding: xchunked"),
    "identity": ask("a b", "transfer-encoding: identity"),
    "a space before the colon": ask("a b", "x-y : 1"),
    "a space in the length's name": ask("a b", f"content-length : {len(BODY)}", "x-content-length: 1"),
    "a folded line": ask("a b", "x-y: 1\r\n  content-length: 1"),
    "a bare return": ask("a b", "x-y: 1\rcontent-length: 1"),
    "a null": ask("a b", "x-y: \0"),
    "two hosts": ask("a b", "host: example.org"),
    "no host": ask("a b").replace(b"host: localhost\r\n", b"", 1),
    "another version": ask("a b").replace(b"HTTP/1.1", b"HTTP/1.9", 1),
    "the next version": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "no version": b"GET /health\r\n\r\n",
    "another protocol": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(64),
    "a size that is none": ask("a b", CHUNKED, body=b"zz\r\na\r\n0\r\n\r\n"),
    "a negative size": ask("a b", CHUNKED, body=b"-1\r\na\r\n0\r\n\r\n"),
    "a huge size": ask("a b", CHUNKED, body=b"f" * 30 + b"\r\n"),
    "a chunk that goes on": ask("a b", CHUNKED, body=b"1\r\nabc\r\n0\r\n\r\n"),
    "tiny chunks": ask("a b", CHUNKED, body=b"1\r\n \r\n" * 2000),
    "a long line": b"GET /" + b"a" * 200_000 + b" HTTP/1.1\r\nhost: localhost\r\n\r\n",
    "a long field": ask("a b", "x: " + "y" * 200_000),
    "many fields": ask("a b", *("x: y" for _ in range(20_000))),
    "a long trailer": ask("a b", CHUNKED, body=chunked(BODY) + b"0\r\n" + b"x: y\r\n" * 40_000 + b"\r\n"),
    "a tunnel": b"CONNECT example.org:443 HTTP/1.1\r\nhost: example.org:443\r\n\r\n",
}


@pytest.mark.parametrize("data", REFUSED.values(), ids=REFUSED)
def test_what_is_refused(served: Served, data: bytes) -> None:
    """One answer at most, none of which is a success: what follows a doubtful length is no request."""
    asked = len(served.engine.requests)
    found = served.send(data, ask("smuggled"))
    assert statuses(found) in ([400], []), found[:400]
    assert len(served.engine.requests) == asked


def test_a_head_is_bounded_while_it_comes(served: Served) -> None:
    """Also one whose only field never ends, in pieces that are each short."""
    with served.connect() as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\nx: ")
        with pytest.raises(ConnectionError):
            for _ in range(1000):
                connection.sendall(b"y" * 4096)
                time.sleep(0.001)


def test_a_trailer_names_nothing(served: Served) -> None:
    """Neither a host nor a label: a proxy in front has seen neither."""
    trailer = b"0\r\nhost: example.org\r\nx-request-id: forged\r\ncontent-type: text/plain\r\n\r\n"
    found = served.send(ask("a b", CHUNKED, body=chunked(body_of("a b")) + trailer))
    assert statuses(found) == [200] and b"forged" not in found


@pytest.mark.parametrize("parser", PARSERS)
def test_connections_are_closed_after_a_response_during_a_drain(parser: str, monkeypatch: pytest.MonkeyPatch) -> None:
    using(parser, monkeypatch)
    with Served() as found, found.connect() as running, found.connect() as waiting:
        found.engine.go.clear()
        running.sendall(ask("one", close=False))
        assert found.engine.run_seen.wait(PATIENCE)
        drained = asyncio.run_coroutine_threadsafe(found.server.drain(), found.loop)
        wait_for("the drain", lambda: "drain 60" in found.engine.calls)
        waiting.sendall(ask("two", close=False) * 2)
        refused = rest(waiting)
        assert statuses(refused) == [503] and b"\r\nconnection: close\r\n" in refused
        found.engine.go.set()
        answered = rest(running)
        assert statuses(answered) == [200] and b"\r\nconnection: close\r\n" in answered
        drained.result(PATIENCE)


def test_a_pipeline_is_answered_in_order(served: Served) -> None:
    asked = [ask(f"number {i}", close=i == 19, stream=i % 2 == 1) for i in range(20)]
    found = served.send(b"".join(asked))
    assert statuses(found) == [200] * 20
    assert texts(found)[::2] == [f"number {i}" for i in range(0, 20, 2)]


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_a_pipeline_cancels_the_running_request(served: Served, stream: bool) -> None:
    """And not only the one that was received last."""
    served.engine.go.clear()
    before = len(served.engine.requests)
    with served.connect() as connection:
        connection.sendall(ask("a b c", stream=stream, close=False) * 2)
        wait_for("the first request", lambda: len(served.engine.requests) > before)
    running = served.engine.requests[before]
    wait_for("its end", lambda: running.id in served.engine.cancelled)
    served.engine.go.set()
    assert len(served.engine.requests) == before + 1, "the second one is not begun"


def test_requests_for_another_protocol_are_taken_one_after_another(served: Served) -> None:
    upgrade = [ask(f"number {i}", *OTHER[1:], "connection: upgrade", close=False) for i in range(3)]
    found = served.send(b"".join(upgrade) + ask("the last"))
    assert texts(found) == ["number 0", "number 1", "number 2", "the last"]


def test_nonsense_after_a_request_does_not_spoil_its_answer(served: Served) -> None:
    """An answer to it in the middle of the first one would be taken for a part of that."""
    for options in ({}, {"stream": True}):
        served.engine.go.clear()
        with served.connect() as connection:
            connection.sendall(ask("a b", close=False, **options))
            wait_for("the request to run", lambda: served.engine.running)
            connection.sendall(b"\x00nonsense\r\n\r\n")
            time.sleep(0.05)
            served.engine.go.set()
            found = rest(connection)
        assert statuses(found)[0] == 200, found
        first = found.partition(b"HTTP/1.1 400")[0]
        assert (b"data: [DONE]\n\n\r\n0\r\n\r\n" in first) if options else texts(first) == ["a b"]


def test_a_request_that_goes_on_after_its_answer_is_cut(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "PATIENCE", 0.3)
    with served.connect() as connection:
        connection.sendall(ask("", f"content-length: {1 << 40}", body=b" ", close=False))
        assert b" 413 " in connection.recv(4096)
        with pytest.raises(ConnectionError):
            for _ in range(10_000):
                connection.sendall(b" " * 4096)
                time.sleep(0.01)


@pytest.mark.parametrize("parser", PARSERS)
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
def test_a_client_that_takes_nothing_is_cut(
    parser: str, stream: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """After ``message_seconds``, whether its answer is still made or is done."""
    real = front._listener

    def small(host: str, port: int) -> socket.socket:
        listener = real(host, port)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # its connections have the same
        return listener

    monkeypatch.setattr(front, "_listener", small)
    using(parser, monkeypatch)
    with Served(message_seconds=0.5) as served, socket.socket() as deaf:
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        deaf.connect(("127.0.0.1", served.front.port))
        with caplog.at_level(logging.INFO, "mmserve"):  # which other tests may have set to less
            deaf.sendall(ask(" ".join(["word" * 1000] * 10), close=False, stream=stream))
            assert served.front._uvicorn is not None
            held = served.front._uvicorn.server_state.connections
            wait_for("the connection to be cut", lambda: any("took nothing" in line for line in caplog.messages))
            wait_for("the connection to be gone", lambda: not held)
        wait_for("the request to be gone", lambda: not served.engine.running)
        assert statuses(served.send(ask("still here"))) == [200]
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


def got(connection: http.client.HTTPConnection, method: str, path: str) -> tuple[int, Any, str]:
    """Status, headers and text of an answer."""
    connection.request(method, path, body_of("a b"), {"content-type": "application/json"})
    answer = connection.getresponse()
    return answer.status, answer.headers, answer.read().decode()


@pytest.mark.parametrize("parser", PARSERS)
def test_connections_beyond_the_limit_get_errors_of_the_api(parser: str, monkeypatch: pytest.MonkeyPatch) -> None:
    using(parser, monkeypatch)
    with Served(http_connections=2) as served, ExitStack() as opened:

        def connect() -> http.client.HTTPConnection:
            made = http.client.HTTPConnection("127.0.0.1", served.front.port, timeout=PATIENCE)
            return opened.enter_context(closing(made))

        first, second = connect(), connect()
        for each in (first, second):
            assert got(each, "GET", "/health")[0] == 200
        for path, kind in ((CHAT, "service_unavailable_error"), ("/v1/messages", "overloaded_error")):
            status, headers, text = got(connect(), "POST", path)
            assert (status, headers["retry-after"], headers["connection"]) == (503, "1", "close")
            error = json.loads(text)["error"]
            assert error["type"] == kind and "all 2 connections" in error["message"]
            assert headers["content-type"] == "application/json" and headers["x-request-id"]
        for path, text in (("/health", '"ok"'), ("/metrics", "mmserve:num_requests_running")):
            status, headers, found = got(connect(), "GET", path)
            assert (status, headers["connection"]) == (200, "close") and text in found
        for each in (first, second):
            status, headers, text = got(each, "POST", CHAT)
            assert status == 200 and headers["connection"] is None, "connections within the limit go on"
        third = connect()
        third.connect()
        assert served.front._uvicorn is not None
        held = served.front._uvicorn.server_state.connections
        wait_for("the third connection", lambda: len(held) == 3)
        second.close()
        wait_for("the second to be gone", lambda: len(held) == 2)
        for _ in range(2):
            assert got(third, "POST", CHAT)[0] == 200
        assert not served.engine.running


@contextmanager
def over_tls(served: Served, authority: Path) -> Iterator[ssl.SSLSocket]:
    context = ssl.create_default_context(cafile=str(authority))
    with served.connect() as plain, context.wrap_socket(plain, server_hostname="localhost") as connection:
        yield connection


@pytest.mark.parametrize("parser", PARSERS)
def test_certificates_are_followed(parser: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On reload new connections have the new certificate, and those that there are go on with theirs."""
    using(parser, monkeypatch)
    first, second = tmp_path / "first", tmp_path / "second"
    for folder in (first, second):
        folder.mkdir()
    certificate, key = self_signed(first, "localhost")
    newer, newer_key = self_signed(second, "localhost")
    with Served(tls_certificate=str(certificate), tls_key=str(key)) as served:
        old = Path(certificate).read_bytes()
        trusted = tmp_path / "trusted.pem"
        trusted.write_bytes(old)
        with over_tls(served, trusted) as kept:
            before = kept.getpeercert(binary_form=True)
            Path(certificate).write_bytes(Path(newer).read_bytes())
            Path(key).write_bytes(Path(newer_key).read_bytes())
            served.run(served.server.reload(lambda: served.server.config))
            with over_tls(served, Path(newer)) as renewed:
                assert renewed.getpeercert(binary_form=True) != before
                renewed.sendall(ask("a b"))
                assert texts(rest(renewed)) == ["a b"]
            with pytest.raises(ssl.SSLCertVerificationError), over_tls(served, trusted):
                pass
            kept.sendall(ask("c d"))
            assert texts(rest(kept)) == ["c d"]
            Path(key).write_text("no key\n")
            with pytest.raises(ConfigError, match="are not a pair"):
                served.run(served.server.reload(lambda: served.server.config))
            with over_tls(served, Path(newer)) as still:
                still.sendall(ask("e f"))
                assert texts(rest(still)) == ["e f"]


def test_an_authority_of_clients_that_is_replaced_is_not_trusted_any_more(tmp_path: Path) -> None:
    own, key = self_signed(tmp_path, "server")
    known = {name: self_signed(tmp_path, name) for name in ("old", "new")}
    authority = tmp_path / "clients.pem"
    authority.write_bytes(known["old"][0].read_bytes())
    contexts = {name: ssl.create_default_context(cafile=str(own)) for name in known}
    for name, pair in known.items():
        contexts[name].load_cert_chain(*pair)

    def answer(name: str, session: ssl.SSLSession | None = None) -> tuple[bytes, Any]:
        try:
            with (
                served.connect() as plain,
                contexts[name].wrap_socket(plain, server_hostname="127.0.0.1", session=session) as connection,
            ):
                connection.sendall(ask("a b"))
                return rest(connection), connection.session
        except ssl.SSLError:
            return b"", None

    with Served(tls_certificate=str(own), tls_key=str(key), tls_client_ca=str(authority)) as served:
        answered, session = answer("old")
        assert b" 200 OK" in answered and session.has_ticket and not answer("new")[0]
        authority.write_bytes(known["new"][0].read_bytes())
        served.run(served.server.reload(lambda: served.server.config))
        assert b" 200 OK" in answer("new")[0]
        assert not answer("old")[0]
        assert not answer("old", session=session)[0], "nor by a session from before"


@pytest.mark.parametrize(
    ("path", "counted_as"),
    [
        ("/v1/models/{}", "v1/models/{name:path}"),
        ("/{}", "unknown/unknown"),
        ("/health/{}", "unknown/unknown"),
    ],
)
def test_paths_of_clients_are_no_labels(path: str, counted_as: str) -> None:
    with Served(auth_tokens=("known",)) as served:
        for own in ("guess-1", "guess-2", "//"):
            served.send(f"GET {path.format(own)} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n".encode())
        served.send(b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
        counted = generate_latest(served.server.metrics.registry).decode()
    found = re.findall(r'grpc_code="[A-Z_]+",grpc_method="([^"]*)",grpc_service="([^"]*)"', counted)
    assert {f"{service}/{method}" for method, service in found} == {"unknown/health", counted_as}
