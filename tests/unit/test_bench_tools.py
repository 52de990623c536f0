"""What ``mmserve bench tools`` counts as right: calls in their place, and whole requests."""

from __future__ import annotations

import json
from typing import Any

import pytest

from mmserve.bench.tools import _outcome, _row
from mmserve.client import ToolCall
from mmserve.reference.calls import NO_TOOL
from mmserve.reference.items import Question
from mmserve.tools.formats import HERMES
from mmserve.tools.parse import written

Calls = list[tuple[str, dict[str, Any]]]
TOOLS = tuple(
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "A sum",
            "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
        },
    }
    for name in ("add", "subtract")
)
ONE: Calls = [("add", {"a": 1})]
TWO: Calls = [("add", {"a": 1}), ("subtract", {"a": 2})]


def outcome(task: str, expected: Calls, made: Calls) -> Any:
    answer = written(HERMES, ((name, json.dumps(values)) for name, values in expected)) if expected else NO_TOOL
    calls = [ToolCall(f"call_{i}", name, json.dumps(values)) for i, (name, values) in enumerate(made)]
    return _outcome(Question(task, "What is it?", answer, TOOLS), calls)


@pytest.mark.parametrize(
    ("expected", "made", "right_calls", "tools", "whole"),
    [
        (ONE, ONE, 1, True, True),
        (ONE, [("add", {"a": 2})], 0, True, False),
        (ONE, [("subtract", {"a": 1})], 0, False, False),
        (ONE, [], 0, False, False),
        (ONE, TWO, 1, False, False),
        (TWO, TWO, 2, True, True),
        (TWO, [("add", {"a": 1}), ("subtract", {"a": 3})], 1, True, False),
        (TWO, [("add", {"a": 3}), ("subtract", {"a": 2})], 1, True, False),
        (TWO, TWO[:1], 1, False, False),
        (TWO, TWO[1:], 0, False, False),
        (TWO, TWO[::-1], 0, False, False),
        (TWO, [], 0, False, False),
        ([], [], 0, True, True),
        ([], ONE, 0, False, False),
    ],
)
def test_right_calls_are_counted_in_their_place(
    expected: Calls, made: Calls, right_calls: int, tools: bool, whole: bool
) -> None:
    found = outcome("call", expected, made)
    assert (found.called, found.expected) == (len(made), len(expected))
    assert (found.right, found.tools, found.arguments) == (right_calls, tools, whole)


def test_shares_are_of_calls_and_of_requests() -> None:
    """Of five expected calls three are right, of four requests two; of five calls that were made, one is not valid."""
    outcomes = [
        outcome("call", ONE, ONE),
        outcome("two_calls", TWO, [("add", {"a": 1}), ("subtract", {"a": "2"})]),
        outcome("two_calls", TWO, [("add", {"a": 1}), ("add", {"a": 2})]),
        outcome("no_call", [], []),
    ]
    assert _row("all", outcomes) == {
        "task": "all",
        "n": 4,
        "calls": 5,
        "valid": 0.8,
        "right_calls": 0.6,
        "right_tools": 0.75,
        "right": 0.5,
    }
    assert _row("call", []) == {
        "task": "call",
        "n": 0,
        "calls": 0,
        "valid": 0.0,
        "right_calls": 0.0,
        "right_tools": 0.0,
        "right": 0.0,
    }
