"""Templates as messages."""

from __future__ import annotations

from typing import Any

import pytest
from echo_server import model_info
from test_rpc_constraints import asked
from test_rpc_convert import wrong

from mmserve.client import Hole
from mmserve.client.outgoing import build_request
from mmserve.client.result import to_result
from mmserve.constraint.limits import MAX_GRAMMAR_BYTES, MAX_HOLES
from mmserve.core.constraint import Choice, ConstraintMode, ConstraintSpec, Regex, Template
from mmserve.core.constraint import Hole as Gap
from mmserve.core.events import Finished, StageTimes, Usage
from mmserve.errors import InvalidArgument
from mmserve.v1 import generation_pb2 as pb
from mmserve.wire.events import from_response, to_response

TEXT = {"text": "a"}


def hole(max_tokens: int = 3, **constraint: Any) -> dict[str, Any]:
    given = {"max_tokens": max_tokens, **({"constraint": constraint} if constraint else {})}
    return {"hole": given}


def test_a_template_is_carried_over() -> None:
    parts = [TEXT, hole(regex="b+", mode=2), TEXT, {"text": "c"}, hole(7), TEXT, hole(choice={"options": ["d"]})]
    expected = ("a", Gap(3, Regex("b+"), ConstraintMode.VALIDATE), "a", "c", Gap(7), "a", Gap(3, Choice(("d",))))
    assert asked(template={"parts": parts}) == ConstraintSpec(Template(expected))


@pytest.mark.parametrize(
    ("constraint", "fields"),
    [
        ({"template": {}}, ["template.parts"]),
        ({"template": {"parts": [TEXT]}}, ["template.parts"]),
        ({"template": {"parts": [TEXT, hole()] * (MAX_HOLES + 1)}}, ["template.parts"]),
        ({"template": {"parts": [{"text": "é" * (MAX_GRAMMAR_BYTES // 2)}, hole(), TEXT]}}, ["template.parts"]),
        ({"template": {"parts": [TEXT, hole()]}, "mode": 1}, ["mode"]),
        ({"template": {"parts": [{}, hole(), {"text": ""}]}}, ["template.parts[0]", "template.parts[2].text"]),
        ({"template": {"parts": [hole(), hole()]}}, ["template.parts[1].hole"]),
        ({"template": {"parts": [{}] * 1025}}, ["template.parts"]),
        ({"template": {"parts": [hole(0)]}}, ["template.parts[0].hole.max_tokens"]),
        ({"template": {"parts": [hole(model_info().max_tokens + 1)]}}, ["template.parts[0].hole.max_tokens"]),
        ({"template": {"parts": [hole(2**32 - 1)]}}, ["template.parts[0].hole.max_tokens"]),
        ({"template": {"parts": [hole(regex="")]}}, ["template.parts[0].hole.constraint.regex"]),
        ({"template": {"parts": [hole(choice={})]}}, ["template.parts[0].hole.constraint.choice.options"]),
        ({"template": {"parts": [hole(mode=1)]}}, ["template.parts[0].hole.constraint"]),
        ({"template": {"parts": [hole(template={})]}}, ["template.parts[0].hole.constraint.template"]),
    ],
)
def test_what_is_wrong_at_first_sight(constraint: dict[str, Any], fields: list[str]) -> None:
    assert wrong(constraint=constraint) == [f"constraint.{field}" for field in fields]


def test_what_the_sdk_sends() -> None:
    parts = ["a", Hole(regex="b+", max_tokens=3, constraint_mode="validate"), "c", Hole()]
    message = build_request("hi", (), deltas=False, snapshots=False, template=parts)
    expected = [TEXT, hole(regex="b+", mode=2), {"text": "c"}, hole(16)]
    assert message.constraint == pb.Constraint(template={"parts": expected})


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"template": ["a", Hole()], "regex": "a"}, "template"),
        ({"template": "Name: "}, "template"),
        ({"template": ["a", 3]}, "template"),
        ({"template": ["a", Hole(max_tokens=-1)]}, "template"),
        ({"template": ["a", Hole(regex="a", choices=["b"])]}, "choices"),
        ({"template": ["a", Hole(constraint_mode="strict")]}, "constraint_mode"),
    ],
)
def test_what_the_sdk_refuses_to_send(given: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        build_request("hi", (), deltas=False, snapshots=False, **given)
    assert [v.field for v in caught.value.violations] == [field]


def test_what_fills_the_holes_goes_over_the_wire() -> None:
    done = Finished("end", "a b, c", Usage(1, 0, 1), 1, 1, StageTimes(), holes=("b", "", "c"))
    assert from_response(to_response(done, "id")) == done
    assert to_result([done], 1, "id").holes == ("b", "", "c")
