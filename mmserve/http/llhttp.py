"""Connections parsed by httptools (llhttp, the parser of Node.js), which takes a fifth of the time of h11.

llhttp, as used by uvicorn, checks less than h11 does: what h11 refuses is refused here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from mmserve.http.connections import HEAD_BYTES, TINY, Limits, Parts, wrong_head

#: Requests of a pipeline, the running one included, while the connection is read further.
_PIPELINED = 8
_LENGTHS = (b"content-length", b"transfer-encoding")


class _Refused(Exception):
    """Raised in a parser callback: uvicorn responds 400 and closes the connection."""


class LlhttpConnection(Limits, HttpToolsProtocol):
    """A connection parsed by httptools."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._in_head, self._in_body = True, False
        self._begun = False  # whether the current data began a request
        self._known_head = False  # whether the head was parsed before, only for its length
        self._known = self._fed = 0  # bytes of the head: of its fields, and of reads after its first
        self._parts = Parts()
        #: A running request, and those of a pipeline that wait for it: ``cycle`` is the last one.
        self._cycles: deque[Any] = deque()

    def _unfinished(self) -> Iterable[Any]:
        return self._cycles

    def _awaited(self) -> bool:
        return self._in_head or (self._in_body and self.cycle.response_complete)

    def data_received(self, data: bytes) -> None:
        """Parse ``data``."""
        self._unset_keepalive_if_required()
        self._begun = False
        try:
            self._parse(memoryview(data))
        except httptools.HttpParserError:
            self.send_400_response("Invalid HTTP request received.")
        if self._in_head and not self._begun and not self.transport.is_closing():
            self._fed += len(data)  # the parser keeps a field until it is complete
            if self._fed > HEAD_BYTES:
                self.send_400_response("The head of the request is too long.")
        self._watch()

    def _parse(self, data: memoryview) -> None:
        """Parse ``data``. The parser stops after the head of a request for another protocol (upgrade), which this
        server may ignore: its body and following data are passed to a new parser, together with the length."""
        while True:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as ended:
                data = data[ended.args[0] :]
            self.parser = httptools.HttpRequestParser(self)
            self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as in uvicorn
            self._known_head = True
            lengths = [b"%s: %s\r\n" % field for field in self.headers if field[0] in _LENGTHS]
            self.parser.feed_data(b"POST / HTTP/1.1\r\n%s\r\n" % b"".join(lengths))
            self._known_head = False

    def send_400_response(self, msg: str) -> None:
        """Respond and close; if unreadable data follow a request that is still running, respond only to that one, then
        close."""
        if self.cycle is None or self.cycle.response_complete or self._in_body:
            if self.cycle is None or not self.cycle.response_started or self.cycle.response_complete:
                super().send_400_response(msg)
            else:
                self.transport.close()  # during a response, another one would be taken for a part of it
        else:
            self.cycle.keep_alive = False
            self.flow.pause_reading()

    def on_message_begin(self) -> None:
        """The first byte of a request was received."""
        if not self._known_head:
            super().on_message_begin()
            self._in_head = self._begun = True
            self._known = self._fed = 0

    def on_url(self, url: bytes) -> None:
        """A part of the target was received."""
        if not self._known_head:
            self._count(len(url))
            super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """A field was received: of the head, or of a trailer, whose fields are ignored."""
        if not self._known_head:
            self._count(len(name) + len(value) + 4)
            if self._in_head:
                super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """The head is complete."""
        if self._known_head:
            return
        version = self.parser.get_http_version().encode()
        if why := wrong_head(self.parser.get_method(), version, self.headers):
            raise _Refused(why)
        self._in_head, self._in_body, self._known = False, True, 0
        self._parts = Parts()
        super().on_headers_complete()
        while self._cycles and self._cycles[0].response_complete:
            self._cycles.popleft()
        self._cycles.append(self.cycle)
        if 1 < len(self._cycles) <= _PIPELINED:
            self.flow.resume_reading()  # uvicorn pauses, and would not notice that the client disconnects

    def on_body(self, body: bytes) -> None:
        """A part of the body was received."""
        if self._parts.tiny(len(body)):
            raise _Refused(f"chunks of less than {TINY} bytes")
        super().on_body(body)

    def on_message_complete(self) -> None:
        """The request is complete, unless it is for another protocol (``_parse``)."""
        if not self.parser.should_upgrade():
            self._in_body = False
            super().on_message_complete()

    def _count(self, size: int) -> None:
        self._known += size
        if self._known > HEAD_BYTES:
            raise _Refused(f"a head or a trailer of more than {HEAD_BYTES} bytes")
