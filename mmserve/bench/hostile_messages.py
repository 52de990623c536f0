"""Serialized ``GenerateRequest`` messages that are cheap to send and expensive to parse, and calls that send slowly or
nothing.

No protobuf message is built here, so that the client stays cheap however large the message is. Field numbers are those
of ``protos/mmserve/v1/generation.proto``.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Iterator
from typing import Any

import grpc

GENERATE = "/mmserve.v1.GenerationService/Generate"

MESSAGES = 2
_LENGTH_DELIMITED = 2


def varint(value: int) -> bytes:
    """``value`` as a base-128 varint of the protobuf wire format."""
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def field(number: int, payload: bytes) -> bytes:
    """A length-delimited field of the protobuf wire format."""
    return varint(number << 3 | _LENGTH_DELIMITED) + varint(len(payload)) + payload


def filled(number: int, payload: bytes, size: int) -> bytes:
    """About ``size`` bytes of one field repeated."""
    one = field(number, payload)
    return one * (size // len(one))


def empty_messages(size: int) -> bytes:
    """``size`` bytes of empty ``messages``, two bytes each."""
    return filled(MESSAGES, b"", size)


@contextlib.contextmanager
def repeated(address: str, message: bytes, *, connections: int = 4, method: str = GENERATE) -> Iterator[list[str]]:
    """Send ``message`` repeatedly over ``connections`` connections, one call at a time on each, until the context
    exits; yields the list of the received statuses, which grows."""
    ended, statuses = threading.Event(), list[str]()

    def send() -> None:
        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_send_message_length", -1)]
        with grpc.insecure_channel(address, options) as channel:
            call = channel.unary_stream(method)
            while not ended.is_set():
                try:
                    for _ in call(message, timeout=60):
                        pass
                    statuses.append("OK")
                except grpc.RpcError as error:
                    statuses.append(error.code().name)

    threads = [threading.Thread(target=send, daemon=True) for _ in range(connections)]
    for thread in threads:
        thread.start()
    try:
        yield statuses
    finally:
        ended.set()
        for thread in threads:
            thread.join()


class RawConnection:
    """An HTTP/2 connection without a gRPC library: its calls send exactly the given bytes.

    Not encrypted. It acknowledges the server's settings and pings, and otherwise reads only flow-control windows and
    the status of calls.
    """

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self._socket = socket.create_connection((host.strip("[]"), int(port)), timeout=30)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._lock = threading.Lock()
        self._changed = threading.Condition()
        self._windows = {0: 65_535}
        self._initial = 65_535
        self._next = 1
        self.ended: dict[int, float] = {}  # calls ended by the server, and when (monotonic, seconds)
        self.closed = False  # by the server
        self.going_away = False  # the server accepts no further calls on it
        self.settings: dict[int, int] = {}  # of the server, by their HTTP/2 identifiers
        self._send(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + _frame(4, 0, 0, b""))
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def call(self, method: str = GENERATE) -> int:
        """Start a call by sending its headers only; returns its stream id."""
        with self._changed:
            stream, self._next = self._next, self._next + 2
            self._windows[stream] = self._initial
        headers = [(":method", "POST"), (":scheme", "http"), (":path", method), (":authority", "server")]
        headers += [("te", "trailers"), ("content-type", "application/grpc")]
        self._send(_frame(1, 0x4, stream, b"".join(_header(name, value) for name, value in headers)))
        return stream

    def announce(self, stream: int, size: int) -> None:
        """Send the gRPC prefix of a message of ``size`` bytes without any of these."""
        self.send(stream, b"\0" + struct.pack(">I", size))

    def send(self, stream: int, data: bytes, *, timeout: float = 30.0) -> int:
        """Send ``data`` within the flow-control windows; returns the bytes sent until the call's end or ``timeout``."""
        sent, limit = 0, time.monotonic() + timeout
        while sent < len(data):
            with self._changed:
                while (room := min(self._windows[0], self._windows[stream], 16_384, len(data) - sent)) <= 0:
                    left = limit - time.monotonic()
                    if left <= 0 or self.closed or stream in self.ended or not self._changed.wait(left):
                        return sent
                if self.closed or stream in self.ended:
                    return sent
                self._windows[0] -= room
                self._windows[stream] -= room
            self._send(_frame(0, 0, stream, data[sent : sent + room]))
            sent += room
        return sent

    def close(self) -> None:
        """Close the connection."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._reader.join()
        self._socket.close()

    def __enter__(self) -> RawConnection:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def _send(self, data: bytes) -> None:
        with self._lock, contextlib.suppress(OSError):
            self._socket.sendall(data)

    def _read(self) -> None:
        stream_file = self._socket.makefile("rb")
        with contextlib.suppress(OSError, struct.error):
            while len(head := stream_file.read(9)) == 9:
                size, kind, flags, stream = head[0] << 16 | head[1] << 8 | head[2], head[3], head[4], head[5:]
                self._take(kind, flags, int.from_bytes(stream) & 0x7FFFFFFF, stream_file.read(size))
        with self._changed:
            self.closed = self.going_away = True
            self._changed.notify_all()

    def _take(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        if kind == 4 and not flags & 1:  # SETTINGS
            with self._changed:
                for at in range(0, len(payload), 6):
                    name, value = struct.unpack_from(">HI", payload, at)
                    self.settings[name] = value
                    if name == 4:  # INITIAL_WINDOW_SIZE
                        for number in self._windows.keys() - {0}:
                            self._windows[number] += value - self._initial
                        self._initial = value
                self._changed.notify_all()
            self._send(_frame(4, 1, 0, b""))
        elif kind == 6 and not flags & 1:  # PING
            self._send(_frame(6, 1, 0, payload))
        elif kind == 7:  # GOAWAY
            self.going_away = True
        elif kind == 8:  # WINDOW_UPDATE
            with self._changed:
                if stream in self._windows:
                    self._windows[stream] += int.from_bytes(payload) & 0x7FFFFFFF
                self._changed.notify_all()
        elif kind == 3 or (kind in (0, 1) and flags & 1):  # RST_STREAM, or END_STREAM
            with self._changed:
                self.ended.setdefault(stream, time.monotonic())
                self._changed.notify_all()


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    """A frame of HTTP/2 (RFC 9113, section 4.1)."""
    return struct.pack(">I", len(payload))[1:] + bytes((kind, flags)) + struct.pack(">I", stream) + payload


def _header(name: str, value: str) -> bytes:
    """A header field as an HPACK literal without indexing (RFC 7541, section 6.2.2); name and value below 127 bytes."""
    return b"\0" + bytes((len(name),)) + name.encode() + bytes((len(value),)) + value.encode()


@contextlib.contextmanager
def silent_calls(address: str, *, connections: int = 1, calls: int = 60, method: str = GENERATE) -> Iterator[list[Any]]:
    """``calls`` calls on each of ``connections`` connections that send only headers."""
    with contextlib.ExitStack() as stack:
        opened = [stack.enter_context(RawConnection(address)) for _ in range(connections)]
        for connection in opened:
            for _ in range(calls):
                connection.call(method)
        yield opened


@contextlib.contextmanager
def unfinished_messages(
    address: str, size: int, *, sent: int, rate: float = 0.0, connections: int = 4, calls: int = 1
) -> Iterator[list[Any]]:
    """Calls that announce messages of ``size`` bytes and send only ``sent`` of them, as fast as possible, then ``rate``
    bytes a second each."""
    ended = threading.Event()

    def trickle(connection: RawConnection, stream: int) -> None:
        connection.send(stream, bytes(sent))
        while rate and not ended.wait(0.1) and connection.send(stream, bytes(max(1, int(rate * 0.1)))):
            pass

    threads = list[threading.Thread]()
    with contextlib.ExitStack() as stack:
        opened = [stack.enter_context(RawConnection(address)) for _ in range(connections)]
        for connection in opened:
            for _ in range(calls):
                stream = connection.call()
                connection.announce(stream, size)
                threads.append(threading.Thread(target=trickle, args=(connection, stream), daemon=True))
                threads[-1].start()
        try:
            yield opened
        finally:
            ended.set()
            for connection in opened:
                connection.close()
            for thread in threads:
                thread.join()
