"""Tool calls of the bundled models: validity of arguments, correctness of tools and arguments: ``mmserve bench
tools``."""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import jsonschema_rs

from mmserve.assembly import BackgroundServer
from mmserve.bench.measures import Figures, Progress, at_least
from mmserve.cli.options import any_port, read_config
from mmserve.client import Client, Tool, ToolCall
from mmserve.reference.calls import CALLS
from mmserve.reference.items import TEST_SEEDS, Question
from mmserve.tools.formats import HERMES
from mmserve.tools.parse import CallPiece, CallReader

#: Token limit of an answer with one call, and with two.
ROOM = {"call": 128, "two_calls": 224}
#: Goals: the share of valid calls, and of correct calls and requests.
VALID, RIGHT = 1.0, 0.95


@dataclass(frozen=True)
class _Outcome:
    task: str
    called: int  # number of calls made
    valid: int  # calls with valid arguments for their tool's schema
    expected: int  # number of calls in the right answer
    right: int  # those of them that were made, in their place
    tools: bool  # whether the called tools are correct, in order
    arguments: bool  # whether the arguments are correct, too


def run(arguments: argparse.Namespace, progress: Progress) -> Figures:
    """A row for each task, and the measures over all tasks."""
    tasks = tuple(ROOM)
    outcomes: list[_Outcome] = []
    with BackgroundServer(any_port(read_config(arguments))) as server, server.client(3600) as client:
        model = client.describe()
        items = [
            CALLS.sample(tasks[i % len(tasks)], random.Random(TEST_SEEDS[arguments.seed * 100_003 + i]))[1]
            for i in range(arguments.limit)
        ]
        with ThreadPoolExecutor(arguments.concurrent) as pool:
            for outcome in pool.map(lambda item: _asked(client, item), items):
                outcomes.append(outcome)
                if len(outcomes) % 20 == 0:
                    progress(f"{len(outcomes)} of {len(items)} requests")
    rows = [_row(task, [o for o in outcomes if o.task == task]) for task in tasks]
    total = _row("all", outcomes)
    measures = [
        at_least("calls with valid arguments", total["valid"], "share", VALID),
        at_least("calls with the right tool and arguments", total["right_calls"], "share", RIGHT),
        at_least("requests with the right tools and arguments", total["right"], "share", RIGHT),
    ]
    return {"rows": [*rows, total], "measures": measures, "settings": {"model": model.name, "seed": arguments.seed}}


def _asked(client: Client, question: Question) -> _Outcome:
    offered = [tool["function"] for tool in question.tools]
    tools = [Tool(name=f["name"], description=f["description"], parameters=f["parameters"]) for f in offered]
    result = client.generate(question.text, tools=tools, tool_choice="required", max_new_tokens=ROOM[question.task])
    return _outcome(question, result.tool_calls)


def _outcome(question: Question, calls: Sequence[ToolCall]) -> _Outcome:
    """What of an answer's ``calls`` is valid, and what is right."""
    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in question.tools}
    made = [(call.name, json.loads(call.arguments)) for call in calls]
    expected = _expected(question.answer)
    valid = sum(jsonschema_rs.is_valid(schemas[name], values) for name, values in made)
    right = [name for name, _ in made] == [name for name, _ in expected]
    right_calls = sum(one == other for one, other in zip(made, expected, strict=False))
    return _Outcome(question.task, len(made), valid, len(expected), right_calls, right, made == expected)


def _expected(answer: str) -> list[tuple[str, Any]]:
    """Names and arguments of the calls in an answer of the data set."""
    reader = CallReader(HERMES)
    made: dict[int, tuple[str, str]] = {}
    for piece in (*reader.feed(answer), *reader.end()):
        if isinstance(piece, CallPiece):
            name, arguments = made.get(piece.index, ("", ""))
            made[piece.index] = name + piece.name, arguments + piece.arguments
    return [(name, json.loads(arguments)) for name, arguments in made.values()]


def _row(task: str, outcomes: list[_Outcome]) -> Figures:
    count = max(1, len(outcomes))
    calls = sum(o.called for o in outcomes)
    return {
        "task": task,
        "n": len(outcomes),
        "calls": calls,
        "valid": round(sum(o.valid for o in outcomes) / max(1, calls), 4),
        "right_calls": round(sum(o.right for o in outcomes) / max(1, sum(o.expected for o in outcomes)), 4),
        "right_tools": round(sum(o.tools for o in outcomes) / count, 4),
        "right": round(sum(o.arguments for o in outcomes) / count, 4),
    }
