"""The HTTP front over real sockets: the official OpenAI client, and requests no client would send."""

from __future__ import annotations

import base64
import contextlib
import http.client
import json
import logging
import random
import re
import socket
import ssl
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from certificates import self_signed
from e2e_helpers import EMPTY, PATIENCE, Running, gated, running, settings, wait_for

from mmserve import __version__
from mmserve.assembly import BackgroundServer
from mmserve.errors import ConfigError
from mmserve.http import connections, front
from mmserve.http.front import HttpFront
from mmserve.reference.evaluate import item
from mmserve.reference.tasks import sample
from mmserve.tenants import TenantConfig

CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "How many shapes are there?"}]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


@pytest.fixture(scope="module")
def served() -> Iterator[Running]:
    server = {"http_port": free_port(), "max_message_bytes": 1 << 20, "message_seconds": 2.0}
    with running(settings(server=server, engine={"max_samples": 4})) as found:
        yield found
        found.assert_serves()


@pytest.fixture
def port(served: Running) -> int:
    return served.background.config.server.http_port


@pytest.fixture
def client(port: int) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="any", max_retries=0, timeout=PATIENCE) as found:
        yield found


def scene(seed: int = 0) -> tuple[bytes, str, list[Any]]:
    """A picture, a question about it, and both as messages."""
    picture, question = sample("count", random.Random(seed))
    url = "data:image/png;base64," + base64.b64encode(picture.png()).decode()
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": question.text}]
    return picture.png(), question.text, [{"role": "user", "content": parts}]


def ask(port: int, body: Any, path: str = CHAT, headers: dict[str, str] | None = None) -> tuple[int, Any, Any]:
    """Status, JSON body and headers of a POST; ``body`` is bytes, or becomes JSON."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    connection.request("POST", path, data, {"content-type": "application/json", **(headers or {})})
    response = connection.getresponse()
    answer = json.loads(response.read())
    connection.close()
    return response.status, answer, response.headers


def head(length: str) -> bytes:
    """The head of a POST with a line about its body's length."""
    return f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n{length}\r\n\r\n".encode()


def test_an_answer_is_that_of_grpc(served: Running, client: openai.OpenAI) -> None:
    picture, text, messages = scene()
    options: dict[str, Any] = {"temperature": 0.8, "top_p": 0.9, "seed": 7}
    expected = served.client.generate(text, images=[picture], max_new_tokens=24, **options)
    found = client.chat.completions.create(
        model="bundled", messages=messages, max_completion_tokens=24, logprobs=True, **options
    )
    choice = found.choices[0]
    assert choice.message.content == expected.text and choice.finish_reason == "stop"
    assert found.usage is not None and choice.logprobs is not None and choice.logprobs.content is not None
    assert found.usage.prompt_tokens == expected.usage.prompt_tokens
    assert found.usage.completion_tokens == expected.usage.completion_tokens == len(choice.logprobs.content)
    assert all(token.logprob <= 0 for token in choice.logprobs.content)
    assert found.id.startswith("chatcmpl-") and found.object == "chat.completion"


def test_a_stream_adds_up_to_the_whole(client: openai.OpenAI) -> None:
    _, _, messages = scene(1)
    asked: dict[str, Any] = {"model": "bundled", "messages": messages, "max_tokens": 32, "n": 2, "temperature": 1.0}
    whole = client.chat.completions.create(**asked)
    texts, reasons, usages = ["", ""], [None, None], []
    for chunk in client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            reasons[choice.index] = choice.finish_reason or reasons[choice.index]
        usages += [chunk.usage] if chunk.usage else []
    assert texts == [choice.message.content for choice in whole.choices]
    assert reasons == [choice.finish_reason for choice in whole.choices]
    assert usages == [whole.usage]


SCHEMA = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "blue"]}, "count": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["colour", "count"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("options", "accepts"),
    [
        ({"response_format": {"type": "json_object"}}, lambda text: isinstance(json.loads(text), dict)),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "s", "strict": True, "schema": SCHEMA},
                }
            },
            lambda text: set(json.loads(text)) == {"colour", "count"},
        ),
        ({"extra_body": {"structured_outputs": {"json": SCHEMA}}}, lambda text: json.loads(text)["count"] <= 9),
        ({"extra_body": {"structured_outputs": {"regex": "[a-c]{3}"}}}, lambda text: set(text) <= set("abc")),
        ({"extra_body": {"guided_choice": ["left", "right"]}}, lambda text: text in ("left", "right")),
        ({"extra_body": {"guided_grammar": 'start: "x" | "y"'}}, lambda text: text in ("x", "y")),
        ({"extra_body": {"guided_grammar": 'root ::= "x" | "y"'}}, lambda text: text in ("x", "y")),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_constraints_hold(client: openai.OpenAI, options: dict[str, Any], accepts: Any) -> None:
    found = client.chat.completions.create(
        model="bundled", messages=HELLO, max_tokens=40, temperature=2.0, seed=1, **options
    )
    assert accepts(found.choices[0].message.content)


def test_policies_are_set_under_mmserve(served: Running, client: openai.OpenAI) -> None:
    plain = {"diffusion": {"noCache": {}, "lowConfidence": {}, "steps": 6}}
    found = client.chat.completions.create(model="bundled", messages=HELLO, max_tokens=6, extra_body={"mmserve": plain})
    own: Any = found.model_extra
    assert own["mmserve"]["forwards"] == 6


CASES: list[tuple[dict[str, Any], int, str | None, str]] = [
    ({"model": "gone"}, 404, "model", "there is bundled"),
    ({"model": "bundled:gone"}, 404, "model", "no adapter 'gone'"),
    ({"model": None}, 400, "model", "is required"),
    ({"messages": []}, 400, "messages", "at least one message"),
    ({"messages": "hi"}, 400, "messages", "an array"),
    ({"messages": [{"role": "tool", "content": "1"}]}, 400, "messages[0].tool_call_id", "call"),
    ({"messages": [{"role": "critic", "content": "1"}]}, 400, "messages[0].role", "'assistant'"),
    ({"messages": [{"role": "user", "content": 3}]}, 400, "messages[0].content", "a string or an array"),
    ({"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]}, 400, "messages[0].content[0].type", ""),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://a/b.png"}}]}]},
        400,
        "messages[0].content[0].image_url.url",
        "[media] url_hosts",
    ),
    *(
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": f"{url},{data}"}}]}]},
            400,
            "messages[0].content[0].image_url.url",
            "is not valid base64",
        )
        for url, data in (("data:image/png;base64", "@"), ("data:image/png;BASE64", "é"))
    ),
    ({"temperature": -1}, 400, "temperature", "at least 0"),
    ({"temperature": "hot"}, 400, "temperature", "a number"),
    ({"temperature": True}, 400, "temperature", "a number"),
    ({"seed": 1 << 64}, 400, "seed", "out of range"),
    ({"n": 0}, 400, "n", "at least 1"),
    ({"n": 5}, 400, "n", "must be in [1, 4]"),
    ({"stop": [""]}, 400, "stop[0]", "empty"),
    ({"max_tokens": 8, "max_completion_tokens": 9}, 400, "max_tokens", "set one of them"),
    ({"max_completion_tokens": 100_000}, 400, "max_completion_tokens", "must be in"),
    ({"max_tokens": 100_000}, 400, "max_tokens", "must be in"),
    ({"top_logprobs": 3}, 400, "top_logprobs", "logprobs = true"),
    ({"top_logprobs": 21, "logprobs": True}, 400, "top_logprobs", "at most 20"),
    ({"top_logprobs": -1, "logprobs": True}, 400, "top_logprobs", "out of range"),
    ({"stream": "yes"}, 400, "stream", "true or false"),
    ({"mmserve": {"stream": {"drafts": True}}}, 400, "mmserve.stream.drafts", "stream = true"),
    ({"mmserve": {"stream": {"snapshots": True}}}, 400, "mmserve.stream.snapshots", "must be one of"),
    ({"frequency_penalty": 2.5}, 400, "frequency_penalty", "must be in [-2, 2]"),
    ({"logit_bias": {"a": 1}}, 400, "logit_bias", "ids of tokens"),
    ({"logit_bias": {"1" * 5000: 1}}, 400, "logit_bias", "ids of tokens"),
    ({"logit_bias": {"7": 101}}, 400, "logit_bias", "must be in [-100, 100]"),
    ({"tools": [{"type": "function"}]}, 400, "tools[0].function.name", "letters"),
    ({"tools": [{"type": "web_search"}]}, 400, "tools[0].type", "function"),
    ({"stream_options": {"include_usage": True}}, 400, "stream_options", "stream = true"),
    ({"response_format": {"type": "xml"}}, 400, "response_format.type", "json_schema"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "strange"}}}},
        400,
        "response_format",
        "",
    ),
    ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, 400, "guided_regex", "combined"),
    ({"mmserve": {"tenant": 1}}, 400, "mmserve.tenant", "must be one of"),
    ({"mmserve": {"diffusion": {"steps": 0}}}, 400, "mmserve.diffusion.steps", "at least 1"),
    ({"mmserve": {"diffusion": {"steps": "many"}}}, 400, "mmserve", "steps"),
    ({"mmserve": {"diffusion": {"threshold": {"confidence": 10**400}}}}, 400, "mmserve", "too large"),
    ({"mmserve": {"kv_reduction": {"heavy_hitters": {"budget": 8}}}}, 400, None, ""),
    ({"colour": "red"}, 400, "colour", "not a field"),
    ({"": 1}, 400, '""', "not a field"),
    ({"mmserve": {"stream": {"alternatives": 21}}}, 400, "mmserve.stream.alternatives", "at most 20"),
]


@pytest.mark.parametrize(("changes", "status", "param", "text"), CASES, ids=lambda value: str(value)[:40])
def test_what_is_wrong_is_named(port: int, changes: dict[str, Any], status: int, param: str | None, text: str) -> None:
    found, body, headers = ask(port, {"model": "bundled", "messages": HELLO, **changes}, headers={"x-request-id": "a1"})
    error = body["error"]
    assert (found, headers["x-request-id"]) == (status, "a1")
    assert text in error["message"] and (error["param"] or "").startswith(param or "")
    assert error["type"] == "invalid_request_error" and (error["code"] == "model_not_found") == (status == 404)


def nested(depth: int) -> bytes:
    """A body that is right but for a schema of so many levels; one of 970 could be parsed, and not written again."""
    schema = b'{"a":' * (depth - 1) + b"1" + b"}" * (depth - 1)
    return json.dumps({"model": "bundled", "messages": HELLO, "guided_json": 0}).encode()[:-2] + schema + b"}"


@pytest.mark.parametrize(
    ("data", "headers", "status", "text"),
    [
        (b"{", {}, 400, "must be JSON"),
        (b"[1]", {}, 400, "a JSON object"),
        (b'{"a": NaN}', {}, 400, "NaN"),
        (b"[" * 16_000, {}, 400, "nested too deeply"),
        (b"[" * 200_000, {}, 400, "at most 16384 objects and arrays"),
        *((nested(depth), {}, 400, "nested too deeply") for depth in (257, 960, 970, 980)),
        (b'{"a": ' + b"9" * 10_000 + b"}", {}, 400, "must be JSON"),
        (b'{"a": "\xff"}', {}, 400, "must be JSON"),
        (b'{"a": "\\ud800"}', {}, 400, "surrogate"),
        (b'{"\xed\xb0\x80": 1}', {}, 400, "surrogate"),
        (b"{}", {"content-type": "text/plain"}, 415, "application/json"),
        (b" " * ((1 << 20) + 1), {}, 413, "max_message_bytes"),
        (b"{}", {"content-length": str(1 << 40)}, 413, "max_message_bytes"),
    ],
    ids=[
        "cut",
        "array",
        "nan",
        "deep",
        "many",
        "257",
        "960",
        "970",
        "980",
        "digits",
        "bytes",
        "half",
        "name",
        "form",
        "long",
        "announced",
    ],
)
def test_hostile_bodies(port: int, data: bytes, headers: dict[str, str], status: int, text: str) -> None:
    found, body, _ = ask(port, data, headers=headers)
    assert found == status and text in body["error"]["message"]


def test_a_body_without_a_length_is_bounded_too(port: int) -> None:
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE) as connection:
        connection.sendall(
            head("transfer-encoding: chunked") + b"".join(b"20000\r\n" + b" " * 0x20000 + b"\r\n" for _ in range(9))
        )
        assert b" 413 " in connection.recv(4096).split(b"\r\n")[0]


def test_a_body_of_tiny_chunks(port: int) -> None:
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE) as connection:
        connection.sendall(head("transfer-encoding: chunked") + b"1\r\n \r\n" * 2000)
        assert b" 400 " in connection.recv(4096).split(b"\r\n")[0]


@pytest.mark.parametrize(
    ("host", "status"),
    [
        *((host, 200) for host in ("localhost", "localhost:8000", "127.0.0.1:1", "[::1]:8000")),
        *((host, 421) for host in ("example.org", "127.0.0.1.example.org", "localhost.example.org:8000", "[", "")),
    ],
)
def test_pages_of_other_hosts_cannot_pass_for_this_one(port: int, host: str, status: int) -> None:
    """A page whose name its owner has lead to this machine is of the same origin, to a browser."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
    connection.request("GET", "/v1/models", headers={"host": host})
    response = connection.getresponse()
    assert response.status == status and (b"http_names" in response.read()) is (status == 421)
    connection.close()


def test_many_streams_at_once_all_get_their_text(served: Running, port: int) -> None:
    """Of 64 clients none waits for the others' ends, and one that does not read costs them nothing."""
    body = {"model": "bundled", "messages": HELLO, "max_tokens": 8, "stream": True, "ignore_eos": True}
    data = json.dumps(body).encode()
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.create_connection(("127.0.0.1", port), PATIENCE)) for _ in range(65)]
        for each in sockets:
            each.settimeout(3 * PATIENCE)
            each.sendall(head(f"content-length: {len(data)}\r\nconnection: close") + data)
        _deaf, *readers = sockets
        texts = list(served.start(lambda: [streamed(each) for each in readers]).result(6 * PATIENCE))
    assert len(set(texts)) == 1 and texts[0]


def test_a_client_that_reads_nothing_is_left(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Its answer ends ``message_seconds`` after it takes nothing any more, and leaves nothing behind."""
    real = front._listener

    def small(host: str, port: int) -> socket.socket:
        listener = real(host, port)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # its connections have the same
        return listener

    monkeypatch.setattr(front, "_listener", small)
    port = free_port()
    drafts = {"stream": {"drafts": True, "alternatives": 20}, "diffusion": {"noCache": {}, "lowConfidence": {}}}
    body = {"model": "bundled", "messages": HELLO, "max_tokens": 96, "ignore_eos": True, "stream": True}
    data = json.dumps({**body, "mmserve": drafts}).encode()
    with running(settings(server={"http_port": port, "message_seconds": 0.5})) as served, socket.socket() as deaf:
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        deaf.connect(("127.0.0.1", port))
        with caplog.at_level(logging.INFO, "mmserve.access"):
            deaf.sendall(head(f"content-length: {len(data)}") + data)
            wait_for("its line of the log", lambda: any(CHAT in line for line in caplog.messages))
        wait_for("an empty engine", lambda: served.engine.stats() == EMPTY)
        served.assert_serves()
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert "code=CANCELLED" in next(line for line in caplog.messages if CHAT in line)


def streamed(connection: socket.socket) -> str:
    """The text of a streamed chat completion."""
    data = b""
    while part := connection.recv(1 << 16):
        data += part
    assert data.startswith(b"HTTP/1.1 200") and b"data: [DONE]" in data
    chunks = [json.loads(line) for line in re.findall(rb"data: (\{.*\})", data)]
    return "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"])


def test_a_body_that_comes_too_slowly(port: int) -> None:
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE) as connection:
        connection.sendall(head("content-length: 9") + b"{")
        assert b" 408 " in connection.recv(4096).split(b"\r\n")[0]


@pytest.mark.parametrize("sent", [b"", b"POST / HTTP/1.1\r\nhost: x\r\nx: "], ids=["silent", "slow head"])
def test_a_head_that_does_not_come(port: int, sent: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "PATIENCE", 0.3)
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE) as connection:
        connection.sendall(sent)
        assert connection.recv(4096) == b""


def test_responses_do_not_wait_for_acknowledgements(served: Running, port: int) -> None:
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        assert connection.recv(4096)
        [server] = [front._uvicorn for front in served.background._server._fronts if isinstance(front, HttpFront)]
        own = [c for c in server.server_state.connections if c.client == connection.getsockname()]
        [accepted] = [c.transport.get_extra_info("socket") for c in own]
        assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_routes_models_health_and_metrics(client: openai.OpenAI, port: int) -> None:
    assert [model.id for model in client.models.list()] == [
        "bundled",
        *(f"bundled:{adapter}" for adapter in ("decisions", "streams", "tools")),
    ]
    assert client.models.retrieve("bundled").owned_by == "mmserve"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gone")
    assert ask(port, {}, path="/v1/embeddings")[0] == 404
    assert ask(port, {}, path="/v1/models")[0] == 405
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
    given = f'{{"version":"{__version__}"}}'.encode()
    for path, expected in (("/health", b'"ok"'), ("/metrics", b"mmserve:num_requests_running"), ("/version", given)):
        connection.request("GET", path)
        response = connection.getresponse()
        assert response.status == 200 and expected in response.read()
    for method, path, status in (("GET", "/gone", 404), ("GET", "/v1/messages", 405)):
        connection.request(method, path, headers={"x-request-id": "mine"})
        response = connection.getresponse()
        assert response.status == status and b"error" in response.read()
        assert response.headers["x-request-id"] == response.headers["request-id"] == "mine"
    connection.close()


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_cancels(
    served: Running, port: int, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with gated(served.engine, monkeypatch) as gates:
        gates.decode.close()
        with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE) as connection:
            body = json.dumps({"model": "bundled", "messages": HELLO, "stream": stream}).encode()
            connection.sendall(head(f"content-length: {len(body)}") + body)
            wait_for("the request to reach decode", lambda: gates.decode.waiting)
        wait_for("the request to be aborted", served.aborted)
        gates.open()
    wait_for("an empty engine", lambda: served.engine.stats() == EMPTY)


def test_a_log_line_and_a_label(port: int, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "mmserve.access"):
        ask(port, {"model": "bundled", "messages": HELLO, "max_tokens": 4}, headers={"x-request-id": "mine"})
        wait_for("the line", lambda: any("request_id=mine" in line for line in caplog.messages))
    line = next(line for line in caplog.messages if "request_id=mine" in line)
    assert f"method={CHAT}" in line and "code=OK" in line and "model=bundled" in line and "completion_tokens=" in line


def test_tokens_and_tenants(tmp_path: Path) -> None:
    (tmp_path / "tokens").write_text("secret\n")
    (tmp_path / "of-admins").write_text("secret of b\n")
    tenants = (
        TenantConfig(name="a", token_file=str(tmp_path / "tokens"), rate=0.01, burst=1),
        TenantConfig(name="b", token_file=str(tmp_path / "of-admins"), admin=True),
    )
    config = settings(server={"http_port": free_port()})
    port = config.server.http_port
    with BackgroundServer(type(config)(server=config.server, engine=config.engine, tenants=tenants)):
        for headers in ({}, {"authorization": "Bearer wrong"}, {"x-api-key": "wrong"}):
            status, body, answered = ask(port, {}, headers=headers)
            assert status == 401 and body["error"]["type"] == "authentication_error"
            assert answered["www-authenticate"] == "Bearer"
        asked = {"model": "bundled", "messages": HELLO, "max_tokens": 4}
        assert ask(port, asked, headers={"x-api-key": "secret"})[0] == 200
        status, body, answered = ask(port, asked, headers={"authorization": "Bearer secret"})
        assert status == 429 and int(answered["retry-after"]) >= 1 and "rate" in body["error"]["message"]
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
        for token, expected, text in (
            ("wrong", 401, b"needs an accepted bearer token"),
            ("secret", 403, b"'a' may not read metrics, which are of all tenants"),
            ("secret of b", 200, b'mmserve:tenant_requests_total{code="OK",tenant="a"} 1.0'),
        ):
            connection.request("GET", "/metrics", headers={"authorization": f"Bearer {token}"})
            response = connection.getresponse()
            found = response.read()
            assert response.status == expected and text in found, found[:500]
        connection.close()


def test_tls(tmp_path: Path) -> None:
    certificate, key = self_signed(tmp_path, "localhost")
    keys = {"tls_certificate": str(certificate), "tls_key": str(key), "http_port": free_port()}
    with BackgroundServer(settings(server=keys)):
        context = ssl.create_default_context(cafile=str(certificate))
        connection = http.client.HTTPSConnection(
            "localhost", int(str(keys["http_port"])), context=context, timeout=PATIENCE
        )
        connection.request("GET", "/health")
        assert connection.getresponse().status == 200
        connection.close()


def test_a_port_in_use_and_missing_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        config = settings(server={"http_port": taken.getsockname()[1]})
        with (
            pytest.raises(ConfigError, match=r"another program uses the port.*server\.http_port=N"),
            BackgroundServer(config),
        ):
            pass
    monkeypatch.delitem(sys.modules, "mmserve.http.front")
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    with pytest.raises(ConfigError, match=r"pip install 'mmserve\[http\]'"):
        BackgroundServer(settings(server={"http_port": free_port()}))


def events_of(port: int, path: str, body: dict[str, Any]) -> list[tuple[str, str]]:
    """The server-sent events of a POST: name and data of each."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
    connection.request("POST", path, json.dumps({**body, "stream": True}), {"content-type": "application/json"})
    response = connection.getresponse()
    text = response.read().decode()
    assert response.status == 200, text
    connection.close()
    found = []
    for block in text.strip().split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.split("\n"))
        found.append((fields.get("event", ""), fields["data"]))
    return found


ALIKE: dict[str, dict[str, Any]] = {
    CHAT: {"messages": HELLO, "max_tokens": 12},
    "/v1/completions": {"prompt": "How many", "max_tokens": 12},
    "/v1/messages": {"messages": HELLO, "max_tokens": 12},
    "/v1/responses": {"input": HELLO[0]["content"], "max_output_tokens": 12},
}


def test_a_maximum_beyond_the_longest_canvas_of_the_model_is_reduced_to_it(port: int) -> None:
    """Clients of Anthropic's API have to name a maximum, and some name thousands for all models."""
    text = item("arithmetic", 1, 0)[1].text
    body = {"model": "bundled", "messages": [{"role": "user", "content": text}]}
    found = [ask(port, {**body, "max_tokens": most}, "/v1/messages")[1] for most in (256, 4096)]
    assert found[0]["content"] == found[1]["content"] and found[0]["usage"] == found[1]["usage"]


@pytest.mark.parametrize("path", ALIKE)
def test_drafts_are_named_events_in_every_api(port: int, path: str) -> None:
    asked = {"model": "bundled", **ALIKE[path]}
    plain = {"diffusion": {"lowConfidence": {}}}
    own = {"mmserve": {**plain, "stream": {"drafts": True, "alternatives": 2}}}
    drafts = [json.loads(data) for name, data in events_of(port, path, {**asked, **own}) if name == "draft"]
    assert [draft["forwards"] for draft in drafts] == list(range(1, len(drafts) + 1))
    assert len(drafts) > 1
    assert len(drafts[0]["positions"]) == drafts[0]["total"] == 12
    canvas: dict[int, dict[str, Any]] = {}
    for draft in drafts:
        assert draft["sample"] == 0
        for at in draft["positions"]:
            assert set(at) == {"index", "id", "text", "state", "confidence", "alternatives"}
            assert all(0 <= probability <= 1 for _id, _text, probability in at["alternatives"])
            canvas[at["index"]] = at
    assert "committed" in {at["state"] for at in canvas.values()} <= {"committed", "draft"}  # drafts follow the end
    without = events_of(port, path, {**asked, "mmserve": plain})
    assert not [name for name, _data in without if name == "draft"]


def test_alternatives_come_with_the_chosen_tokens(port: int, client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "bundled", "messages": HELLO, "max_tokens": 12, "logprobs": True}
    found = client.chat.completions.create(**asked, top_logprobs=4).choices[0].logprobs
    assert found is not None and found.content
    for token in found.content:
        assert len(token.top_logprobs) == 4
        assert token.top_logprobs[0].token == token.token
        assert token.top_logprobs[0].logprob == pytest.approx(token.logprob, abs=1e-4)
        assert [one.logprob for one in token.top_logprobs] == sorted(
            (one.logprob for one in token.top_logprobs), reverse=True
        )
    last = [chunk for chunk in client.chat.completions.create(**asked, top_logprobs=4, stream=True) if chunk.choices]
    assert last[-1].choices[0].logprobs.content == found.content  # type: ignore[union-attr]
    how: dict[str, Any] = {"prompt": "How many", "max_tokens": 6, "logit_bias": {"1": -100, "2": -100}}
    older = client.completions.create(model="bundled", logprobs=2, **how).choices[0].logprobs
    assert older is not None and older.tokens and older.top_logprobs
    assert all(len(others) == 2 for others in older.top_logprobs)


def check(port: int, **body: Any) -> Any:
    status, found, _headers = ask(port, {"model": "bundled", **body}, "/v1/constraints")
    assert status == 200, found
    return found


def test_constraints_are_judged_without_a_request(served: Running, port: int) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}
    assert check(port, response_format=schema) == {"valid": True, "warnings": []}
    right, wrong = '{"colour": "red", "count": 3}', '{"colour": "red", "count": 33}'
    assert check(port, response_format=schema, answer=right)["answer"] == {"valid": True}
    judged = check(port, response_format=schema, answer=wrong)
    assert judged["valid"] and not judged["answer"]["valid"] and "/count" in judged["answer"]["error"]["message"]
    for broken in ("", "{", "3", "[" * 5000 + "]" * 5000):
        assert not check(port, response_format=schema, answer=broken)["answer"]["valid"]
    strange = {"type": "json_schema", "json_schema": {"schema": {"properties": {"a": {"type": "strange"}}}}}
    refused = check(port, response_format=strange)
    assert not refused["valid"] and refused["error"]["param"].startswith("response_format")
    small = check(port, response_format=schema, max_tokens=2)
    assert not small["valid"] and small["error"]["param"] == "max_tokens"
    assert check(port, guided_regex="[a-c]{3}") == {"valid": True, "warnings": []}
    assert not check(port, guided_regex="[a-c", max_tokens=4)["valid"]
    assert not check(port, guided_regex="[a-c]", answer="a")["valid"], "only answers to schemas are judged"
    for body, param in (({}, "response_format"), ({"guided_regex": "a", "stream": True}, "stream")):
        status, found, _headers = ask(port, {"model": "bundled", **body}, "/v1/constraints")
        assert (status, found["error"]["param"]) == (400, param)
    assert ask(port, {"model": "gone", "guided_regex": "a"}, "/v1/constraints")[0] == 404
    wait_for("an engine that was asked nothing", lambda: served.engine.stats().live == 0)


def test_a_constraint_that_only_a_request_can_check_is_neither_valid_nor_wrong(
    served: Running, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a cluster, where the workers compile constraints."""
    monkeypatch.setattr(served.engine, "check_constraint", lambda request, answer: None)
    found = check(port, guided_regex="[a-c]{3}")
    assert found["valid"] is None and "not checked" in found["warnings"][0]
    assert not check(port, guided_regex="[a-c]{3}", max_tokens=1 << 30)["valid"], "what the message alone shows"


def test_the_page_is_there_in_the_wheel_and_needs_no_token(port: int) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
    connection.request("GET", "/", headers={"authorization": "Bearer wrong"})
    response = connection.getresponse()
    page = response.read().decode()
    assert response.status == 200 and response.headers["content-type"] == "text/html; charset=utf-8"
    for name in [*re.findall(r'"/(playground/[\w.]+)"', page), "playground/about.json"]:
        connection.request("GET", f"/{name}")
        found = connection.getresponse()
        assert found.status == 200 and found.read(), name
    for path in ("/playground/", "/playground/nothing.js", "/playground/../app.py", "/playground/%2e%2e/app.py"):
        connection.request("GET", path)
        found = connection.getresponse()
        assert found.status == 404 and found.read(), path
    connection.close()
