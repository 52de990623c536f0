"""What a body may cost over HTTP: the number of its values, the bytes that arrive, and the length of its error."""

from __future__ import annotations

import gzip
import http.client
import json
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from typing import Any

import pytest
from echo_server import PATIENCE
from test_http_connections import CHAT, Served

from mmserve.errors import InvalidArgument
from mmserve.http.body import MAX_CONTAINERS, MAX_ESCAPES, MAX_VALUES, _parsed, _too_many

HELLO = {"model": "echo", "messages": [{"role": "user", "content": "one two"}]}


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with Served(max_message_bytes=16 << 20) as found:
        yield found


def post(served: Served, body: Any, path: str = CHAT, **headers: str) -> tuple[int, bytes]:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    with closing(http.client.HTTPConnection("127.0.0.1", served.front.port, timeout=PATIENCE)) as connection:
        connection.request("POST", path, data, {"content-type": "application/json", **headers})
        response = connection.getresponse()
        return response.status, response.read()


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, {"messages": [{"role": "user", "content": ""}] * 50_000}),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}] * 50_000}]}),
        (CHAT, {"tools": [{"type": "function", "function": {"name": "a"}}] * 50_000}),
        (CHAT, {"logit_bias": {str(i): 1 for i in range(200_000)}}),
        ("/v1/responses", {"input": [{"role": "user", "content": ""}] * 50_000}),
        ("/v1/decisions", {"input": "a", "questions": [{"id": "a", "type": "yes_no", "question": "b"}] * 50_000}),
    ],
    ids=["messages", "parts", "tools", "biases", "input", "questions"],
)
def test_a_body_of_too_many_values_is_refused_before_it_is_read(
    served: Served, path: str, fields: dict[str, Any]
) -> None:
    status, answer = post(served, {**HELLO, **fields}, path)
    assert status == 400 and b"at most 16384 objects and arrays, and 131072 values" in answer


@pytest.mark.parametrize(
    "fields",
    [
        {f"k{i}": 1 for i in range(100_000)},
        {"stop": [""] * 100_000},
        {"model": "k" * 5_000_000},
        {"k" * 5_000_000: 1},
        {"mmserve": {"k" * 5_000_000: 1}},
    ],
    ids=["unknown fields", "stop strings", "a name", "a field", "an own field"],
)
def test_an_error_is_short_whatever_the_body_has(served: Served, fields: dict[str, Any]) -> None:
    status, answer = post(served, {**HELLO, **fields})
    assert status in (400, 404) and len(answer) < 10_000
    assert json.loads(answer)["error"]["message"]


def test_commas_and_brackets_in_texts_are_no_values(served: Served) -> None:
    for text in (",[{" * 200_000, '\\",[' * 200_000):
        body = {"model": "echo", "messages": [{"role": "user", "content": text}]}
        status, answer = post(served, body)
        assert status == 200, answer[:200]
        assert json.loads(answer)["choices"][0]["message"]["content"] == text


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16", "utf-32"])
def test_the_limits_are_exact(encoding: str) -> None:
    for fits, body in (
        (True, f'{{"a": [{"[]," * (MAX_CONTAINERS - 3)}[]]}}'),
        (False, f'{{"a": [{"[]," * (MAX_CONTAINERS - 2)}[]]}}'),
        (True, f'{{"a": [{"1," * (MAX_VALUES - 2)}1]}}'),
        (False, f'{{"a": [{"1," * (MAX_VALUES - 1)}1]}}'),
    ):
        assert _too_many(body.encode(encoding)) is not fits
    hidden = '{"a": "' + chr(0x2200) * 3 + '", "b": [' + "1," * MAX_VALUES + "1]}"
    with pytest.raises(InvalidArgument, match="131072 values"):
        _parsed(hidden.encode(encoding))


@pytest.mark.parametrize("escape", [b"\\n", b"\\\\", b'\\"', b"\\u00e9"])
def test_escapes_are_bounded(escape: bytes) -> None:
    """A body of 60 MB of them took seconds, in which nothing else was served."""
    found = _parsed(b'["' + escape * MAX_ESCAPES + b'"]')
    assert len(found[0]) == MAX_ESCAPES
    with pytest.raises(InvalidArgument, match="at most 4194304 escapes in its texts: send characters as UTF-8"):
        _parsed(b'["' + escape * (MAX_ESCAPES + 1) + b'"]')


@pytest.mark.parametrize("text", ["\\", '\\\\"', '"\\', 'a\\"b', '\\n"'])
def test_strings_end_where_they_do(text: str) -> None:
    """Brackets and commas after a string are counted, whatever escapes it has, and those within it are not."""
    written = json.dumps(text)
    assert not _too_many(f'[{written[:-1]}{"[," * MAX_VALUES}", {written}]'.encode())
    assert _too_many(f"[{written}, {'1,' * MAX_VALUES} {written}]".encode())


@pytest.mark.parametrize(
    "data",
    [b'"' + b'\\"' * (4 << 20), b'""' * (4 << 20), b"[" * (8 << 20), b'"' * ((8 << 20) + 1), b'{"a":"\\' * 100_000],
)
def test_counting_takes_time_in_proportion_to_the_body(data: bytes) -> None:
    begun = time.process_time()
    _too_many(b"{" * 20_000 + data)
    with pytest.raises(InvalidArgument):
        _parsed(data)
    assert time.process_time() - begun < 10


def test_bytes_that_arrive_count_among_those_of_requests_in_progress(served: Served) -> None:
    budget = served.server.budget
    fields = f"host: localhost\r\ncontent-type: application/json\r\ncontent-length: {8 << 20}"
    head = f"POST {CHAT} HTTP/1.1\r\n{fields}\r\n\r\n"
    with ExitStack() as held:
        connection = held.enter_context(served.connect())
        connection.sendall(head.encode() + b" " * (6 << 20))
        limit = time.monotonic() + PATIENCE
        while budget.used < 5 << 20:
            assert time.monotonic() < limit, budget.used
            time.sleep(0.01)
        held.enter_context(budget.taken((), budget.capacity - budget.used))
        connection.sendall(b" " * (2 << 20))
        assert b" 429 " in connection.recv(4096).split(b"\r\n")[0]
    while budget.used:
        assert time.monotonic() < limit, budget.used
        time.sleep(0.01)


def test_a_compressed_body_is_refused_as_such(served: Served) -> None:
    status, answer = post(served, gzip.compress(json.dumps(HELLO).encode()), **{"content-encoding": "gzip"})
    assert status == 415 and b"content-encoding" in answer
    assert post(served, HELLO, **{"content-encoding": "identity"})[0] == 200
