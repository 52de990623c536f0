"""Errors over HTTP name the fields of the body, whatever they become in a ``GenerateRequest``."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
from echo_server import PATIENCE, EchoEngine, model_info
from test_http_connections import Served

from mmserve.errors import InvalidArgument
from mmserve.http.app import APIS
from mmserve.http.decisions import DECISION_APIS

CHAT, TEXT, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
MESSAGES, COUNTS = "/v1/messages", "/v1/messages/count_tokens"
DECISIONS, SYSTEMONE = "/v1/decisions", "/v1/systemone"
USER = {"role": "user", "content": "a"}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "[]"}}
USED = {"type": "tool_use", "id": "1", "name": "a b", "input": {}}
RESULT = {"type": "tool_result", "tool_use_id": "1", "content": "sun"}
GONE = "sha256:gone"
THERE = f"sha256:{'0' * 64}"


def of_chat(**function: Any) -> dict[str, Any]:
    return {"messages": [USER], "tools": [{"type": "function", "function": {"name": "f", **function}}]}


def shown(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def of_anthropic(**source: str) -> dict[str, Any]:
    return {"type": "image", "source": source}


NO_OBJECT = {"type": "string"}
CASES: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, of_chat(parameters=NO_OBJECT), "tools[0].function.parameters"),
    (CHAT, of_chat(name="a b"), "tools[0].function.name"),
    (CHAT, {"messages": [USER, {"role": "user", "content": []}]}, "messages[1].content"),
    (CHAT, {"messages": [{"role": "user", "content": [shown(GONE)]}]}, "messages[0].content[0].image_url.url"),
    (
        CHAT,
        {"messages": [USER, {"role": "assistant", "tool_calls": [CALL]}, USER]},
        "messages[1].tool_calls[0].function.arguments",
    ),
    (
        CHAT,
        {
            "messages": [
                {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "a"}, shown(GONE)]},
                {"role": "user", "content": [shown(f"{GONE}2")]},
            ]
        },
        "messages[0].content[1].image_url.url",
    ),
    (
        CHAT,
        {
            "messages": [
                {"role": "tool", "tool_call_id": "1", "content": [{"type": "video_url", "video_url": {"url": THERE}}]},
                {"role": "user", "content": [{"type": "text", "text": "a"}, shown(GONE)]},
            ]
        },
        "messages[1].content[1].image_url.url",
    ),
    (CHAT, {"messages": [USER], "continue_final_message": True}, "continue_final_message"),
    (CHAT, {"messages": [USER], "guided_choice": []}, "guided_choice"),
    (CHAT, {"messages": [USER], "mmserve": {"constraint": {"choice": {}}}}, "mmserve.constraint.choice.options"),
    (CHAT, {"messages": [USER], "mmserve": {"kvReduction": {}}}, "mmserve.kv_reduction"),
    (
        CHAT,
        {"messages": [USER], "guided_regex": "a", "mmserve": {"constraint": {"regex": "b"}}},
        "mmserve.constraint",
    ),
    (TEXT, {"prompt": "a", "suffix": "b", "mmserve": {"constraint": {"regex": "b"}}}, "mmserve.constraint"),
    (
        RESPONSES,
        {"input": "a", "tools": [{"type": "function", "name": "f", "parameters": NO_OBJECT}]},
        "tools[0].parameters",
    ),
    (RESPONSES, {"input": "a", "tools": [{"type": "function", "name": "a b"}]}, "tools[0].name"),
    (RESPONSES, {"input": []}, "input"),
    (RESPONSES, {"instructions": "s", "input": [USER, {"role": "user", "content": []}]}, "input[1].content"),
    (
        RESPONSES,
        {
            "instructions": "s",
            "input": [USER, {"role": "user", "content": [{"type": "input_image", "image_url": GONE}]}],
        },
        "input[1].content[0].image_url",
    ),
    (
        RESPONSES,
        {
            "input": [
                USER,
                {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
                {"type": "function_call", "call_id": "2", "name": "f", "arguments": "[]"},
                USER,
            ]
        },
        "input[2].arguments",
    ),
    (MESSAGES, {"messages": [USER], "tools": [{"name": "f", "input_schema": NO_OBJECT}]}, "tools[0].input_schema"),
    (MESSAGES, {"system": "s", "messages": [USER, {"role": "user", "content": []}]}, "messages[1].content"),
    (
        MESSAGES,
        {"messages": [USER, {"role": "assistant", "content": [{"type": "text", "text": "a"}, USED]}, USER]},
        "messages[1].content[1].name",
    ),
    (
        MESSAGES,
        {"messages": [{"role": "user", "content": [RESULT, of_anthropic(type="url", url=GONE)]}]},
        "messages[0].content[1].source",
    ),
    (
        MESSAGES,
        {"messages": [{"role": "user", "content": [RESULT, {"type": "poem"}]}]},
        "messages[0].content[1].type",
    ),
    (COUNTS, {"system": "s", "messages": [USER, {"role": "user", "content": []}]}, "messages[1].content"),
    (COUNTS, {"messages": [USER], "tools": [{"name": "f", "input_schema": NO_OBJECT}]}, "tools[0].input_schema"),
    (DECISIONS, {"questions": [{"id": "q", "type": "choice", "question": "b", "options": []}]}, "questions[0].options"),
    (DECISIONS, {"questions": [{"id": "q", "type": "yes_no", "question": " "}]}, "questions[0].question"),
    (DECISIONS, {"images": [THERE, GONE], "questions": [{"id": "q", "type": "yes_no", "question": "b"}]}, "images[1]"),
    (SYSTEMONE, {"questions": {"q": {"type": "choice", "criteria": {}}}}, "questions.q.criteria"),
    (SYSTEMONE, {"questions": {"q": {"type": "noul"}}}, "questions.q.instructions"),
    (SYSTEMONE, {"questions": {"q" * 300: {"type": "noul", "instructions": "b"}}}, f"questions.{'q' * 190}.id"),
    (SYSTEMONE, {"images": [GONE], "questions": {"q": {"type": "noul", "instructions": "b"}}}, "images[0]"),
]
MORE = {MESSAGES: {"max_tokens": 8}, DECISIONS: {"input": "a"}, SYSTEMONE: {"state": "a"}}


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(
            "test_http_connections.EchoEngine", lambda: EchoEngine(model_info(tool_format="hermes", decisions=True))
        )
        with Served() as found:
            yield found


@pytest.mark.parametrize(("path", "fields", "name"), CASES)
def test_the_field_of_the_body_is_named(served: Served, path: str, fields: dict[str, Any], name: str) -> None:
    body = json.dumps({"model": "echo", **MORE.get(path, {}), **fields})
    with closing(http.client.HTTPConnection("127.0.0.1", served.front.port, timeout=PATIENCE)) as connection:
        connection.request("POST", path, body, {"content-type": "application/json"})
        response = connection.getresponse()
        answer = json.loads(response.read())
    assert response.status == 400, answer
    error = answer["error"]
    assert error.get("param", name) == name and error["message"].startswith(f"{name}: "), answer


@pytest.mark.parametrize(
    ("path", "name"),
    [
        (CHAT, "messages[0].content[1].image_url.url"),
        (MESSAGES, "messages[0].content[1].source"),
        (RESPONSES, "messages[0].content[1].image_url"),
        (DECISIONS, "images[1]"),
        (SYSTEMONE, "images[1]"),
    ],
)
def test_a_file_that_cannot_be_decoded_is_named(path: str, name: str) -> None:
    api: Any = {**APIS, **DECISION_APIS}[path]
    body = api.error(InvalidArgument.of("messages[0].parts[1].image", "cannot be decoded"))
    assert body["error"]["message"] == f"{name}: cannot be decoded"
