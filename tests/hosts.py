"""Hosts for tests: a server of files over HTTP on 127.0.0.1, which answers what it is told to."""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path


def whole(data: bytes, *headers: str, status: str = "200 OK") -> bytes:
    """A response with its length."""
    lines = [f"HTTP/1.1 {status}", f"content-length: {len(data)}", *headers]
    return ("\r\n".join(lines) + "\r\n\r\n").encode() + data


def moved(to: str) -> bytes:
    """A redirect."""
    return whole(b"", f"location: {to}", status="302 Found")


@dataclass
class Host:
    """A server whose paths are answered with bytes, or by a function that writes them to the socket itself."""

    port: int
    answers: dict[str, bytes | Callable[[socket.socket], None]] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)  # heads of requests, in order

    def url(self, path: str, host: str = "127.0.0.1", scheme: str = "http") -> str:
        return f"{scheme}://{host}:{self.port}{path}"


@contextmanager
def serving(tls: tuple[Path, Path] | None = None) -> Iterator[Host]:
    """A host on a free port, each connection on a thread; ``tls``: its certificate and key."""
    context = None
    if tls is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*tls)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        host = Host(listener.getsockname()[1])

        def accept() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:  # closed
                    return
                threading.Thread(target=_answer, args=(host, connection, context), daemon=True).start()

        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        try:
            yield host
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join(60)


def _answer(host: Host, connection: socket.socket, context: ssl.SSLContext | None) -> None:
    try:
        with context.wrap_socket(connection, server_side=True) if context else connection as stream:
            stream.settimeout(20)
            head = b""
            while b"\r\n\r\n" not in head:
                if not (part := stream.recv(4096)):
                    return
                head += part
            host.asked.append(head.decode())
            answer = host.answers.get(head.split()[1].decode(), whole(b"", status="404 Not Found"))
            if callable(answer):
                answer(stream)
            else:
                stream.sendall(answer)
    except OSError:  # the client went away
        pass
