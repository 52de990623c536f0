"""Tools of the client: what functions and types are described by, and what is refused before it is sent."""

from __future__ import annotations

import functools
import typing
from typing import Any

import pytest
from pydantic import BaseModel

from mmserve.client.base import Base
from mmserve.client.decisions import Choice, Score, build_decision
from mmserve.client.schemas import schema_text
from mmserve.client.tools import described, put_tools
from mmserve.client.video_requests import configuration, watch_message
from mmserve.client.video_view import QuestionView, SessionView
from mmserve.core.events import Finished, StageTimes, Usage
from mmserve.core.tools import ToolCall
from mmserve.errors import InvalidArgument
from mmserve.v1 import generation_pb2 as pb
from mmserve.v1 import video_pb2
from mmserve.wire.events import to_response


class Look(BaseModel):
    place: str


class Said(Look):
    """Say where.

    And more.
    """


class Found(typing.TypedDict):
    place: str


def look(place: str, *, times: int = 1) -> str:
    """Look at a
    place."""
    return place * times


class Looking:
    """Has eyes."""

    def __call__(self, place: str) -> str:
        return place


def unknown(place: Nowhere) -> str:  # type: ignore[name-defined]  # noqa: F821
    return str(place)


@pytest.mark.parametrize(
    ("kind", "description"),
    [(Look, ""), (Said, "Say where."), (Found, ""), (look, "Look at a place.")],
)
def test_a_tool_is_described_by_its_own_documentation(kind: Any, description: str) -> None:
    assert described(kind, "tools[0]").description == description


def test_parameters_of_a_function_are_those_without_a_value() -> None:
    tool = described(look, "tools[0]")
    assert (tool.name, set(typing.get_type_hints(tool.parameters))) == ("look", {"place", "times"})
    assert '"required":["place"]' in schema_text(tool.parameters).replace(" ", "")


@pytest.mark.parametrize("tool", [functools.partial(look, times=2), Looking(), unknown, print, 3])
def test_what_has_no_name_or_no_annotations_is_refused(tool: Any) -> None:
    with pytest.raises(InvalidArgument, match=r"tools\[0\]"):
        described(tool, "tools[0]")


def test_one_text_is_not_several() -> None:
    for wrong in (Choice("Which?", "red"), Score("How many?", levels="many")):
        with pytest.raises(InvalidArgument, match=r"questions\[0\]: must hold several texts"):
            build_decision("A circle.", [wrong], (), (), None, "")
    request = pb.GenerateRequest()
    put_tools(request, [look], None, "look", parallel=None)
    assert request.allowed_tools == ["look"]


def test_a_standing_question_needs_a_choice() -> None:
    with pytest.raises(InvalidArgument, match="choices"):
        watch_message("a", "where is it?", [], None, {})
    assert watch_message("a", "where is it?", ["left", "right"], None, {}).choices.wanted == "left"


class Session(SessionView[QuestionView, Any]):
    """One without a connection."""

    def _act(self, act: typing.Callable[[], Any]) -> Any:
        return act()

    def _question(self, *given: Any) -> QuestionView:
        return QuestionView(self, *given)


def test_calls_in_an_answer_about_a_session_have_values_of_their_tools() -> None:
    session = Session(Base("localhost:1"), configuration(), None)
    question = session.stream("where?", tools=[Said])
    calls = (ToolCall("1", "Said", '{"place": "left"}'),)
    finished = Finished("tool_calls", "", Usage(1, 0, 1), 1, 1, StageTimes(), tool_calls=calls)
    answer = video_pb2.AnswerEvent(
        question_id=question._pending.question_id, response=to_response(finished, question._pending.question_id)
    )
    session._received(video_pb2.SessionResponse(index=1, answer=answer))
    question._popped()
    assert question._result().calls[0].value == Said(place="left")
