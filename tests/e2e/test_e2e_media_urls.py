"""Images by URL, from a request over gRPC and HTTP to a host on this machine."""

from __future__ import annotations

import json
import random
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from e2e_helpers import EMPTY, PATIENCE, Running, failure, running, settings, wait_for
from hosts import Host, serving, whole
from test_e2e_http import ask, free_port

from mmserve.client import Client, YesNo
from mmserve.errors import Cancelled, InvalidArgument
from mmserve.reference.tasks import sample


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[Running, Host]]:
    with serving() as host:
        config = settings(
            server={"http_port": free_port()}, media={"url_hosts": (f"127.0.0.1:{host.port}",), "url_seconds": PATIENCE}
        )
        with running(config) as found:
            yield found, host
            found.assert_serves()


def test_the_answer_is_that_of_the_file(served: tuple[Running, Host]) -> None:
    server, host = served
    picture, question = sample("count", random.Random(5))
    host.answers["/scene.png"] = whole(picture.png(), "content-type: application/json")
    expected = server.client.generate(question.text, images=[picture.png()], max_new_tokens=16)
    found = server.client.generate(question.text, images=[host.url("/scene.png")] * 2, max_new_tokens=16)
    one = server.client.generate(question.text, images=[host.url("/scene.png")], max_new_tokens=16)
    assert one.text == expected.text and found.usage.prompt_tokens > one.usage.prompt_tokens
    assert len(host.asked) == 2, "a URL is fetched once for a request"
    asked = [YesNo("Is there a circle?")]
    assert server.client.decide("A scene.", asked, images=[host.url("/scene.png")]) is not None


def test_a_prompt_with_a_url_is_warmed(served: tuple[Running, Host]) -> None:
    server, host = served
    picture, question = sample("count", random.Random(7))
    host.answers["/seven.png"] = whole(picture.png())
    warmed = server.client.cache.warm(question.text, images=[host.url("/seven.png")])
    found = server.client.generate(question.text, images=[picture.png()], max_new_tokens=2)
    assert warmed.visual_tokens == found.usage.visual_tokens and warmed.prompt_tokens == found.usage.prompt_tokens
    with pytest.raises(InvalidArgument, match="must have a host"):
        server.client.cache.warm("What?", images=["https://example.org/a.png"])


def test_errors_over_grpc(served: tuple[Running, Host]) -> None:
    server, host = served
    host.answers["/text.png"] = whole(b"<html>")
    with pytest.raises(InvalidArgument, match=r"messages\[0\].parts\[0\].image.url: must have a host"):
        server.client.generate("What?", images=["https://example.org/a.png"])
    with pytest.raises(InvalidArgument, match="not a readable PNG"):
        server.client.generate("What?", images=[host.url("/text.png")])
    before = len(host.asked)
    with pytest.raises(InvalidArgument, match="temperature"):
        server.client.generate("What?", images=[host.url("/text.png")], temperature=-1)
    assert len(host.asked) == before, "nothing is fetched for a request that is wrong"


def test_others_are_served_while_a_host_is_silent(served: tuple[Running, Host]) -> None:
    """And a client that leaves ends the fetch."""
    server, host = served
    reached, gone = threading.Event(), threading.Event()

    def silent(stream: socket.socket) -> None:
        reached.set()
        while stream.recv(1):
            pass
        gone.set()

    host.answers["/silent"] = silent
    with Client(server.address, timeout=PATIENCE) as leaving:
        waiting = server.start(leaving.generate, "What?", images=[host.url("/silent")])
        assert reached.wait(PATIENCE)
        assert server.client.generate("How many shapes are there?", max_new_tokens=2).forwards >= 1
    assert isinstance(failure(waiting), Cancelled)
    assert gone.wait(PATIENCE)
    wait_for("an empty engine", lambda: server.engine.stats() == EMPTY)


def test_every_api_over_http(served: tuple[Running, Host]) -> None:
    server, host = served
    picture, question = sample("count", random.Random(6))
    host.answers["/six.png"] = whole(picture.png())
    expected = server.client.generate(question.text, images=[picture.png()], max_new_tokens=16).text
    port, url = server.background.config.server.http_port, host.url("/six.png")

    def bodies(url: str) -> dict[str, tuple[dict[str, Any], str]]:
        """By path: a body, and where it has the URL."""
        text = question.text
        chat = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": text}]
        response = [{"type": "input_image", "image_url": url}, {"type": "input_text", "text": text}]
        of_anthropic = [{"type": "image", "source": {"type": "url", "url": url}}, {"type": "text", "text": text}]
        yes_no = [{"id": "a", "type": "yes_no", "question": "Is there a circle?"}]
        chats = [{"role": "user", "content": chat}]
        return {
            "/v1/chat/completions": ({"messages": chats, "max_tokens": 16}, "messages[0].content[0].image_url.url"),
            "/v1/responses": (
                {"input": [{"role": "user", "content": response}], "max_output_tokens": 16},
                "input[0].content[0].image_url",
            ),
            "/v1/messages": (
                {"messages": [{"role": "user", "content": of_anthropic}], "max_tokens": 16},
                "messages[0].content[0].source.url",
            ),
            "/v1/decisions": ({"input": "A scene.", "images": [url], "questions": yes_no}, "images[0]"),
        }

    for path, (body, _field) in bodies(url).items():
        status, answer, _headers = ask(port, {"model": "bundled", **body}, path)
        assert status == 200, answer
        assert path == "/v1/decisions" or expected in json.dumps(answer, ensure_ascii=False), path
    for path, (body, field) in bodies("http://169.254.169.254/latest/meta-data/").items():
        status, answer, _headers = ask(port, {"model": "bundled", **body}, path)
        assert status == 400 and "[media] url_hosts" in answer["error"]["message"] and field in json.dumps(answer), path
