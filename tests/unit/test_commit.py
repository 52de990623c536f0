"""Commit policies: how many, which, and never none."""

from __future__ import annotations

import numpy as np
import pytest
from helpers import blank, proposal, sure_above
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from mmserve.core.canvas import Canvas
from mmserve.decode.commit import CAUSAL_COMMIT, COMMIT, DIFFUSION_COMMIT, Commit
from mmserve.decode.commit.base import most_confident
from mmserve.decode.commit.low_confidence import LowConfidence
from mmserve.decode.commit.threshold import Threshold


def confidences(size: int) -> st.SearchStrategy[np.ndarray]:
    """Probabilities with many ties."""
    return hnp.arrays(np.float32, size, elements=st.sampled_from([0.0, 0.25, 0.5, 0.875, 0.9, 0.95, 1.0]))


def counts(canvas: Canvas, policy: Commit, seed: int = 0) -> list[list[int]]:
    """Tokens that ``policy`` commits at each step, block by block, until the canvas is full."""
    rng = np.random.default_rng(seed)
    per_block: list[list[int]] = []
    while canvas.block_start < canvas.size:
        if canvas.block_step == 0:
            per_block.append([])
        candidates = proposal(canvas, rng.random(len(canvas.block_masked())))
        canvas.count_forward()
        chosen = policy.choose(canvas, candidates)
        assert chosen.dtype == bool
        per_block[-1].append(int(chosen.sum()))
        canvas.commit(candidates.positions[chosen], candidates.tokens[chosen])
    return per_block


def llada(m: int, s: int) -> list[int]:
    """LLaDA's schedule: m // s tokens a step and one more in the first m % s; steps without a token are left out."""
    return [k for k in (m // s + (i < m % s) for i in range(s)) if k]


@pytest.mark.parametrize("s", [1, 2, 3, 4, 5, 7, 8, 16, 31, 32, 33, 64, 100])
@pytest.mark.parametrize("m", [1, 2, 3, 5, 8, 16, 31, 32, 33])
def test_a_single_block_follows_lladas_schedule(m: int, s: int) -> None:
    assert counts(blank(3, m, m), LowConfidence(steps=s)) == [llada(m, s)]


@pytest.mark.parametrize("s", [1, 2, 3, 5, 8, 64])
def test_what_stands_from_the_start_takes_no_step(s: int) -> None:
    canvas = blank(3, 16, 8)
    canvas.commit(np.arange(8, 19), np.zeros(11, np.int64))  # the end of the first block, and all of the second
    assert counts(canvas, LowConfidence(steps=2 * s)) == [llada(5, s)]


@pytest.mark.parametrize(
    ("length", "block", "steps"), [(32, 8, 16), (32, 8, 32), (32, 8, 4), (64, 32, 32), (24, 8, 9), (128, 32, 64)]
)
def test_equal_blocks_share_the_steps_as_in_llada(length: int, block: int, steps: int) -> None:
    blocks = length // block
    assert counts(blank(2, length, block), LowConfidence(steps=steps)) == [llada(block, steps // blocks)] * blocks


@given(st.integers(1, 70), st.integers(1, 80), st.integers(0, 90))
def test_low_confidence_commits_everything_in_about_the_steps_asked_for(length: int, block: int, steps: int) -> None:
    per_block = counts(blank(1, length, block), LowConfidence(steps=steps))
    sizes = [min(block, length - start) for start in range(0, length, block)]
    assert [sum(of_block) for of_block in per_block] == sizes
    forwards = sum(map(len, per_block))
    for of_block, size in zip(per_block, sizes, strict=True):
        assert of_block == llada(size, len(of_block)), "evenly spread, the remainder over the first steps"
    assert forwards <= max(steps or length, len(sizes)), "never more steps than asked for, but one a block at least"
    if not steps:
        assert forwards == length, "no number of steps means one token a step"


@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 40), st.data())
def test_low_confidence_takes_the_most_confident_and_the_leftmost_of_equals(
    length: int, block: int, steps: int, data: st.DataObject
) -> None:
    canvas = blank(2, length, block)
    while canvas.block_start < canvas.size:
        candidates = proposal(canvas, data.draw(confidences(len(canvas.block_masked()))))
        canvas.count_forward()
        chosen = LowConfidence(steps=steps).choose(canvas, candidates)
        ranked = sorted(range(len(chosen)), key=lambda j: (-candidates.confidence[j], candidates.positions[j]))
        assert set(np.flatnonzero(chosen).tolist()) == set(ranked[: chosen.sum()])
        canvas.commit(candidates.positions[chosen], candidates.tokens[chosen])


@given(st.integers(1, 40), st.data())
def test_most_confident_ranks_by_confidence_then_position(size: int, data: st.DataObject) -> None:
    candidates = proposal(blank(2, size, size), data.draw(confidences(size)))
    for count in range(size + 2):
        chosen = set(np.flatnonzero(most_confident(candidates, count)).tolist())
        ranked = sorted(range(size), key=lambda j: (-candidates.confidence[j], j))
        assert chosen == set(ranked[:count])


@given(st.integers(1, 30), st.sampled_from([0.25, 0.5, 0.875, 1.0]), st.data())
def test_threshold_takes_all_at_or_above_it_and_always_the_best(
    size: int, confidence: float, data: st.DataObject
) -> None:
    candidates = proposal(blank(2, size, size), data.draw(confidences(size)))
    chosen = Threshold(confidence=confidence).choose(blank(2, size, size), candidates)
    best = max(range(size), key=lambda j: (candidates.confidence[j], -j))
    assert np.flatnonzero(chosen).tolist() == [
        j for j in range(size) if candidates.confidence[j] >= confidence or j == best
    ]


@pytest.mark.parametrize("confidence", [0.9, 0.7, 0.1, 1.0, 0.95])
def test_a_probability_equal_to_the_threshold_is_taken_in_the_precision_of_the_model(confidence: float) -> None:
    at, below = np.float32(confidence), np.nextafter(np.float32(confidence), np.float32(0))
    candidates = proposal(blank(2, 3, 3), np.array([1.0, at, below], np.float32))
    assert Threshold(confidence=confidence).choose(blank(2, 3, 3), candidates).tolist() == [True, True, False]


@given(st.integers(1, 30), st.sampled_from([1.01, 2.0, 1e30]), st.data())
def test_a_threshold_above_one_takes_one_token_a_step(size: int, confidence: float, data: st.DataObject) -> None:
    candidates = proposal(blank(2, size, size), data.draw(confidences(size)))
    chosen = Threshold(confidence=confidence).choose(blank(2, size, size), candidates)
    assert chosen.tolist() == LowConfidence().choose(_after_a_pass(size), candidates).tolist()
    assert chosen.sum() == 1


def test_a_threshold_past_fp32_is_like_any_above_one() -> None:
    candidates = proposal(blank(2, 3, 3))
    assert Threshold(confidence=1e300).choose(blank(2, 3, 3), candidates).tolist() == [False, False, True]


def _after_a_pass(size: int) -> Canvas:
    canvas = blank(2, size, size)
    canvas.count_forward()
    return canvas


@pytest.mark.parametrize("confidence", [0.0, -0.5, float("nan"), float("-inf")])
def test_a_threshold_that_nothing_is_below_is_refused(confidence: float) -> None:
    with pytest.raises(ValueError, match="confidence"):
        Threshold(confidence=confidence)


@pytest.mark.parametrize("name", DIFFUSION_COMMIT)
@given(length=st.integers(1, 30), block=st.integers(1, 30), seed=st.integers(0, 99))
def test_every_step_of_every_policy_commits_at_least_one_position(
    name: str, length: int, block: int, seed: int
) -> None:
    needed = {"early_commit": {"base": LowConfidence()}, "learned": {"commit_filter": sure_above(0.8)}}
    policy = COMMIT[name](**needed.get(name, {}))
    per_block = counts(blank(2, length, block), policy, seed)
    assert min(min(of_block) for of_block in per_block) >= 1
    assert sum(map(sum, per_block)) == length


def test_every_policy_is_for_some_attention() -> None:
    assert set(COMMIT) == {*DIFFUSION_COMMIT, *CAUSAL_COMMIT}
