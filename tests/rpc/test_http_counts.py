"""Streams over HTTP that do not come to their end are counted as what ended them, in every place that counts."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from echo_server import PATIENCE
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families
from test_http_connections import CHAT, PARSERS, Served, ask, using, wait_for

from mmserve.errors import Internal, MMServeError, ResourceExhausted, Unavailable
from mmserve.http import chat, front

PATHS = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "one two three"}]},
    "/v1/completions": {"prompt": "one two three"},
    "/v1/messages": {"messages": [{"role": "user", "content": "one two three"}], "max_tokens": 9},
    "/v1/responses": {"input": "one two three"},
}


@pytest.fixture(params=PARSERS)
def served(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    using(request.param, monkeypatch)
    with Served() as found:
        yield found


def counted(served: Served, name: str, label: str) -> Counter[str]:
    """The codes of ``name``, with their numbers."""
    found = Counter[str]()
    for family in text_string_to_metric_families(generate_latest(served.server.metrics.registry).decode()):
        for sample in family.samples:
            if sample.name == name and sample.value:
                found[sample.labels[label]] += int(sample.value)
    return found


def calls(served: Served) -> Counter[str]:
    return counted(served, "grpc_server_handled_total", "grpc_code")


def failures(served: Served) -> Counter[str]:
    return counted(served, "mmserve:request_failure_total", "code")


def streamed(path: str, **fields: object) -> bytes:
    body = json.dumps({"model": "echo", "stream": True, **PATHS[path], **fields}).encode()
    return ask("", body=body).replace(CHAT.encode(), path.encode(), 1)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("error", [Unavailable("gone"), ResourceExhausted("full"), Internal("a bug", error_id="1")])
def test_a_failure_after_the_first_event_counts_by_its_code(
    served: Served, path: str, error: MMServeError, caplog: pytest.LogCaptureFixture
) -> None:
    served.engine.failure = error
    with caplog.at_level("INFO", "mmserve.access"):
        answer = served.send(streamed(path))
    assert b" 200 OK" in answer and error.message.encode() in answer
    assert calls(served) == {error.code: 1} == failures(served)
    [line] = [line for line in caplog.messages if path in line]
    assert f"code={error.code}" in line


def test_a_bug_while_an_answer_is_written_counts_as_internal(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat, "usage", lambda finished, samples: 1 / 0)
    answer = served.send(streamed("/v1/chat/completions", stream_options={"include_usage": True}))
    assert b" 200 OK" in answer and b"internal" in answer
    assert calls(served) == {"INTERNAL": 1}


@pytest.mark.parametrize("path", PATHS)
def test_a_client_that_leaves_in_the_middle_counts_as_over_grpc(served: Served, path: str) -> None:
    served.engine.pause = 0.02
    with served.connect() as connection:
        connection.sendall(streamed(path))
        assert b" 200 OK" in connection.recv(1 << 10)
        served.engine.go.clear()
    wait_for("the call's end", lambda: calls(served))
    assert calls(served) == {"CANCELLED": 1} == failures(served)


@pytest.mark.parametrize(
    ("path", "slow", "body"),
    [
        ("/v1/constraints", "check_constraint", {"guided_regex": "a"}),
        ("/v1/messages/count_tokens", "prompt_ids", {"messages": [{"role": "user", "content": "one"}]}),
    ],
)
def test_a_client_that_leaves_while_a_thread_works_for_it_is_not_waited_for(
    served: Served, path: str, slow: str, body: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise clients that leave could have any number of checks wait for the one thread that runs them."""
    begun, go = threading.Event(), threading.Event()

    def work(*_: object) -> None:
        begun.set()
        go.wait()

    monkeypatch.setattr(served.engine, slow, work, raising=False)
    try:
        with served.connect() as connection:
            connection.sendall(
                ask("", body=json.dumps({"model": "echo", **body}).encode()).replace(CHAT.encode(), path.encode(), 1)
            )
            assert begun.wait(PATIENCE)
        wait_for("the call's end", lambda: calls(served))
        assert calls(served) == {"CANCELLED": 1}
    finally:
        go.set()


def test_long_prompts_whose_tokens_are_asked_for_do_not_delay_metrics(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many there are."""
    go = threading.Event()
    monkeypatch.setattr(served.engine, "prompt_ids", lambda *_: go.wait() and [], raising=False)
    body = json.dumps({"model": "echo", "prompt": "one"}).encode()
    try:
        with ExitStack() as stack:
            for _ in range(40):  # more than the threads of an executor of asyncio
                waiting = stack.enter_context(served.connect())
                waiting.sendall(ask("", body=body).replace(CHAT.encode(), b"/tokenize", 1))
            assert b" 200 OK" in served.send(b"GET /metrics HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
    finally:
        go.set()


@pytest.mark.parametrize("decoded", [True, False])
def test_a_client_that_leaves_before_it_has_taken_the_whole_answer(
    decoded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the server waits for it to read; ``decoded``: the answer is whole by then."""
    real = front._listener

    def narrow(host: str, port: int) -> socket.socket:
        found = real(host, port)
        found.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # its connections have the same
        return found

    monkeypatch.setattr(front, "_listener", narrow)
    text = " ".join(["a" * 50_000] * 20)
    with Served() as served, socket.socket() as connection:
        served.engine.pause = 0.0 if decoded else 0.2
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", served.front.port))
        connection.sendall(streamed(CHAT, messages=[{"role": "user", "content": text}]))
        assert b" 200 OK" in connection.recv(1 << 10)
        if decoded:
            wait_for("the whole answer", lambda: served.engine.requests and not served.engine.running)
        else:
            time.sleep(0.5)  # the second word is written, which waits for the first
        connection.close()
        wait_for("the call's end", lambda: calls(served))
        assert calls(served) == {"CANCELLED": 1} == failures(served)
