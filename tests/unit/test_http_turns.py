"""What an answer had comes back with the next request as it was."""

from __future__ import annotations

from mmserve.core.events import Finished, StageTimes, Usage
from mmserve.core.tools import ToolCall
from mmserve.http.responses import Responses
from mmserve.v1 import generation_pb2 as pb

ASKED = {"model": "m", "input": "a"}


def test_text_and_calls_of_one_response_are_one_message_of_the_next_request() -> None:
    calls = (ToolCall("call_1", "f", '{"a": 1}'), ToolCall("call_2", "g", "{}"))
    times = StageTimes(0.0, 0.0, 0.0, 0.0, 0.0)
    one = Finished("tool_calls", "Let me see.", Usage(1, 0, 1), 1, 0, times, tool_calls=calls)
    output = Responses().read(dict(ASKED)).reply.whole([one])["output"]
    assert [item["type"] for item in output] == ["message", "function_call", "function_call"]
    results = [{"type": "function_call_output", "call_id": call.id, "output": "sun"} for call in calls]
    turns = [{"role": "user", "content": "a"}, *output, *results]
    _user, answer, *others = Responses().read({"model": "m", "input": turns}).message.messages
    assert [part.text for part in answer.parts] == [one.text]
    assert [(call.id, call.name, call.arguments) for call in answer.tool_calls] == [
        (call.id, call.name, call.arguments) for call in calls
    ]
    assert [other.role for other in others] == [pb.ROLE_TOOL] * 2


def test_a_call_after_a_users_message_is_a_message_of_its_own() -> None:
    call = {"type": "function_call", "call_id": "call_1", "name": "f", "arguments": "{}"}
    user, answer = Responses().read({"model": "m", "input": [{"role": "user", "content": "a"}, call]}).message.messages
    assert not user.tool_calls and answer.role == pb.ROLE_ASSISTANT and len(answer.tool_calls) == 1
