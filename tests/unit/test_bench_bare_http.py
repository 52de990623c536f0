"""The bare uvicorn application that ``mmserve bench http`` compares the front end with."""

from __future__ import annotations

from contextlib import closing
from http.client import HTTPConnection

import pytest

from mmserve.bench.bare_http import BareProcess


def test_requests_are_answered_with_the_events_over_one_connection() -> None:
    with BareProcess([{"a": 1}, {"b": "ü"}], 0.001) as bare:
        with closing(HTTPConnection("127.0.0.1", bare.port, timeout=60)) as connection:
            for _ in range(2):
                connection.request("POST", "/", "{}", {"content-type": "application/json"})
                response = connection.getresponse()
                assert (response.status, response.getheader("content-type")) == (
                    200,
                    "text/event-stream; charset=utf-8",
                )
                assert response.read() == b'data: {"a": 1}\n\ndata: {"b": "\\u00fc"}\n\n'
        assert bare.loop_seconds() > 0
    with closing(HTTPConnection("127.0.0.1", bare.port, timeout=60)) as connection, pytest.raises(ConnectionError):
        connection.request("POST", "/", "{}")
