"""Answers of chat completions and of Anthropic's messages have a call that was cut, as their streams do."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from mmserve.core.events import Delta, Event, Finished, StageTimes, ToolCallDelta, Usage
from mmserve.core.tools import ToolCall
from mmserve.errors import FailedPrecondition
from mmserve.http.api import Api, Reply
from mmserve.http.chat import Chat
from mmserve.http.messages import Messages
from mmserve.tools.partial_json import completed

CALL = ToolCall("call_1", "f", '{"a": 1}')
CUT = ToolCall("call_2", "g", '{"b": [{"c": "d, e"}, {"c": "f')
CASES = [("", (), "length"), ("Well.", (), "stop"), ("", (CALL,), "length")]


def finished(reason: str, text: str = "", *calls: ToolCall, cut: ToolCall | None = None) -> Finished:
    return Finished(reason, text, Usage(1, 0, 2), 1, 0, StageTimes(), tool_calls=calls, cut_call=cut)


def reply(api: Api, **more: Any) -> Reply:
    body = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "a"}], **more}
    return api.read(body).reply


def streamed(api: Api, last: Finished) -> list[dict[str, Any]]:
    """The events of the API for ``last``, with its text and its calls before it."""
    events: list[Event] = [Delta(last.text)] if last.text else []
    assert last.cut_call is not None
    for index, call in enumerate([*last.tool_calls, last.cut_call]):
        events += [ToolCallDelta(index, call.id, call.name), ToolCallDelta(index, arguments=call.arguments)]

    async def given() -> AsyncIterator[Event]:
        for event in [*events, last]:
            yield event

    async def lines() -> list[str]:
        return [line async for line in reply(api, stream=True).lines(given())]

    blocks = "".join(asyncio.run(lines())).strip().split("\n\n")
    return [json.loads(data) for block in blocks if (data := block.split("data: ", 1)[1]) != "[DONE]"]


@pytest.mark.parametrize(("text", "calls", "reason"), CASES)
def test_a_chat_completion_has_the_calls_of_its_stream(text: str, calls: tuple[ToolCall, ...], reason: str) -> None:
    last = finished(reason, text, *calls, cut=CUT)
    [choice] = reply(Chat()).whole([last])["choices"]
    assert choice["finish_reason"] == reason and choice["message"]["content"] == (text or None)
    joined: dict[int, tuple[str, str]] = {}
    for event in streamed(Chat(), last):
        for delta in event["choices"][0]["delta"].get("tool_calls", ()):
            own, arguments = joined.get(delta["index"], (delta.get("id"), ""))
            joined[delta["index"]] = own, arguments + delta["function"]["arguments"]
    assert [(c["id"], c["function"]["arguments"]) for c in choice["message"]["tool_calls"]] == list(joined.values())
    assert joined[len(calls)] == (CUT.id, CUT.arguments)


@pytest.mark.parametrize(("text", "calls", "reason"), CASES)
def test_a_message_has_the_blocks_of_its_stream(text: str, calls: tuple[ToolCall, ...], reason: str) -> None:
    last = finished(reason, text, *calls, cut=CUT)
    message = reply(Messages()).whole([last])
    begun = [e["content_block"] for e in streamed(Messages(), last) if e["type"] == "content_block_start"]
    names = [(block["type"], block.get("id")) for block in message["content"]]
    assert names == [(block["type"], block.get("id")) for block in begun] and names[-1] == ("tool_use", CUT.id)
    assert message["content"][-1]["input"] == {"b": [{"c": "d, e"}, {}]}
    assert message["stop_reason"] == {"length": "max_tokens", "stop": "stop_sequence"}[reason]


def test_arguments_that_are_nested_too_deeply_are_refused() -> None:
    deep = ToolCall("call_1", "f", '{"a":' * 9000 + "1" + "}" * 9000)
    with pytest.raises(FailedPrecondition, match="nested too deeply"):
        reply(Messages()).whole([finished("tool_calls", "", deep)])


def test_what_can_be_read_of_an_object_that_was_cut() -> None:
    text = '{"a": [1, {"b\\"}": "\\\\", "c": []}, "]"], "d": {}, "e": -1.5e3}'
    found = [json.loads(completed(text[:size])) for size in range(len(text) + 1)]
    assert found[0] == {} and found[-1] == json.loads(text)
    assert [each for i, each in enumerate(found[1:]) if each != found[i]] == [
        {"a": []},
        {"a": [1]},
        {"a": [1, {}]},
        {"a": [1, {'b"}': "\\"}]},
        {"a": [1, {'b"}': "\\", "c": []}]},
        {"a": [1, {'b"}': "\\", "c": []}, "]"]},
        {"a": [1, {'b"}': "\\", "c": []}, "]"], "d": {}},
        json.loads(text),
    ]
