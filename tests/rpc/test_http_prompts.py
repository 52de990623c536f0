"""Several prompts of one completion: what one of them meets is what all meet."""

from __future__ import annotations

import http.client
import json
import logging
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from echo_server import PATIENCE
from test_http_connections import CHAT, Served, ask, wait_for

from mmserve.errors import DoesNotFit, ResourceExhausted, Unavailable
from mmserve.tenants import TenantConfig

PROMPTS = ["one", "two words", "and three words"]
#: Bodies that are answered as a whole, and streamed.
KINDS = pytest.mark.parametrize("stream", [False, True])


@pytest.fixture
def served() -> Iterator[Served]:
    with Served() as found:
        yield found


def complete(served: Served, token: str = "any", **fields: Any) -> tuple[int, Any]:
    """Status and body of an answer; of a stream, its events without the last."""
    with closing(http.client.HTTPConnection("127.0.0.1", served.front.port, timeout=PATIENCE)) as connection:
        headers = {"content-type": "application/json", "authorization": f"Bearer {token}"}
        connection.request("POST", "/v1/completions", json.dumps({"model": "echo", **fields}), headers)
        answer = connection.getresponse()
        text = answer.read().decode()
    if not text.startswith("data: "):
        return answer.status, json.loads(text)
    events = [event.removeprefix("data: ") for event in text.strip().split("\n\n")]
    return answer.status, [json.loads(event) for event in events if event != "[DONE]"]


def test_choices_are_in_the_order_of_the_prompts_and_usage_is_their_sum(served: Served) -> None:
    status, found = complete(served, prompt=PROMPTS, n=2)
    assert status == 200 and [choice["index"] for choice in found["choices"]] == [0, 1, 2, 3, 4, 5]
    assert [choice["text"] for choice in found["choices"]] == [text for text in PROMPTS for _ in range(2)]
    assert (found["usage"]["prompt_tokens"], found["usage"]["completion_tokens"]) == (6, 12)
    options = {"stream": True, "stream_options": {"include_usage": True}}
    _, [*chunks, last] = complete(served, prompt=PROMPTS, n=2, **options)
    texts, ends = [""] * 6, []
    for [choice] in (chunk["choices"] for chunk in chunks):
        texts[choice["index"]] += choice["text"]
        ends += [choice["index"]] if choice["finish_reason"] else []
    assert texts == [choice["text"] for choice in found["choices"]] and sorted(ends) == [0, 1, 2, 3, 4, 5]
    assert (last["choices"], last["usage"]) == ([], found["usage"])


def abandoned(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Why requests were not waited for."""
    lines = [record.getMessage() for record in caplog.records]
    return [line.split("abandoned: ")[1] for line in lines if "abandoned: " in line]


SIBLING = "another prompt of its body failed"


@KINDS
def test_a_prompt_that_is_refused_ends_the_others_before_an_answer_begins(
    served: Served, stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "mmserve")
    served.engine.go.clear()
    served.engine.refusing = {PROMPTS[-1]: ResourceExhausted("the queue is full", retry_after=3.0)}
    status, found = complete(served, prompt=PROMPTS, stream=stream)
    assert (status, found["error"]["message"]) == (429, "the queue is full")
    wait_for("the others to end", lambda: not served.engine.running)
    assert len(served.engine.cancelled) == 2 and abandoned(caplog) == [SIBLING] * 2


@KINDS
def test_a_failure_names_its_prompt_and_ends_the_others(
    served: Served, stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "mmserve")
    served.engine.go.clear()
    served.engine.failing = {PROMPTS[1]: DoesNotFit.of("messages", "is too long")}
    status, found = complete(served, prompt=PROMPTS, stream=stream)
    assert (status, found["error"]["message"]) == (400, "prompt[1]: is too long")
    assert found["error"]["code"] == "context_length_exceeded"
    wait_for("the others to end", lambda: not served.engine.running)
    assert len(served.engine.cancelled) == 2 and abandoned(caplog) == [SIBLING] * 2


def test_a_failure_after_the_first_event_is_the_last_event(served: Served) -> None:
    served.engine.failure = Unavailable("gone")
    status, [*_, last] = complete(served, prompt=PROMPTS, stream=True)
    assert status == 200 and last["error"]["message"] == "gone"
    wait_for("the others to end", lambda: not served.engine.running)


def test_a_client_that_leaves_ends_all(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "mmserve")
    served.engine.go.clear()
    body = json.dumps({"model": "echo", "prompt": PROMPTS, "stream": True}).encode()
    with served.connect() as connection:
        connection.sendall(ask("", body=body).replace(CHAT.encode(), b"/v1/completions", 1))
        wait_for("all prompts", lambda: served.engine.running == len(PROMPTS))
    wait_for("all to end", lambda: not served.engine.running)
    assert len(served.engine.cancelled) == len(PROMPTS)
    assert abandoned(caplog) == ["cancelled by the client"] * len(PROMPTS)


def test_prompts_that_are_refused(served: Served) -> None:
    no_text = "must be a text or an array of token ids, and not empty"
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"prompt": []}, "prompt: must hold at least one text"),
        ({"prompt": ["a", ""]}, f"prompt[1]: {no_text}"),
        ({"prompt": [1, -2]}, f"prompt: {no_text}"),
        ({"prompt": [[1, 2], []]}, f"prompt[1]: {no_text}"),
        ({"prompt": ["a"] * 17}, "prompt: must hold at most 16 prompts with n = 1, not 17: a server raises that by"),
        ({"prompt": ["a"] * 9, "n": 2}, "prompt: must hold at most 8 prompts with n = 2, not 9: a server raises"),
    ]
    for fields, message in wrong:
        status, found = complete(served, **fields)
        assert status == 400 and message in found["error"]["message"]
    assert not served.engine.requests


def test_each_prompt_counts_in_the_limits_of_its_tenant(tmp_path: Path) -> None:
    limits = {"few": {"concurrency": 2}, "slow": {"rate": 0.001, "burst": 3}}
    for name in limits:
        (tmp_path / name).write_text(name)
    tenants = tuple(TenantConfig(name=name, token_file=str(tmp_path / name), **own) for name, own in limits.items())
    with Served(tenants=tenants) as served:
        for token, most in (("few", 2), ("slow", 3)):
            status, found = complete(served, token, prompt=["a"] * (most + 1))
            assert status == 400 and f"must hold at most {most} prompts" in found["error"]["message"]
        assert complete(served, "few", prompt=["a", "b"])[0] == 200
        served.server.quotas._buckets.clear()
        assert complete(served, "slow", prompt=["a", "b"])[0] == 200
        status, found = complete(served, "slow", prompt=["a", "b"])
        assert status == 429 and "rate" in found["error"]["message"]
        served.engine.go.clear()
        with served.connect() as connection:
            body = json.dumps({"model": "echo", "prompt": "a"}).encode()
            connection.sendall(
                ask("", "authorization: Bearer few", body=body).replace(CHAT.encode(), b"/v1/completions", 1)
            )
            wait_for("one request", lambda: served.engine.running == 1)
            status, found = complete(served, "few", prompt=["a", "b"])
            assert status == 429 and "concurrency is 2" in found["error"]["message"]
        wait_for("it to end", lambda: not served.engine.running)
        served.engine.go.set()
        assert complete(served, "few", prompt=["a", "b"])[0] == 200, "its places are free again"
