"""Streams of Open Responses: the response at the end has the items of the stream, whatever ended it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from mmserve.core.events import Delta, Event, Finished, StageTimes, ToolCallDelta, Usage
from mmserve.core.tools import ToolCall
from mmserve.http.responses import Responses

TOOL = {"type": "function", "name": "f", "parameters": {"type": "object"}}
WHOLE = (ToolCallDelta(0, "call_1", "f"), ToolCallDelta(0, arguments='{"a": '), ToolCallDelta(0, arguments="1}"))
CUT = (ToolCallDelta(1, "call_2", "f"), ToolCallDelta(1, arguments='{"b": '))


def finished(reason: str, text: str = "", *calls: ToolCall, cut: ToolCall | None = None) -> Finished:
    return Finished(reason, text, Usage(1, 0, 2), 1, 0, StageTimes(), tool_calls=calls, cut_call=cut)


def streamed(*events: Event) -> list[dict[str, Any]]:
    """The events of the API."""
    reply = Responses().read({"model": "m", "input": "a", "tools": [TOOL], "stream": True}).reply

    async def given() -> AsyncIterator[Event]:
        for event in events:
            yield event

    async def lines() -> list[str]:
        return [line async for line in reply.lines(given())]

    blocks = "".join(asyncio.run(lines())).strip().split("\n\n")
    return [json.loads(block.split("data: ", 1)[1]) for block in blocks]


CALL, HALF = ToolCall("call_1", "f", '{"a": 1}'), ToolCall("call_2", "f", '{"b": ')
CASES: list[tuple[tuple[Event, ...], list[tuple[str, str]]]] = [
    ((*CUT, finished("stop", cut=HALF)), [("function_call", "incomplete")]),
    ((*CUT, finished("length", cut=HALF)), [("function_call", "incomplete")]),
    (
        (Delta("Well."), *CUT, finished("stop", "Well.", cut=HALF)),
        [("message", "completed"), ("function_call", "incomplete")],
    ),
    (
        (*WHOLE, *CUT, finished("length", "", CALL, cut=HALF)),
        [("function_call", "completed"), ("function_call", "incomplete")],
    ),
    (
        (Delta("Well."), *WHOLE, finished("length", "Well.", CALL)),
        [("message", "completed"), ("function_call", "completed")],
    ),
    ((*WHOLE, finished("tool_calls", "", CALL)), [("function_call", "completed")]),
    ((Delta("Well"), finished("length", "Well")), [("message", "incomplete")]),
    ((finished("end"),), [("message", "completed")]),
]


@pytest.mark.parametrize(("events", "expected"), CASES, ids=range(len(CASES)))
def test_the_output_at_the_end_is_that_of_the_stream(
    events: tuple[Event, ...], expected: list[tuple[str, str]]
) -> None:
    found = streamed(*events)
    added = [event["item"]["id"] for event in found if event["type"] == "response.output_item.added"]
    done = [event["item"] for event in found if event["type"] == "response.output_item.done"]
    response = found[-1]["response"]
    assert response["output"] == done and [item["id"] for item in done] == added
    assert [(item["type"], item["status"]) for item in done] == expected
    assert (response["status"] == "incomplete") == (events[-1].reason == "length")  # type: ignore[union-attr]
    said = "".join(event["delta"] for event in found if event["type"] == "response.function_call_arguments.delta")
    assert said == "".join(item.get("arguments", "") for item in done)


@pytest.mark.parametrize("events", [events for events, _ in CASES], ids=range(len(CASES)))
def test_the_items_of_a_whole_answer_are_those_of_its_stream(events: tuple[Event, ...]) -> None:
    reply = Responses().read({"model": "m", "input": "a", "tools": [TOOL]}).reply
    alike = streamed(*events)[-1]["response"]["output"]
    whole = reply.whole([events[-1]])["output"]  # type: ignore[list-item]
    assert [{**item, "id": ""} for item in whole] == [{**item, "id": ""} for item in alike]
