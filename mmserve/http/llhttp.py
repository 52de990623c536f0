"""Connections that httptools parses, which is llhttp, the parser of Node.js: a fifth of the work of h11.

llhttp checks less than h11 does, and uvicorn leaves it at that: what is refused here is what h11 refuses.
"""

from __future__ import annotations

from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from mmserve.http.connections import HEAD_BYTES, TINY, Limits, Parts, wrong_head

_LENGTHS = (b"content-length", b"transfer-encoding")


class _Refused(Exception):
    """Raised in a callback of the parser: uvicorn answers 400 and closes the connection."""


class LlhttpConnection(Limits, HttpToolsProtocol):
    """A connection that httptools parses."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._in_head, self._in_body = True, False
        self._begun = False  # a request, by the data that is parsed now
        self._known_head = False  # is parsed, for its length alone
        self._known = self._fed = 0  # bytes of the head: of its fields, and of reads that it did not begin in
        self._parts = Parts()

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
            self._fed += len(data)  # the parser keeps a field until it is whole
            if self._fed > HEAD_BYTES:
                self.send_400_response("The head of the request is too long.")
        self._watch()

    def _parse(self, data: memoryview) -> None:
        """Parse ``data``. The parser ends with the head of a request for another protocol, which this server may
        ignore: its body and what follows go to a new parser, which is given the length again."""
        while True:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as ended:
                data = data[ended.args[0] :]
            self.parser = httptools.HttpRequestParser(self)
            self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn does
            self._known_head = True
            lengths = [b"%s: %s\r\n" % field for field in self.headers if field[0] in _LENGTHS]
            self.parser.feed_data(b"POST / HTTP/1.1\r\n%s\r\n" % b"".join(lengths))
            self._known_head = False

    def send_400_response(self, msg: str) -> None:
        """Answer and close; where what cannot be read follows a request that is still to be answered, answer that one
        alone, and close then."""
        if self.cycle is None or self.cycle.response_complete or self._in_body:
            if self.cycle is None or not self.cycle.response_started or self.cycle.response_complete:
                super().send_400_response(msg)
            else:
                self.transport.close()  # in the middle of an answer, another one would be taken for a part of it
        else:
            self.cycle.keep_alive = False
            self.flow.pause_reading()

    def on_message_begin(self) -> None:
        """The first byte of a request is there."""
        if not self._known_head:
            super().on_message_begin()
            self._in_head = self._begun = True
            self._known = self._fed = 0

    def on_url(self, url: bytes) -> None:
        """A piece of the target is there."""
        if not self._known_head:
            self._count(len(url))
            super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """A field is there: of the head, or of the trailer, whose fields are nobody's."""
        if not self._known_head:
            self._count(len(name) + len(value) + 4)
            if self._in_head:
                super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """The head is whole."""
        if self._known_head:
            return
        version = self.parser.get_http_version().encode()
        if why := wrong_head(self.parser.get_method(), version, self.headers):
            raise _Refused(why)
        self._in_head, self._in_body, self._known = False, True, 0
        self._parts = Parts()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """A part of the body is there."""
        if self._parts.tiny(len(body)):
            raise _Refused(f"chunks of less than {TINY} bytes")
        super().on_body(body)

    def on_message_complete(self) -> None:
        """The request is whole, unless it is for another protocol (``_parse``)."""
        if not self.parser.should_upgrade():
            self._in_body = False
            super().on_message_complete()

    def _count(self, size: int) -> None:
        self._known += size
        if self._known > HEAD_BYTES:
            raise _Refused(f"a head or a trailer of more than {HEAD_BYTES} bytes")
