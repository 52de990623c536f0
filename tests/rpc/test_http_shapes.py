"""Answers, events and errors over HTTP have the shapes of OpenAI's and Anthropic's own types, over a real socket."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
from anthropic.types import ErrorResponse, Message, RawMessageStreamEvent
from echo_server import PATIENCE
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseErrorEvent, ResponseStreamEvent
from pydantic import TypeAdapter
from test_http_connections import CHAT, Served

from mmserve.errors import DeadlineExceeded, DoesNotFit, InvalidArgument, Unavailable

USER = [{"role": "user", "content": "one two three"}]
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
#: Path to a body, and the types of its answer and of its events; a completion's type has no chunks.
SHAPES: dict[str, tuple[dict[str, Any], Any, Any]] = {
    CHAT: ({"messages": USER, "logprobs": True}, ChatCompletion, ChatCompletionChunk),
    "/v1/completions": ({"prompt": "one two three", "logprobs": 1}, Completion, None),
    RESPONSES: ({"input": USER}, Response, ResponseStreamEvent),
    MESSAGES: ({"messages": USER, "max_tokens": 8}, Message, RawMessageStreamEvent),
}


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with Served() as found:
        yield found


@pytest.fixture(autouse=True)
def unharmed(served: Served) -> Iterator[None]:
    yield
    served.engine.failure = None


def post(served: Served, path: str, body: dict[str, Any]) -> tuple[int, str]:
    with closing(http.client.HTTPConnection("127.0.0.1", served.front.port, timeout=PATIENCE)) as connection:
        connection.request("POST", path, json.dumps({"model": "echo", **body}), {"content-type": "application/json"})
        response = connection.getresponse()
        return response.status, response.read().decode()


def events_of(stream: str) -> list[dict[str, Any]]:
    lines = (line.removeprefix("data: ") for line in stream.splitlines() if line.startswith("data: "))
    return [json.loads(line) for line in lines if line != "[DONE]"]


@pytest.mark.parametrize("path", SHAPES)
def test_answers_and_events_have_all_fields_of_the_official_types(served: Served, path: str) -> None:
    body, whole, event = SHAPES[path]
    status, answer = post(served, path, body)
    assert status == 200
    TypeAdapter(whole).validate_json(answer)
    events = events_of(post(served, path, {**body, "stream": True})[1])
    assert len(events) > 1
    for each in events if event is not None else []:
        TypeAdapter(event).validate_python(each)


def test_the_error_in_a_stream_of_a_response_is_the_next_event(served: Served) -> None:
    served.engine.failure = Unavailable("gone")
    *events, last = events_of(post(served, RESPONSES, {"input": USER, "stream": True})[1])
    assert [each["sequence_number"] for each in (*events, last)] == list(range(len(events) + 1)) and len(events) > 2
    error = TypeAdapter(ResponseErrorEvent).validate_python(last)
    assert (error.message, error.code, error.param) == ("gone", "unavailable", None)
    assert last["error"]["message"] == "gone", "as in Open Responses, and for clients that look for it"


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [(DeadlineExceeded("late"), 504, "timeout_error"), (Unavailable("gone"), 503, "overloaded_error")],
)
def test_errors_of_messages_have_types_of_anthropic(served: Served, error: Any, status: int, kind: str) -> None:
    served.engine.refusals.append(error)
    found, answer = post(served, MESSAGES, SHAPES[MESSAGES][0])
    assert found == status
    assert TypeAdapter(ErrorResponse).validate_json(answer).error.type == kind


def test_a_route_that_is_not_there_has_the_error_of_its_api(served: Served) -> None:
    status, answer = post(served, f"{MESSAGES}/batches", {})
    assert status == 404 and TypeAdapter(ErrorResponse).validate_json(answer).error.type == "not_found_error"
    status, answer = post(served, "/v1/embeddings", {})
    assert status == 404 and json.loads(answer)["error"]["type"] == "invalid_request_error"


def test_a_slash_after_the_list_of_models_names_no_model(served: Served) -> None:
    with closing(http.client.HTTPConnection("127.0.0.1", served.front.port, timeout=PATIENCE)) as connection:
        found = []
        for path in ("/v1/models", "/v1/models/"):
            connection.request("GET", path)
            found.append(json.loads(connection.getresponse().read()))
    assert found[0] == found[1] and [each["id"] for each in found[0]["data"]] == ["echo"]


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (DoesNotFit.of("messages", "too long"), "context_length_exceeded"),
        (InvalidArgument.of("messages", "empty"), "invalid_argument"),
    ],
)
def test_a_prompt_that_is_too_long_has_the_code_of_openai(served: Served, error: Any, code: str) -> None:
    served.engine.failure = error
    for path in (CHAT, "/v1/completions", RESPONSES):
        status, answer = post(served, path, SHAPES[path][0])
        assert (status, json.loads(answer)["error"]["code"]) == (400, code)
