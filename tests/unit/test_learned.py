"""The learned policy by hand-made filters, what a filter sees, and its file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from helpers import blank, proposal, sure_above
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from safetensors.numpy import save_file

from mmserve.core.canvas import Canvas
from mmserve.decode.commit.base import most_confident
from mmserve.decode.commit.early_commit import EarlyCommit
from mmserve.decode.commit.learned import Learned, block_confidence
from mmserve.decode.commit.low_confidence import LowConfidence
from mmserve.decode.pace import tokens_of_step
from mmserve.errors import ConfigError
from mmserve.models.commit_filter import FILTER, CommitFilter, features, load_filter, save_filter

PROBABILITIES = st.sampled_from([0.0, 0.25, 0.5, 0.75, 0.875, 0.95, 0.999, 1.0])


def beside_final(*, left: bool) -> CommitFilter:
    """Trusts what has a final neighbour on that side, whatever the confidences."""
    weight = np.zeros((1, 8), np.float32)  # three log-odds, three flags "open", two means
    weight[0, 3 if left else 5] = -1
    one = np.ones(1, np.float32)
    return CommitFilter(weight, one, 20 * one, np.array(-10, dtype=np.float32))


def random_filter(seed: int, radius: int = 3, hidden: int = 5) -> CommitFilter:
    rng = np.random.default_rng(seed)
    arrays = [rng.normal(size=shape).astype(np.float32) for shape in ((hidden, 4 * radius + 4), hidden, hidden, ())]
    return CommitFilter(*map(np.asarray, arrays))


def after_a_pass(new: int, block: int, final: list[int] | None = None) -> Canvas:
    canvas = blank(2, new, block)
    for offset in final or []:
        canvas.commit(np.array([2 + offset]), np.array([7]), hold=True)
    canvas.count_forward()
    return canvas


def chosen(policy: Learned | LowConfidence, canvas: Canvas, confidence: np.ndarray) -> set[int]:
    candidates = proposal(canvas, confidence)
    return set((candidates.positions[policy.choose(canvas, candidates)] - 2).tolist())


# --- the rule ---


@given(st.integers(1, 40), st.integers(1, 40), st.integers(0, 40), st.data())
def test_trusted_and_scheduled_candidates_become_final(new: int, block: int, steps: int, data: st.DataObject) -> None:
    canvas = after_a_pass(new, block)
    confidence = data.draw(hnp.arrays(np.float32, len(canvas.block_masked()), elements=PROBABILITIES))
    candidates = proposal(canvas, confidence)
    policy = Learned(commit_filter=sure_above(0.8), steps=steps)
    scheduled = most_confident(candidates, tokens_of_step(canvas, steps, 0))
    assert policy.choose(canvas, candidates).tolist() == ((confidence > 0.8) | scheduled).tolist()


@given(st.integers(1, 40), st.integers(1, 40), st.integers(0, 40), st.integers(0, 99), st.data())
def test_a_threshold_of_1_or_more_leaves_the_schedule(
    new: int, block: int, steps: int, seed: int, data: st.DataObject
) -> None:
    canvas = after_a_pass(new, block)
    candidates = proposal(canvas, data.draw(hnp.arrays(np.float32, len(canvas.block_masked()), elements=PROBABILITIES)))
    for least in (1.0, 1.5, 1e300):
        policy = Learned(commit_filter=random_filter(seed), threshold=least, steps=steps)
        assert policy.choose(canvas, candidates).tolist() == (
            LowConfidence(steps=steps).choose(canvas, candidates).tolist()
        )


def test_the_threshold_itself_is_not_enough() -> None:
    flat = CommitFilter(
        np.zeros((1, 4), np.float32), np.zeros(1, np.float32), np.zeros(1, np.float32), np.array(0, dtype=np.float32)
    )  # says 0.5 of everything
    canvas, confidence = after_a_pass(4, 4), np.array([0.1, 0.2, 0.3, 0.4])
    assert chosen(Learned(commit_filter=flat, threshold=0.5), canvas, confidence) == {3}
    assert chosen(Learned(commit_filter=flat, threshold=0.49), canvas, confidence) == {0, 1, 2, 3}


def test_left_of_a_block_all_is_final_and_right_of_it_nothing_is_known() -> None:
    canvas = after_a_pass(12, 6, final=[3])  # open: 0 1 2 4 5
    confidence = np.array([0.1, 0.2, 0.3, 0.4, 0.5])
    assert chosen(Learned(commit_filter=beside_final(left=True)), canvas, confidence) == {0, 4, 5}
    assert chosen(Learned(commit_filter=beside_final(left=False)), canvas, confidence) == {2, 5}


def test_an_open_position_that_was_not_run_has_no_confidence() -> None:
    canvas = after_a_pass(6, 6, final=[1])
    candidates = proposal(canvas, np.array([0.5, 0.9]), positions=np.array([2, 6]))
    confidence, still_open = block_confidence(canvas, candidates)
    assert confidence.tolist() == [np.float32(x) for x in (0.5, 1, 0, 0, 0.9, 0)]
    assert still_open.tolist() == [True, False, True, True, True, True]
    policy = Learned(commit_filter=sure_above(0.8))
    assert candidates.positions[policy.choose(canvas, candidates)].tolist() == [6]


def test_over_it_early_commit_closes_where_it_does() -> None:
    for closes in (True, False):
        base = Learned(commit_filter=sure_above(0.8), end_of_text=closes)
        assert base.closes == closes == EarlyCommit(base=base).closes
    assert not EarlyCommit(base=LowConfidence()).closes


@pytest.mark.parametrize("threshold", [0.0, -1.0, float("nan")])
def test_a_threshold_that_everything_passes_is_refused(threshold: float) -> None:
    with pytest.raises(ValueError, match="threshold"):
        Learned(commit_filter=sure_above(0.8), threshold=threshold)


# --- what a filter sees ---


def test_features_of_a_block_of_two() -> None:
    confidence, still_open = np.array([0.5, 1.0], np.float32), np.array([True, False])
    rows = features(confidence, still_open, 2)
    assert rows.dtype == np.float32 and rows.shape == (2, 12)
    assert rows[0].tolist() == pytest.approx([1, 1, 0, 1, -1, 0, 0, 1, 0, 1, 0, 0.5], abs=1e-6)
    assert rows[1].tolist() == pytest.approx([1, 0, 1, -1, -1, 0, 1, 0, 1, 1, 0, 0.5], abs=1e-6)


@given(st.integers(1, 80), st.integers(0, 9), st.integers(0, 99))
def test_one_filter_judges_blocks_of_any_length(length: int, radius: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    still_open = rng.random(length) < 0.7
    confidence = np.where(still_open, rng.random(length), 1).astype(np.float32)
    trust = random_filter(seed, radius).trust(confidence, still_open)
    assert trust.shape == (length,) and trust.dtype == np.float32
    assert ((trust >= 0) & (trust <= 1)).all()


# --- its file ---


def test_a_filter_comes_back_from_its_file(tmp_path: Path) -> None:
    assert load_filter(tmp_path) is None
    made = random_filter(4, radius=2)
    save_filter(made, tmp_path / "model" / FILTER, {"seed": 4})
    found = load_filter(tmp_path / "model")
    assert found is not None and found.radius == 2
    for name in ("hidden_weight", "hidden_bias", "output_weight", "output_bias"):
        assert np.array_equal(getattr(found, name), getattr(made, name))


@pytest.mark.parametrize(
    ("name", "tensor", "match"),
    [
        ("hidden.weight", np.zeros((5, 15), np.float32), "hidden.weight has shape"),
        ("hidden.weight", np.zeros(16, np.float32), "hidden.weight has shape"),
        ("hidden.weight", np.zeros((5, 0), np.float32), "hidden.weight has shape"),
        ("hidden.weight", np.zeros((5, 16)), "hidden.weight is float64"),
        ("hidden.bias", np.zeros(4, np.float32), r"hidden.bias is float32 \[4\]"),
        ("output.weight", np.full(5, np.nan, np.float32), "not finite"),
        ("output.bias", np.zeros(1, np.float32), "output.bias"),
        ("other", np.zeros(1, np.float32), "must hold the tensors"),
    ],
)
def test_a_wrong_file_is_named(tmp_path: Path, name: str, tensor: np.ndarray, match: str) -> None:
    made = random_filter(0)
    tensors = {
        "hidden.weight": made.hidden_weight,
        "hidden.bias": made.hidden_bias,
        "output.weight": made.output_weight,
        "output.bias": made.output_bias,
    }
    save_file({**tensors, name: tensor}, tmp_path / FILTER)
    with pytest.raises(ConfigError, match=match) as caught:
        load_filter(tmp_path)
    assert str(tmp_path / FILTER) in str(caught.value)


def test_a_file_that_is_none_is_named(tmp_path: Path) -> None:
    (tmp_path / FILTER).write_bytes(b"not safetensors")
    with pytest.raises(ConfigError, match="not a readable safetensors file"):
        load_filter(tmp_path)
