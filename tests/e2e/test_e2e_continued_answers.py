"""Answers that continue a last message of the assistant, over real sockets: by official clients and the SDK."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
from e2e_helpers import PATIENCE, Running, running, settings

from mmserve.cli import main
from mmserve.client import Delta, InvalidArgument
from mmserve.config import ModelConfig

MODELS = ("bundled", "bundled-causal")
QUESTION = "Start with 7. Add 5. Add 3. What is the result?"
BEGUN, REST = "7+5=12\n", "12+3=15\nAnswer: 15"
CHAT: Any = [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": BEGUN}]
CONTINUE = {"continue_final_message": True, "add_generation_prompt": False}


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


@pytest.mark.parametrize("model", MODELS)
def test_the_answer_is_what_follows(served: Running, url: str, of_openai: openai.OpenAI, model: str) -> None:
    whole = served.client.generate(QUESTION, model=model, max_new_tokens=32)
    assert whole.text == BEGUN + REST
    asked: Any = {"model": model, "messages": CHAT, "max_tokens": 32}
    found = of_openai.chat.completions.create(**asked, extra_body=CONTINUE)
    assert found.choices[0].message.content == REST
    chunks = of_openai.chat.completions.create(**asked, extra_body=CONTINUE, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == REST
    echo = {**CONTINUE, "echo": True}
    assert of_openai.chat.completions.create(**asked, extra_body=echo).choices[0].message.content == BEGUN + REST
    chunks = of_openai.chat.completions.create(**asked, extra_body=echo, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == BEGUN + REST
    new: Any = {**asked, "messages": CHAT[:1], "extra_body": {"echo": True}}
    assert of_openai.chat.completions.create(**new).choices[0].message.content == whole.text
    with anthropic.Anthropic(base_url=url, api_key="any", max_retries=0, timeout=PATIENCE) as client:
        [block] = client.messages.create(**asked).content
        assert block.type == "text" and block.text == REST
        with client.messages.stream(**asked) as stream:
            assert "".join(stream.text_stream) == REST
        counted = client.messages.count_tokens(model=model, messages=CHAT).input_tokens
    assert found.usage is not None and counted == found.usage.prompt_tokens > whole.usage.prompt_tokens
    events = served.client.stream(CHAT, model=model, max_new_tokens=32, continue_final_message=True)
    assert "".join(event.text for event in events if isinstance(event, Delta)) == REST


@pytest.mark.parametrize("model", MODELS)
def test_a_response_continues(of_openai: openai.OpenAI, model: str) -> None:
    """By the flag, and where an answer that came to its limit is sent back as it was."""
    asked: Any = {"model": model, "max_output_tokens": 32}
    found = of_openai.responses.create(**asked, input=CHAT, extra_body={"continue_final_message": True})
    assert found.output_text == REST
    cut = of_openai.responses.create(model=model, input=QUESTION, max_output_tokens=7)
    assert (cut.status, cut.output_text) == ("incomplete", BEGUN)
    turns: Any = [{"role": "user", "content": QUESTION}, *(item.model_dump() for item in cut.output)]
    assert of_openai.responses.create(**asked, input=turns).output_text == REST
    with of_openai.responses.stream(**asked, input=turns) as stream:
        assert stream.get_final_response().output_text == REST


@pytest.mark.parametrize("model", MODELS)
def test_a_constraint_is_for_the_answer_alone(url: str, of_openai: openai.OpenAI, model: str) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    form: Any = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema, "strict": True}}
    asked: Any = {"model": model, "messages": CHAT, "max_tokens": 32, "extra_body": CONTINUE}
    answer = of_openai.chat.completions.create(**asked, response_format=form).choices[0].message.content
    assert isinstance(json.loads(answer or "")["a"], int)
    body = {**CONTINUE, "structured_outputs": {"regex": "12\\+3=1[0-9]\nAnswer: 1[0-9]"}}
    answer = of_openai.chat.completions.create(**{**asked, "extra_body": body}).choices[0].message.content
    assert answer == REST
    config: Any = {"format": {"type": "json_schema", "schema": schema}}
    with (
        anthropic.Anthropic(base_url=url, api_key="any", max_retries=0, timeout=PATIENCE) as client,
        pytest.raises(anthropic.BadRequestError, match=r"output_config\.format"),
    ):
        client.messages.create(model=model, messages=CHAT, max_tokens=32, output_config=config)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("role", ["assistant", "system"])
def test_without_the_flag_the_answer_is_a_new_message(of_openai: openai.OpenAI, model: str, role: str) -> None:
    """As OpenAI and vLLM have it: clients send conversations that end with any message."""
    messages: Any = [{"role": "user", "content": QUESTION}, {"role": role, "content": "Go on."}]
    one = of_openai.chat.completions.create(model=model, messages=messages, max_tokens=16)
    continued = of_openai.responses.create(model=model, input=messages, max_output_tokens=16)
    assert one.usage is not None and one.usage.completion_tokens > 0
    assert one.choices[0].message.content == continued.output_text


def test_what_cannot_be_continued_is_refused_by_name(served: Running, of_openai: openai.OpenAI) -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}
    for messages, fields, param in (
        (CHAT[:1], CONTINUE, "continue_final_message"),
        (CHAT, {"continue_final_message": True, "add_generation_prompt": True}, "add_generation_prompt"),
        ([CHAT[0], {"role": "assistant", "content": [image]}], CONTINUE, "messages[1].content"),
    ):
        asked: Any = {"model": MODELS[0], "messages": messages, "max_tokens": 8}
        with pytest.raises(openai.BadRequestError) as refused:
            of_openai.chat.completions.create(**asked, extra_body=fields)
        assert refused.value.param == param, refused.value
    with pytest.raises(InvalidArgument, match="continue_final_message"):
        served.client.generate(QUESTION, raw=True, continue_final_message=True)


def test_on_the_command_line(served: Running, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "chat.json"
    file.write_text(json.dumps(CHAT[:1]))
    options = ["--chat", str(file), "--continue-final-message", "--server", served.address]
    assert main(["generate", BEGUN, *options, "--model", MODELS[1]]) == 0
    assert capsys.readouterr().out.strip() == REST
