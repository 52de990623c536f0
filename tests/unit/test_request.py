"""A request's life: one table of stages, and no way around it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from itertools import pairwise

import pytest
from helpers import ask
from hypothesis import given
from hypothesis import strategies as st

from mmserve.core.request import (
    RUNNING,
    TERMINAL,
    TRANSITIONS,
    ImagePart,
    Message,
    Sampling,
    Stage,
    TextPart,
    advance,
)
from mmserve.engine.request_state import open_group

LIFE = [
    Stage.QUEUED,
    Stage.ENCODING,
    Stage.ENCODED,
    Stage.PREFILLING,
    Stage.PREFILLED,
    Stage.STEPPING,
    Stage.READY,
    Stage.STEPPING,
    Stage.FINISHED,
]
WAITING = [s for s in Stage if s not in RUNNING | TERMINAL]
#: What follows where another engine ran the stages between.
ELSEWHERE = {
    *((Stage.QUEUED, Stage.ENCODED), (Stage.QUEUED, Stage.EXPECTED), (Stage.QUEUED, Stage.ARRIVED)),
    *((Stage.EXPECTED, Stage.ARRIVED), (Stage.ARRIVED, Stage.PREFILLED)),
}


@pytest.mark.parametrize("media", [[], [Stage.LOADING, Stage.LOADED]], ids=["text", "media"])
@pytest.mark.parametrize("first", [[Stage.QUEUED], [Stage.QUEUED, Stage.CONSTRAINING, Stage.CONSTRAINED]])
def test_a_request_lives_through_the_stages_in_order(first: list[Stage], media: list[Stage]) -> None:
    stage, *rest = first + media + LIFE[1:]
    for following in rest:
        stage = advance(stage, following)
    assert stage is Stage.FINISHED


@pytest.mark.parametrize("stage", [s for s in Stage if s not in TERMINAL])
def test_a_live_request_can_fail_at_any_stage(stage: Stage) -> None:
    assert advance(stage, Stage.FAILED) is Stage.FAILED


@pytest.mark.parametrize("ended", sorted(TERMINAL, key=lambda s: s.name))
@pytest.mark.parametrize("following", list(Stage))
def test_an_ended_request_goes_nowhere(ended: Stage, following: Stage) -> None:
    with pytest.raises(ValueError, match=f"from {ended.name} to {following.name}"):
        advance(ended, following)


@given(st.sampled_from(Stage), st.sampled_from(Stage))
def test_advance_allows_exactly_the_table(current: Stage, following: Stage) -> None:
    if following in TRANSITIONS[current]:
        assert advance(current, following) is following
    else:
        with pytest.raises(ValueError, match="cannot go"):
            advance(current, following)


@given(st.lists(st.sampled_from(Stage), max_size=40))
def test_every_walk_meets_a_waiting_stage_between_two_running_ones(wishes: list[Stage]) -> None:
    walk = [Stage.QUEUED]
    for wish in wishes:
        if wish in TRANSITIONS[walk[-1]]:
            walk.append(advance(walk[-1], wish))
    for before, after in pairwise(walk):
        assert not (before in RUNNING and after in RUNNING)
        assert not (before in WAITING and after in WAITING) or (before, after) in ELSEWHERE
    assert sum(stage in TERMINAL for stage in walk) <= 1


def test_every_stage_is_in_the_table_and_can_be_reached_and_ended() -> None:
    assert set(TRANSITIONS) == set(Stage)
    reached, pending = set(), [Stage.QUEUED]
    while pending:
        stage = pending.pop()
        if stage not in reached:
            reached.add(stage)
            pending += TRANSITIONS[stage]
    assert reached == set(Stage)
    assert {s for s in Stage if not TRANSITIONS[s]} == TERMINAL


def test_a_request_is_plain_frozen_data_that_shows_no_image_bytes() -> None:
    assert "secret" not in repr(ImagePart(b"secret"))
    with pytest.raises(dataclasses.FrozenInstanceError):
        Sampling().temperature = 1.0  # type: ignore[misc]


class Counted(tuple[Message, ...]):
    """Messages that count how often they are gone through."""

    times = 0

    def __iter__(self) -> Iterator[Message]:
        type(self).times += 1
        return super().__iter__()


def test_the_parts_of_a_request_are_counted_once() -> None:
    """The engine asks at every turn, and there may be thousands of them."""
    parts = (TextPart("what?"), ImagePart(b"one"), ImagePart(b"two"))
    state = open_group(
        dataclasses.replace(ask("r"), messages=Counted([Message("user", parts)])), lambda _event: None, 0.0
    )
    assert [state.entry(16, 8, 512, now).images for now in (1.0, 2.0)] == [2, 2]
    assert Counted.times == 1
