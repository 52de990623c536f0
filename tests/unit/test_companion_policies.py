"""What ``guided`` and ``draft_model`` keep, given what a companion says: against the definition, in plain arrays."""

from __future__ import annotations

import numpy as np
import pytest
from helpers import blank, proposal
from hypothesis import given
from hypothesis import strategies as st

from mmserve.core.canvas import Canvas
from mmserve.decode.commit import ACCOMPANIED, COMMIT, UNPENALISED, Candidates
from mmserve.decode.commit.base import Drafted, Verdict, Verified, leading
from mmserve.decode.commit.draft_model import DraftModel
from mmserve.decode.commit.guided import Guided


def verdict(canvas: Canvas, own: list[int], rank: list[int], relative: list[float]) -> Verdict:
    first = canvas.known()
    says = proposal(canvas, tokens=np.array(own), positions=first + np.arange(len(own)))
    return Verdict(says, np.array(rank), np.array(relative, np.float32))


def kept(policy: Guided, canvas: Canvas, drafted: list[int], said: Verdict) -> list[tuple[int, int]]:
    candidates = proposal(canvas, tokens=np.array(drafted), positions=canvas.known() + np.arange(len(drafted)))
    left = policy.verified(canvas, candidates, said)
    assert policy.choose(canvas, left).all() and len(left.positions) >= 1
    assert len(left.confidence) == len(left.gap) == len(left.entropy) == len(left.tokens)
    return list(zip((left.positions - canvas.known()).tolist(), left.tokens.tolist(), strict=True))


def test_the_companion_s_token_stands_where_it_first_disagrees() -> None:
    canvas = blank(3, 6, 6)
    said = verdict(canvas, [5, 6, 9, 8, 1, 1], [0, 0, 1, 0, 0, 0], [1, 1, 0.9, 1, 1, 1])
    assert kept(Guided(), canvas, [5, 6, 7, 8, 1, 1], said) == [(0, 5), (1, 6), (2, 9)]
    assert kept(Guided(), canvas, [4, 6, 7, 8, 1, 1], said) == [(0, 5)]
    assert kept(Guided(), canvas, [5, 6, 9, 8, 1, 1], said) == list(enumerate([5, 6, 9, 8, 1, 1]))


def test_a_likely_token_is_kept_though_another_is_likelier() -> None:
    canvas = blank(3, 4, 4)
    said = verdict(canvas, [5, 6, 9, 8], [0, 2, 1, 4], [1, 0.6, 0.5, 0.9])
    drafted = [5, 1, 2, 3]
    assert kept(Guided(top_k=3), canvas, drafted, said) == [(0, 5), (1, 1), (2, 2), (3, 8)]
    assert kept(Guided(top_k=2), canvas, drafted, said) == [(0, 5), (1, 6)]
    assert kept(Guided(top_k=3, ratio=0.51), canvas, drafted, said) == [(0, 5), (1, 1), (2, 9)]
    assert kept(Guided(top_k=5), canvas, drafted, said) == list(enumerate(drafted))


def test_behind_a_draft_that_stops_short_the_companion_s_token_stands_too() -> None:
    """A cache policy may have left positions of the block out of the pass, even the first."""
    canvas = blank(3, 4, 4)
    assert kept(Guided(), canvas, [5, 6], verdict(canvas, [5, 6, 7], [0, 0], [1, 1])) == [(0, 5), (1, 6), (2, 7)]
    scattered = proposal(canvas, tokens=np.array([1, 2]), positions=np.array([4, 6]))
    left = Guided().verified(canvas, scattered, verdict(canvas, [9], [], []))
    assert (left.positions.tolist(), left.tokens.tolist()) == ([3], [9])


@given(st.integers(1, 9), st.integers(1, 12), st.data())
def test_a_draft_is_kept_as_far_as_the_model_agrees_and_one_token_more(
    length: int, new: int, data: st.DataObject
) -> None:
    canvas, policy = blank(3, new, 1), DraftModel(length)
    wanted = policy.wanted(canvas)
    assert wanted == min(length, new - 1)
    drafted = data.draw(st.lists(st.integers(0, 2), min_size=wanted, max_size=wanted))
    chosen = data.draw(st.lists(st.integers(0, 2), min_size=wanted + 1, max_size=wanted + 1))
    candidates = proposal(canvas, tokens=np.array(chosen), positions=3 + np.arange(wanted + 1))
    left = policy.agreed(canvas, candidates, np.array(drafted, np.int64))
    agreed = next((i for i in range(wanted) if drafted[i] != chosen[i]), wanted)
    assert left.tokens.tolist() == chosen[: agreed + 1]
    assert left.positions.tolist() == list(range(3, 4 + agreed))
    assert policy.choose(canvas, left).all()
    assert not len(policy.draft(canvas)), "the companion drafts"


def test_how_many_lead() -> None:
    assert [leading(np.array(a, bool)) for a in ([], [1], [0], [1, 1, 0, 1], [1, 1])] == [0, 1, 0, 2, 2]


def test_candidates_one_behind_the_other() -> None:
    canvas = blank(2, 6, 6)
    whole = proposal(canvas)
    halves = whole.where(np.arange(6) < 2).and_then(whole.where(np.arange(6) >= 2))
    for name in Candidates.__dataclass_fields__:
        assert np.array_equal(getattr(halves, name), getattr(whole, name)), name


def test_the_loop_knows_them_by_what_they_have() -> None:
    made = {name: COMMIT[name]() for name in COMMIT if name not in ("early_commit", "learned")}
    assert {name for name, policy in made.items() if isinstance(policy, Verified)} == {"guided"}
    assert {name for name, policy in made.items() if isinstance(policy, Drafted)} == {"draft_model"}
    assert sorted(ACCOMPANIED) == ["draft_model", "guided"] and ACCOMPANIED <= UNPENALISED


@pytest.mark.parametrize("numbers", [{"top_k": -1}, {"ratio": -0.1}, {"ratio": 1.1}, {"ratio": float("nan")}])
def test_numbers_of_guided_that_make_no_sense_are_refused(numbers: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"must be (at least 0|in \[0, 1\])"):
        Guided(**numbers)  # type: ignore[arg-type]


@pytest.mark.parametrize("length", [0, 65])
def test_lengths_of_drafts_that_make_no_sense_are_refused(length: int) -> None:
    with pytest.raises(ValueError, match=r"length must be in \[1, 64\]"):
        DraftModel(length)
