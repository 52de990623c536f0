"""Encode, prefill and decode in three processes, and canvases that move between two of them: answers as of one."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from apart import ENGINE, ENGINES, Apart, cases, load
from gemma_checkpoints import save_gemma
from harness import Bench

from mmserve.core.constraint import ConstraintSampling
from mmserve.core.events import Finished
from mmserve.core.request import Request
from mmserve.errors import Unimplemented

Make = Callable[..., Bench]
CASES = cases()
#: Three processes have to import everything first: seconds, but on a busy machine.
pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_gemma(tmp_path_factory.mktemp("gemma"), 12, images=True)


@pytest.fixture(scope="module")
def apart(folder: Path) -> Iterator[Apart]:
    made = Apart(folder)
    yield made
    made.close()


@pytest.fixture(scope="module")
def together(folder: Path) -> dict[str, Finished]:
    """The answers of one process."""
    found: dict[str, Finished] = {}
    for name, requests in CASES.items():
        bench = Bench(
            load(name, str(folder)), watch=False, **{**ENGINE, "prefix_cache": False, **ENGINES.get(name, {})}
        )
        found |= {request.id: bench.ask(request) for request in requests}
        bench.close()
    return found


def check(done: Finished, reason: str, answer: object) -> None:
    """Text, tokens with their log-probabilities, and what it took are the same."""
    for name in ("text", "tokens", "forwards", "recomputed_tokens", "edits", "holes", "log_weight", "warnings"):
        assert getattr(answer, name) == getattr(done, name), name
    assert reason == done.reason
    assert answer.completion_tokens == done.usage.completion_tokens  # type: ignore[attr-defined]
    assert answer.kv_positions == done.usage.kv_positions  # type: ignore[attr-defined]


def test_the_requests_are_worth_comparing(together: dict[str, Finished]) -> None:
    for name, requests in CASES.items():
        assert len({together[request.id].text for request in requests}) == len(requests), name
        assert all(together[request.id].tokens for request in requests)


@pytest.mark.parametrize("name", CASES)
def test_three_processes_answer_as_one(apart: Apart, together: dict[str, Finished], name: str) -> None:
    for request in CASES[name]:
        done = together[request.id]
        prompt, reason, answer = apart.answered(name, request)
        check(done, reason, answer)
        usage = dataclasses.replace(done.usage, completion_tokens=0, kv_positions=0)
        assert prompt.usage == usage, request.id


def test_samples_that_learn_from_each_other_stay_in_one_process(apart: Apart) -> None:
    drawn = next(request for request in CASES["causal"] if request.id == "causal.awrs")
    assert drawn.constraint is not None
    asap = dataclasses.replace(drawn.constraint, sampling=ConstraintSampling.ASAP)
    with pytest.raises(Unimplemented, match="in one process; use 'awrs'"):
        apart.ask("encode", "encode", "causal", dataclasses.replace(drawn, constraint=asap))


def moving() -> list[tuple[str, Request]]:
    return [(name, request) for name, requests in CASES.items() for request in requests]


@pytest.mark.parametrize(("name", "request_"), [pytest.param(n, r, id=r.id) for n, r in moving()])
def test_a_canvas_may_move_after_every_step(
    apart: Apart, together: dict[str, Finished], name: str, request_: Request
) -> None:
    reason, answer, moves = apart.wandered(name, request_)
    check(together[request_.id], reason, answer)
    assert moves > 0
