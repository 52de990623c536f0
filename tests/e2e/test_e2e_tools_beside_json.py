"""Tools together with a schema of answers that call none, over real sockets: by official clients and the SDK."""

from __future__ import annotations

import json
import random
import socket
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import anthropic
import jsonschema_rs
import openai
import pydantic
import pytest
from e2e_helpers import PATIENCE, Running, running, settings

from mmserve.client import Delta, InvalidArgument, ToolCallDelta
from mmserve.config import ModelConfig
from mmserve.reference.calls import CALLS

MODELS = ("bundled", "bundled-causal")
ARGUMENTS: dict[str, Any] = {
    "type": "object",
    "properties": {"unit": {"enum": ["C", "F"]}},
    "required": ["unit"],
    "additionalProperties": False,
}
FORECAST: dict[str, Any] = {"name": "forecast", "description": "The weather to come", "parameters": ARGUMENTS}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"count": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["count"],
    "additionalProperties": False,
}
FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "count", "schema": SCHEMA, "strict": True}}
QUESTION = "How many shapes are there?"
CHAT: Any = [{"role": "user", "content": QUESTION}]


@pytest.fixture(scope="module")
def served() -> Iterator[Running]:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = int(taken.getsockname()[1])
    models = (ModelConfig(path="bundled"), ModelConfig(path="bundled-causal"))
    with running(replace(settings(server={"http_port": port}), models=models)) as found:
        yield found
        found.assert_serves()


@pytest.fixture(scope="module")
def url(served: Running) -> str:
    return f"http://127.0.0.1:{served.background.config.server.http_port}"


@pytest.fixture
def of_openai(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0, timeout=PATIENCE) as found:
        yield found


def obeys(text: str | None, schema: Any = SCHEMA) -> bool:
    return text is not None and jsonschema_rs.is_valid(schema, json.loads(text))


@dataclass
class Seen:
    """An answer of any API."""

    text: str
    calls: list[tuple[str, str]]


def of_chat(message: Any) -> Seen:
    return Seen(message.content or "", [(c.function.name, c.function.arguments) for c in message.tool_calls or ()])


def check(seen: Seen, choice: str, *, reason: str) -> None:
    if seen.calls:
        assert choice != "none" and not seen.text and reason == "tool_calls"
        assert all(name == "forecast" and obeys(arguments, ARGUMENTS) for name, arguments in seen.calls)
    else:
        assert choice != "required" and obeys(seen.text) and reason == "stop"


@pytest.mark.parametrize("model", MODELS)
def test_chat_completions(of_openai: openai.OpenAI, model: str) -> None:
    tools: Any = [{"type": "function", "function": FORECAST}]
    asked: Any = {"model": model, "messages": CHAT, "response_format": FORMAT, "tools": tools, "max_tokens": 64}
    for choice in ("auto", "none", "required"):
        found = of_openai.chat.completions.create(**asked, tool_choice=choice).choices[0]
        check(of_chat(found.message), choice, reason=found.finish_reason)
        if choice == "auto":
            whole = of_chat(found.message)
    chunks = list(of_openai.chat.completions.create(**asked, stream=True))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    parts = [c for chunk in chunks if chunk.choices for c in chunk.choices[0].delta.tool_calls or ()]
    arguments = "".join(c.function.arguments or "" for c in parts if c.function)
    assert (text, arguments) == (whole.text, "".join(arguments for _, arguments in whole.calls))
    short = of_openai.chat.completions.create(**{**asked, "max_tokens": 16}).choices[0]  # there is no room for a call
    assert obeys(short.message.content) and not short.message.tool_calls
    loose = {"type": "json_object"}
    found = of_openai.chat.completions.create(**{**asked, "response_format": loose, "max_tokens": 24}).choices[0]
    assert isinstance(json.loads(found.message.content or ""), dict)


class Count(pydantic.BaseModel):
    count: int


@pytest.mark.parametrize("model", MODELS)
def test_responses(of_openai: openai.OpenAI, model: str) -> None:
    """As agents ask that have a type of their result."""
    tool: Any = {"type": "function", **FORECAST, "strict": True}
    asked: Any = {"model": model, "input": QUESTION, "tools": [tool]}
    found = of_openai.responses.parse(**asked, text_format=Count, max_output_tokens=24)
    assert isinstance(found.output_parsed, Count) and found.output[0].type == "message"
    text: Any = {"format": {"type": "json_schema", "name": "count", "schema": SCHEMA, "strict": True}}
    choice: Any = "required"
    found = of_openai.responses.create(**asked, text=text, tool_choice=choice, max_output_tokens=64)
    assert {item.type for item in found.output} == {"function_call"}


@pytest.mark.parametrize("model", MODELS)
def test_messages(url: str, model: str) -> None:
    tool: Any = {"name": "forecast", "description": "The weather to come", "input_schema": ARGUMENTS}
    config: Any = {"format": {"type": "json_schema", "schema": SCHEMA}}
    asked: Any = {"model": model, "messages": CHAT, "tools": [tool], "output_config": config}
    with anthropic.Anthropic(base_url=url, api_key="any", max_retries=0, timeout=PATIENCE) as client:
        [block] = client.messages.create(**asked, max_tokens=16).content
        assert block.type == "text" and obeys(block.text)
        choice: Any = {"type": "any", "disable_parallel_tool_use": True}
        [block] = client.messages.create(**asked, max_tokens=64, tool_choice=choice).content
        assert block.type == "tool_use" and jsonschema_rs.is_valid(ARGUMENTS, block.input)


def test_over_grpc(served: Running) -> None:
    """The model was taught when to call; a document is all that few tokens have room for."""
    _box, question = CALLS.sample("call", random.Random(0))
    asked: Any = {"model": MODELS[1], "tools": question.tools, "schema": SCHEMA}
    called = served.client.generate(question.text, **asked, max_new_tokens=128)
    assert called.calls and called.parsed is None and called.text == ""
    found = served.client.generate(question.text, **asked, max_new_tokens=12)
    assert found.parsed == json.loads(found.text) and obeys(found.text) and not found.calls
    events = list(served.client.stream(question.text, **asked, max_new_tokens=128))
    assert [event.id for event in events if isinstance(event, ToolCallDelta)]
    assert not any(isinstance(event, Delta) for event in events)
    with pytest.raises(InvalidArgument, match=r"constraint\.regex.*json_schema"):
        served.client.generate(QUESTION, tools=[FORECAST], regex="a", max_new_tokens=8)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"structured_outputs": {"regex": "a"}}, "structured_outputs.regex"),
        ({"guided_choice": ["a"]}, "guided_choice"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "odd"}}}}, "response_format"),
    ],
)
def test_other_constraints_are_refused_by_name(of_openai: openai.OpenAI, fields: Any, named: str) -> None:
    tools: Any = [{"type": "function", "function": FORECAST}]
    with pytest.raises(openai.BadRequestError) as refused:
        of_openai.chat.completions.create(model=MODELS[0], messages=CHAT, tools=tools, max_tokens=8, extra_body=fields)
    assert str(refused.value.param).startswith(named)


def test_a_schema_of_a_tool_is_refused_by_the_name_of_the_tool(of_openai: openai.OpenAI) -> None:
    odd = {**FORECAST, "parameters": {"type": "object", "properties": {"a": {"type": "odd"}}}, "strict": True}
    tools: Any = [{"type": "function", "function": odd}]
    for form in ({"type": "text"}, FORMAT):
        asked: Any = {"model": MODELS[0], "messages": CHAT, "tools": tools, "response_format": form, "max_tokens": 8}
        with pytest.raises(openai.BadRequestError) as refused:
            of_openai.chat.completions.create(**asked)
        assert refused.value.param == "tools[0].function.parameters#/properties/a/type"
