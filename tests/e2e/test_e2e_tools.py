"""Tools over real sockets: by the SDK, by the official clients of OpenAI and Anthropic, and on the command line."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import anthropic
import jsonschema_rs
import openai
import pytest
from e2e_helpers import PATIENCE, Running, running, settings

from mmserve.cli import main
from mmserve.client import Finished, InvalidArgument, Tool, ToolCallDelta
from mmserve.config import ModelConfig

#: The quicker one of the two.
MODEL = "bundled-causal"
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"unit": {"enum": ["C", "F"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["unit", "days"],
    "additionalProperties": False,
}
FORECAST: dict[str, Any] = {"name": "forecast", "description": "The weather to come", "parameters": SCHEMA}
QUESTION = "What will the weather be?"
#: One call, and no more room than for it.
OPTIONS: dict[str, Any] = {"tool_choice": "required", "parallel_tool_calls": False, "max_new_tokens": 64}


@pytest.fixture(scope="module")
def served() -> Iterator[Running]:
    config = settings(server={"http_port": _free_port()})
    models = (ModelConfig(path="bundled"), ModelConfig(path="bundled-causal"))
    with running(replace(config, models=models)) as found:
        yield found
        found.assert_serves()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


@pytest.fixture(scope="module")
def url(served: Running) -> str:
    return f"http://127.0.0.1:{served.background.config.server.http_port}"


def valid(arguments: str) -> bool:
    return jsonschema_rs.is_valid(SCHEMA, json.loads(arguments))


@dataclass
class Forecast:
    """The weather to come."""

    unit: Literal["C", "F"]
    days: Literal[1, 2, 3]


def celsius(unit: Literal["C", "F"], days: Literal[1, 2, 3]) -> str:
    """The weather to come.

    In words.
    """
    return f"sun for {days} days, in {unit}"


def test_calls_have_values_of_the_tools_types(served: Running) -> None:
    for tool, kind in ((Forecast, Forecast), (celsius, dict), (FORECAST, dict), (Tool(**FORECAST), dict)):
        found = served.client.generate(QUESTION, model=MODEL, tools=[tool], **OPTIONS)
        [call] = found.calls
        assert isinstance(call.value, kind) and found.finish_reason == "tool_calls"
        assert call.name == getattr(tool, "__name__", "forecast") and call.id and found.text == ""


def test_a_chat_goes_on_with_the_results_of_tools(served: Running) -> None:
    first = served.client.generate(QUESTION, model=MODEL, tools=[celsius], **OPTIONS)
    [call] = first.calls
    chat: list[Any] = [{"role": "user", "content": QUESTION}, first.message, call.reply(celsius(**call.value))]
    text = served.client.generate(chat, model=MODEL, tools=[celsius], tool_choice="none", max_new_tokens=8)
    assert text.calls == () and text.usage.prompt_tokens > len(call.arguments)  # which the chat shows
    function = {"name": call.name, "arguments": call.arguments}
    chat[1] = {"role": "assistant", "content": None, "tool_calls": [{"id": call.id, "function": function}]}
    chat[2] = {"role": "tool", "content": celsius(**call.value), "tool_call_id": call.id}
    again = served.client.generate(chat, model=MODEL, tools=[celsius], tool_choice="none", max_new_tokens=8)
    assert again.text == text.text and again.usage.prompt_tokens == text.usage.prompt_tokens


def test_a_call_that_was_cut_is_part_of_the_answer_and_of_the_next_turn(served: Running, url: str) -> None:
    asked: dict[str, Any] = {"model": MODEL, "tools": [FORECAST], **OPTIONS, "stop": ['"days']}
    found = served.client.generate(QUESTION, **asked)
    *events, done = served.client.stream(QUESTION, **asked)
    deltas = [event for event in events if isinstance(event, ToolCallDelta)]
    assert found.finish_reason == "stop" and found.calls == () and isinstance(done, Finished)
    for one in (found, done):
        assert one.cut_call is not None and one.cut_call.name == "forecast"
        assert one.cut_call.arguments == "".join(delta.arguments for delta in deltas) and one.tool_calls == ()
        assert one.cut_call.arguments.startswith('{"unit"') and one.stop == '"days'
    assert done.cut_call is not None and done.cut_call.id == deltas[0].id
    assert [call.arguments for call in found.message.tool_calls] == [done.cut_call.arguments]
    chat: Any = [{"role": "user", "content": QUESTION}]
    again = served.client.generate(
        [*chat, found.message, {"role": "user", "content": "Go on."}],
        model=MODEL,
        tools=[FORECAST],
        tool_choice="none",
        max_new_tokens=2,
    )
    with openai.OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0, timeout=PATIENCE) as client:
        tools: Any = [{"type": "function", "function": FORECAST}]
        common: Any = {"model": MODEL, "tools": tools}
        first = client.chat.completions.create(messages=chat, tool_choice="required", stop=['"days'], **common)
        chat += [first.choices[0].message, {"role": "user", "content": "Go on."}]
        second = client.chat.completions.create(messages=chat, tool_choice="none", max_tokens=2, **common)
        assert second.usage is not None and second.usage.prompt_tokens == again.usage.prompt_tokens


@pytest.mark.parametrize(
    "options",
    [{"model": "bundled", "commit": "low_confidence", "recompute": "dual", "steps": 8}, {"model": MODEL}],
    ids=["diffusion", "autoregressive"],
)
def test_a_streamed_call_is_that_of_the_whole_answer(served: Running, options: dict[str, Any]) -> None:
    *events, done = served.client.stream(QUESTION, tools=[FORECAST], **OPTIONS, **options)
    deltas = [event for event in events if isinstance(event, ToolCallDelta)]
    assert isinstance(done, Finished)
    [call] = done.tool_calls
    assert (deltas[0].id, deltas[0].name) == (call.id, "forecast") and valid(call.arguments)
    assert "".join(delta.arguments for delta in deltas) == call.arguments
    named = served.client.generate(
        QUESTION, tools=[FORECAST, celsius], **{**OPTIONS, **options, "tool_choice": "celsius"}
    )
    assert [call.name for call in named.calls] == ["celsius"]


def test_wrong_tools_are_refused_with_their_fields(served: Running) -> None:
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"tools": [{**FORECAST, "name": "a b"}]}, r"tools\[0\].name"),
        ({"tools": [FORECAST, FORECAST]}, r"tools\[1\].name"),
        ({"tools": [{**FORECAST, "parameters": {"type": "string"}}]}, r"tools\[0\].parameters_json_schema"),
        (
            {"tools": [celsius, {**FORECAST, "parameters": {"properties": {"a": {"type": "strange"}}}}]},
            r"^tools\[1\].parameters_json_schema#/properties/a/type: type: (?!line)",
        ),
        ({"tools": [FORECAST], "tool_choice": "gone"}, "required_tool"),
        ({"tools": [FORECAST], "regex": "a"}, "constraint"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [3]}, r"tools\[0\]"),
        ({"tools": [FORECAST], "tool_choice": "required", "max_new_tokens": 8}, "sampling.max_new_tokens"),
    ]
    for options, field in wrong:
        with pytest.raises(InvalidArgument, match=field):
            served.client.generate(QUESTION, model=MODEL, **options)
    with pytest.raises(InvalidArgument, match=r"messages\[1\].tool_calls\[0\].arguments"):
        call = {"id": "1", "function": {"name": "f", "arguments": "[]"}}
        turns = [{"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "user", "content": "Go on."}]
        served.client.generate([{"role": "user", "content": QUESTION}, *turns], model=MODEL)


def test_tools_of_openai(url: str) -> None:
    tools: Any = [{"type": "function", "function": FORECAST}]
    asked: Any = {"model": MODEL, "tools": tools, "tool_choice": "required", "parallel_tool_calls": False}
    with openai.OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0, timeout=PATIENCE) as client:
        chat: Any = [{"role": "user", "content": QUESTION}]
        choice = client.chat.completions.create(messages=chat, **asked, max_tokens=64).choices[0]
        assert choice.finish_reason == "tool_calls" and choice.message.content is None
        assert choice.message.tool_calls is not None
        [call] = choice.message.tool_calls
        assert call.type == "function" and call.function.name == "forecast" and valid(call.function.arguments)
        chat += [choice.message, {"role": "tool", "tool_call_id": call.id, "content": "sun"}]
        second = client.chat.completions.create(
            model=MODEL, messages=chat, tools=tools, tool_choice="none", max_tokens=8
        )
        assert second.choices[0].message.tool_calls is None
        chunks = client.chat.completions.create(messages=chat[:1], **asked, max_tokens=64, stream=True)
        parts = [c for chunk in chunks if chunk.choices for c in chunk.choices[0].delta.tool_calls or ()]
        assert "".join(c.function.arguments or "" for c in parts if c.function) == call.function.arguments
        tool: Any = {"type": "function", **FORECAST, "strict": True}
        given: Any = {**asked, "tools": [tool], "max_output_tokens": 64}
        [item] = client.responses.create(input=QUESTION, **given).output
        assert item.type == "function_call" and item.arguments == call.function.arguments
        turns: Any = [{"role": "user", "content": QUESTION}, item.to_dict()]
        turns += [{"type": "function_call_output", "call_id": item.call_id, "output": "sun"}]
        rest = client.responses.create(model=MODEL, input=turns, max_output_tokens=8)
        assert rest.output[0].type == "message"
        events = list(client.responses.create(input=QUESTION, **given, stream=True))
        assert [event.sequence_number for event in events] == list(range(len(events)))
        said = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
        assert "".join(said) == item.arguments
        with pytest.raises(openai.BadRequestError, match="tool_choice"):
            client.chat.completions.create(messages=chat[:1], **{**asked, "tool_choice": "some"})


@pytest.mark.parametrize("model", ["bundled", MODEL])
def test_allowed_tools_of_openai(served: Running, url: str, model: str) -> None:
    """Over both of its APIs, and by the SDK: one of two tools can be called, and the prompt has both."""
    other = {"name": "now", "description": "The time", "parameters": {"type": "object", "properties": {}}}
    flat: Any = [{"type": "function", **FORECAST}, {"type": "function", **other}]
    nested: Any = [{"type": "function", "function": FORECAST}, {"type": "function", "function": other}]
    chat: Any = {"model": model, "messages": [{"role": "user", "content": QUESTION}], "tools": nested, "max_tokens": 64}
    asked: Any = {"model": model, "input": QUESTION, "tools": flat, "max_output_tokens": 64}
    if model != MODEL:
        chat["extra_body"] = asked["extra_body"] = {"mmserve": {"diffusion": {"steps": 8, "dual": {}}}}  # sooner
    with openai.OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0, timeout=PATIENCE) as client:
        for name in ("forecast", "now") if model == MODEL else ("now",):
            some: Any = {"mode": "required", "tools": [{"type": "function", "function": {"name": name}}]}
            choice: Any = {"type": "allowed_tools", "allowed_tools": some}
            found = client.chat.completions.create(**chat, tool_choice=choice, parallel_tool_calls=False)
            [call] = found.choices[0].message.tool_calls or ()
            assert call.type == "function" and call.function.name == name
            all_of_them = client.chat.completions.create(**chat, tool_choice="required", parallel_tool_calls=False)
            assert found.usage is not None and all_of_them.usage is not None
            assert found.usage.prompt_tokens == all_of_them.usage.prompt_tokens
            choice = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": name}]}
            answer = client.responses.create(**asked, tool_choice=choice, parallel_tool_calls=False)
            [item] = answer.output
            assert item.type == "function_call" and item.name == name and answer.tool_choice.to_dict() == choice  # type: ignore[union-attr]
        options = {**OPTIONS, "model": model, "tools": [FORECAST, other]}
        if model != MODEL:
            options |= {"recompute": "dual", "steps": 8}
        [same] = served.client.generate(QUESTION, **options, allowed_tools=["now"]).calls
        assert same.name == "now"
        none: Any = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}}
        gone: Any = {"mode": "auto", "tools": [{"type": "function", "function": {"name": "gone"}}]}
        for wrong, param in (
            (none, "tool_choice.allowed_tools.tools"),
            ({"type": "allowed_tools", "allowed_tools": {**gone, "mode": "none"}}, "tool_choice.allowed_tools.mode"),
            ({"type": "allowed_tools", "allowed_tools": gone}, "tool_choice.allowed_tools.tools[0]"),
            ({"type": "function", "function": {"name": "gone"}}, "tool_choice"),
        ):
            with pytest.raises(openai.BadRequestError) as refused:
                client.chat.completions.create(**chat, tool_choice=wrong)
            assert refused.value.param == param
        hosted: Any = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "mcp", "server_label": "a"}]}
        for wrong, param in (
            (hosted, "tool_choice.tools[0].type"),
            ({**hosted, "tools": [{"type": "function", "name": "gone"}]}, "tool_choice.tools[0]"),
        ):
            with pytest.raises(openai.BadRequestError) as refused:
                client.responses.create(**asked, tool_choice=wrong)
            assert refused.value.param == param


def test_tools_of_anthropic(url: str) -> None:
    tool: Any = {"name": "forecast", "description": "The weather to come", "input_schema": SCHEMA}
    choice: Any = {"type": "any", "disable_parallel_tool_use": True}
    asked: Any = {"model": MODEL, "max_tokens": 64, "tools": [tool], "tool_choice": choice}
    with anthropic.Anthropic(base_url=url, api_key="any", max_retries=0, timeout=PATIENCE) as client:
        chat: Any = [{"role": "user", "content": QUESTION}]
        found = client.messages.create(messages=chat, **asked)
        [block] = found.content
        assert (
            block.type == "tool_use" and found.stop_reason == "tool_use" and jsonschema_rs.is_valid(SCHEMA, block.input)
        )
        with client.messages.stream(messages=chat, **asked) as stream:
            [streamed] = stream.get_final_message().content
        assert streamed.type == "tool_use" and streamed.input == block.input
        result = {"type": "tool_result", "tool_use_id": block.id, "content": "sun"}
        chat += [{"role": "assistant", "content": found.content}, {"role": "user", "content": [result]}]
        rest = client.messages.create(messages=chat, **{**asked, "tool_choice": {"type": "none"}, "max_tokens": 8})
        assert all(block.type == "text" for block in rest.content)


def test_tools_on_the_command_line(served: Running, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "tools.json"
    file.write_text(json.dumps([FORECAST]))
    options = ["--tools", str(file), "--tool-choice", "required", "--no-parallel-tool-calls", "--model", MODEL]
    assert main(["generate", QUESTION, "--server", served.address, *options]) == 0
    name, _, arguments = capsys.readouterr().out.strip().partition("(")
    assert name == "forecast" and valid(arguments.removesuffix(")"))
