"""Constraints as messages: exactly one kind, of a size that may be read, in a known mode."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import pydantic
import pytest
from test_rpc_convert import build, wrong

from mmserve.client.outgoing import build_request
from mmserve.client.result import to_result
from mmserve.constraint.findings import Finding, as_error
from mmserve.constraint.limits import (
    MAX_CHOICE_BYTES,
    MAX_CHOICES,
    MAX_GRAMMAR_BYTES,
    MAX_REGEX_BYTES,
    MAX_SCHEMA_BYTES,
)
from mmserve.core.constraint import (
    Choice,
    ConstraintMode,
    ConstraintSampling,
    ConstraintSpec,
    Gbnf,
    JsonSchema,
    Lark,
    Regex,
)
from mmserve.core.events import ConstraintStats, Finished, StageTimes, Usage
from mmserve.errors import InvalidArgument
from mmserve.rpc.constraint_messages import parse_constraint, wrong_constraint
from mmserve.v1 import generation_pb2 as pb
from mmserve.wire.events import from_response, to_response
from mmserve.wire.status import from_status, to_status


def asked(**constraint: Any) -> ConstraintSpec | None:
    message = pb.GenerateRequest(constraint=constraint)
    assert list(wrong_constraint(message, most_tokens=1024)) == []
    return parse_constraint(message)


def test_no_constraint() -> None:
    assert parse_constraint(pb.GenerateRequest()) is None
    assert list(wrong_constraint(pb.GenerateRequest(), most_tokens=1024)) == []
    assert build().constraint is None


@pytest.mark.parametrize(
    ("constraint", "kind"),
    [
        ({"json_schema": '{"type": "integer"}'}, JsonSchema('{"type": "integer"}')),
        ({"regex": "a+"}, Regex("a+")),
        ({"choice": {"options": ["a", "b"]}}, Choice(("a", "b"))),
        ({"lark": 'start: "a"'}, Lark('start: "a"')),
        ({"gbnf": 'root ::= "a"'}, Gbnf('root ::= "a"')),
    ],
)
def test_every_kind_is_carried_over(constraint: dict[str, Any], kind: Any) -> None:
    assert asked(**constraint) == ConstraintSpec(kind, ConstraintMode.STRICT)


def test_modes() -> None:
    for number, mode in [(0, "strict"), (1, "strict"), (2, "validate"), (3, "lenient")]:
        assert asked(regex="a", mode=number) == ConstraintSpec(Regex("a"), ConstraintMode(mode))


@pytest.mark.parametrize(
    ("constraint", "field"),
    [
        ({}, "constraint"),
        ({"mode": 2}, "constraint"),
        ({"regex": "a", "mode": 9}, "constraint.mode"),
        ({"json_schema": ""}, "constraint.json_schema"),
        ({"json_schema": " " * MAX_SCHEMA_BYTES + "{}"}, "constraint.json_schema"),
        ({"regex": "é" * (MAX_REGEX_BYTES // 2) + "a"}, "constraint.regex"),
        ({"lark": "a" * (MAX_GRAMMAR_BYTES + 1)}, "constraint.lark"),
        ({"gbnf": "a" * (MAX_GRAMMAR_BYTES + 1)}, "constraint.gbnf"),
        ({"choice": {}}, "constraint.choice.options"),
        ({"choice": {"options": ["a"] * (MAX_CHOICES + 1)}}, "constraint.choice.options"),
        ({"choice": {"options": ["a" * MAX_CHOICE_BYTES, "b"]}}, "constraint.choice.options"),
    ],
)
def test_what_is_wrong_at_first_sight(constraint: dict[str, Any], field: str) -> None:
    assert wrong(constraint=constraint) == [field]


def test_a_wrong_constraint_is_told_with_everything_else() -> None:
    assert wrong(constraint={}, sampling={"temperature": -1}) == ["sampling.temperature", "constraint"]


def test_the_request_carries_it() -> None:
    assert build(constraint={"regex": "a"}).constraint == ConstraintSpec(Regex("a"))


@pytest.mark.parametrize(
    ("given", "sent"),
    [
        ({"schema": {"type": "integer"}}, {"json_schema": '{"type": "integer"}'}),
        ({"regex": "a+"}, {"regex": "a+"}),
        ({"choices": ["a", "b"]}, {"choice": {"options": ["a", "b"]}}),
        ({"choices": []}, {"choice": {}}),
        ({"grammar": 'start: "a"'}, {"lark": 'start: "a"'}),
        ({"grammar": 'root ::= "a"', "constraint_mode": "validate"}, {"gbnf": 'root ::= "a"', "mode": 2}),
        ({"regex": "a+", "constraint_sampling": "asap"}, {"regex": "a+", "sampling": 3}),
        ({}, None),
    ],
)
def test_what_the_sdk_sends(given: dict[str, Any], sent: dict[str, Any] | None) -> None:
    message = build_request("hi", (), deltas=False, snapshots=False, **given)
    assert message.HasField("constraint") == (sent is not None)
    assert message.constraint == pb.Constraint(**(sent or {}))


def test_a_pydantic_model_is_a_schema_and_reads_the_answer() -> None:
    class Point(pydantic.BaseModel):
        x: int
        y: int = 0

    message = build_request("hi", (), deltas=False, snapshots=False, schema=Point)
    assert json.loads(message.constraint.json_schema) == {**Point.model_json_schema(), "additionalProperties": False}
    done = Finished("end", '{"x":3}', Usage(1, 0, 1), 1, 1, StageTimes())
    assert to_result([done], 1, "id", Point).parsed == Point(x=3)
    assert to_result([done], 1, "id", {"type": "object"}).parsed == {"x": 3}
    assert to_result([done], 1, "id").parsed is None
    assert to_result([dataclasses.replace(done, reason="stop", text='{"x')], 1, "id", Point).parsed is None


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"schema": {}, "regex": "a"}, "regex"),
        ({"choices": "abc"}, "choices"),
        ({"choices": [1]}, "choices"),
        ({"schema": object()}, "schema"),
        ({"schema": 3}, "schema"),
        ({"schema": {"const": float("nan")}}, "schema"),
        ({"constraint_mode": "strict"}, "constraint_mode"),
        ({"constraint_sampling": "awrs"}, "constraint_sampling"),
        ({"regex": "a", "constraint_sampling": "fair"}, "constraint_sampling"),
        ({"regex": "a", "constraint_mode": "loose"}, "constraint_mode"),
    ],
)
def test_what_the_sdk_refuses_to_send(given: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        build_request("hi", (), deltas=False, snapshots=False, **given)
    assert [v.field for v in caught.value.violations] == [field]


def test_that_a_budget_cut_it_short_and_a_companions_passes_go_over_the_wire() -> None:
    done = Finished("end", "{}", Usage(1, 0, 1), 1, 1, StageTimes(), closed_by_budget=True, companion_forwards=3)
    assert from_response(to_response(done, "id")) == done


def test_what_a_constraint_took_goes_over_the_wire() -> None:
    took = ConstraintStats(3, 2, 1, 0.25, 4.5, (0.5, 2.0, 247.5))
    done = Finished("end", "{}", Usage(1, 0, 1), 3, 1, StageTimes(), constraint=took)
    assert from_response(to_response(done, "id")) == done
    assert to_result([done], 1, "id").constraint == took
    without = dataclasses.replace(done, constraint=None)
    assert from_response(to_response(without, "id")) == without


def test_a_refusal_names_pointer_and_keyword_over_the_wire() -> None:
    error = as_error("json_schema", [Finding("/properties/a~1b/not", "not", "why"), Finding("", "schema", "empty")])
    received = from_status(to_status(error))
    assert isinstance(received, InvalidArgument)
    assert [(v.field, v.description) for v in received.violations] == [
        ("constraint.json_schema#/properties/a~1b/not", "not: why"),
        ("constraint.json_schema", "schema: empty"),
    ]


def test_samplings() -> None:
    for number, sampling in [(0, "mask"), (1, "mask"), (2, "awrs"), (3, "asap")]:
        expected = ConstraintSpec(Regex("a"), ConstraintMode.STRICT, ConstraintSampling(sampling))
        assert asked(regex="a", sampling=number) == expected
    assert wrong(constraint={"regex": "a", "sampling": 9}) == ["constraint.sampling"]


@pytest.mark.parametrize("weight", [None, 0.0, -12.5, -math.inf])
def test_weights_go_over_the_wire(weight: float | None) -> None:
    done = Finished("end", "{}", Usage(1, 0, 1), 1, 1, StageTimes(), log_weight=weight)
    assert from_response(to_response(done, "id")) == done
    assert to_result([done], 1, "id").log_weight == weight
