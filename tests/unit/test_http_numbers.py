"""Numbers that JSON has and floats do not: no request or answer with them is a server error."""

from __future__ import annotations

import json

import pytest
from starlette.responses import JSONResponse

from mmserve.core.events import Finished, StageTimes, Usage
from mmserve.core.tools import ToolCall
from mmserve.errors import InvalidArgument
from mmserve.http.body import _parsed
from mmserve.http.messages import Messages

BODY = {"model": "m", "max_tokens": 8, "messages": [{"role": "user", "content": "a"}]}


@pytest.mark.parametrize(
    ("arguments", "given"),
    [
        ('{"a": 1e999, "b": -1e999, "c": 1.5}', {"a": 1.7976931348623157e308, "b": -1.7976931348623157e308, "c": 1.5}),
        (f'{{"a": {"9" * 5000}, "b": 7}}', {"a": 1.7976931348623157e308, "b": 7}),
    ],
)
def test_arguments_of_a_call_that_a_model_may_write_are_sent(arguments: str, given: dict[str, object]) -> None:
    call = ToolCall("call_1", "f", arguments)
    usage, times = Usage(1, 0, 1), StageTimes(0.0, 0.0, 0.0, 0.0, 0.0)
    one = Finished("tool_calls", "", usage, 1, 0, times, tool_calls=(call,))
    body = json.loads(bytes(JSONResponse(Messages().read(dict(BODY)).reply.whole([one])).body))
    assert [block["input"] for block in body["content"]] == [given]


def test_a_body_with_a_number_beyond_all_floats_is_refused() -> None:
    assert _parsed(b'{"a": [1e308, 2.5]}') == {"a": [1e308, 2.5]}
    with pytest.raises(InvalidArgument, match="body: must be JSON: 1e999 is too large a number"):
        _parsed(b'{"metadata": {"a": 1e999}}')
    with pytest.raises(InvalidArgument, match=r"body: must be JSON: an integer has more than 4300 digits$"):
        _parsed(f'{{"max_tokens": {"9" * 5000}}}'.encode())
