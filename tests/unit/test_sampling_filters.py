"""min-p and repetition penalty against numpy in double precision."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from helpers import blank
from hypothesis import given
from hypothesis import strategies as st

from mmserve.core.canvas import Canvas
from mmserve.core.request import Sampling
from mmserve.decode.commit import Candidates
from mmserve.decode.sampler import candidates

VOCAB = 24


def rows(count: int, seed: int, spread: float = 2.0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(count, VOCAB)).astype(np.float32) * np.float32(spread)


def draw(
    logits: np.ndarray, sampling: Sampling, canvas: Canvas | None = None, ends: frozenset[int] = frozenset()
) -> Candidates:
    canvas = canvas or blank(3, len(logits), len(logits))
    return candidates(torch.from_numpy(logits.copy()), canvas.block_masked(), canvas, sampling, (), end_ids=ends)


def softmax(logits: np.ndarray) -> np.ndarray:
    e = np.exp(logits.astype(np.float64) - logits.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def frequencies(row: np.ndarray, sampling: Sampling, draws: int = 4000) -> np.ndarray:
    tokens = draw(np.tile(row, (draws, 1)), sampling).tokens
    return np.bincount(tokens, minlength=VOCAB) / draws


# --- min-p ---


def kept(row: np.ndarray, sampling: Sampling) -> set[int]:
    """Tokens that may be drawn: top-k, then the nucleus of those, then min-p."""
    p = softmax(row.astype(np.float64) / sampling.temperature)
    order = np.argsort(-p, kind="stable")
    inside = order[: sampling.top_k or VOCAB]
    q = p[inside] / p[inside].sum()
    inside = inside[np.cumsum(q) - q < sampling.top_p]
    return {int(t) for t in inside if p[t] >= sampling.min_p * p.max()}


@given(
    st.integers(0, 400),
    st.floats(0.001, 1.0),
    st.sampled_from([0.5, 1.0, 2.5]),
    st.sampled_from([{}, {"top_k": 5}, {"top_p": 0.8}]),
)
def test_tokens_below_the_share_are_never_drawn(seed: int, min_p: float, temperature: float, others: dict) -> None:
    row = rows(1, seed)[0]
    sampling = Sampling(temperature=temperature, min_p=min_p, seed=seed, **others)
    p = softmax(row / temperature)
    drawn = set(np.flatnonzero(frequencies(row, sampling, 200)).tolist())
    unsure = {t for t in range(VOCAB) if abs(p[t] / p.max() / min_p - 1) < 1e-5}
    assert drawn <= kept(row, sampling) | unsure


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.5])
@pytest.mark.parametrize("options", [{"min_p": 0.05}, {"min_p": 0.3}, {"min_p": 0.1, "top_k": 6, "top_p": 0.9}])
def test_what_is_left_is_drawn_as_often_as_its_share(temperature: float, options: dict[str, float]) -> None:
    row = rows(1, 3, spread=0.4)[0]
    sampling = Sampling(temperature=temperature, seed=4, **options)  # type: ignore[arg-type]
    allowed = sorted(kept(row, sampling))
    expected = np.zeros(VOCAB)
    expected[allowed] = softmax(row / temperature)[allowed]
    expected /= expected.sum()
    assert len(allowed) > 1
    np.testing.assert_allclose(frequencies(row, sampling), expected, atol=0.035)
    assert set(np.flatnonzero(frequencies(row, sampling)).tolist()) <= set(allowed)


@given(st.integers(0, 300), st.sampled_from([0.0, 0.7, 3.0]), st.integers(0, 2**64 - 1))
def test_min_p_of_zero_changes_nothing_and_of_one_is_greedy(seed: int, temperature: float, draws: int) -> None:
    values = rows(9, seed)
    plain = draw(values, Sampling(temperature=temperature, seed=draws))
    zero = draw(values, Sampling(temperature=temperature, seed=draws, min_p=0.0))
    assert plain.tokens.tolist() == zero.tokens.tolist()
    one = draw(values, Sampling(temperature=temperature, seed=draws, min_p=1.0))
    assert one.tokens.tolist() == values.argmax(-1).tolist()


def test_min_p_of_one_draws_among_equals() -> None:
    row = np.zeros(VOCAB, np.float32)
    row[[4, 9, 17]] = 2.5
    seen = frequencies(row, Sampling(temperature=3.0, min_p=1.0))
    assert set(np.flatnonzero(seen).tolist()) == {4, 9, 17}
    np.testing.assert_allclose(seen[[4, 9, 17]], 1 / 3, atol=0.03)


def test_the_figures_of_a_candidate_do_not_know_of_min_p() -> None:
    values = rows(9, 1)
    first, second = (draw(values, Sampling(temperature=0.6, min_p=min_p)) for min_p in (0.0, 0.9))
    np.testing.assert_array_equal(first.gap, second.gap)
    np.testing.assert_array_equal(first.entropy, second.entropy)
    p = softmax(values)
    np.testing.assert_allclose(second.confidence, p[np.arange(9), second.tokens], rtol=1e-5)


# --- repetition penalty ---


def penalised(logits: np.ndarray, held: set[int], penalty: float) -> np.ndarray:
    out = logits.astype(np.float64).copy()
    for row in out:
        for token in held:
            row[token] = row[token] / penalty if row[token] > 0 else row[token] * penalty
    return out


def speaking(prompt: list[int], answer: dict[int, int], size: int, block: int) -> Canvas:
    """A canvas of ``prompt`` and ``size`` positions of the answer, of which ``answer`` are final."""
    canvas = Canvas.create(np.array(prompt), new_tokens=size, block_length=block, mask_id=3)
    if answer:
        canvas.count_forward()
        canvas.commit(np.array([*answer]) + len(prompt), np.array([*answer.values()]))
    return canvas


@given(
    st.lists(st.integers(0, VOCAB + 200), min_size=1, max_size=5),
    st.dictionaries(st.integers(0, 8), st.integers(0, VOCAB - 1), max_size=8),
    st.sampled_from([0.25, 0.9, 1.0, 1.2, 4.0]),
    st.integers(0, 300),
)
def test_the_penalty_is_on_what_prompt_and_answer_hold(
    prompt: list[int], answer: dict[int, int], penalty: float, seed: int
) -> None:
    """Ids past the logits are placeholders; the mask's own token (3) counts only where it is really held."""
    canvas = speaking(prompt, answer, 12, 6)
    values = rows(len(canvas.block_masked()), seed)
    found = draw(values, Sampling(repetition_penalty=penalty), canvas)
    held = {token for token in (*prompt, *answer.values()) if token < VOCAB}
    logits = penalised(values, held, penalty)
    p = softmax(logits)
    ordered = np.sort(logits, -1)
    assert found.tokens.tolist() == logits.argmax(-1).tolist()
    np.testing.assert_allclose(found.confidence, p.max(-1), rtol=1e-5)
    np.testing.assert_allclose(found.gap, ordered[:, -1] - ordered[:, -2], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(found.entropy, -(p * np.log(p)).sum(-1), rtol=1e-4, atol=1e-6)


def test_the_rule_on_positive_and_negative_logits() -> None:
    values = np.array([[2.0, -1.0, 0.5, 0.9, -8.0, 0.0]], np.float32)
    found = draw(values, Sampling(repetition_penalty=4.0), speaking([0, 1, 5], {}, 1, 1))
    expected = np.array([0.5, -4.0, 0.5, 0.9, -8.0, 0.0])
    assert found.tokens.tolist() == [3]
    np.testing.assert_allclose(found.confidence, softmax(expected[None]).max(), rtol=1e-6)


def test_penalties_are_in_vllms_order() -> None:
    """Biases, the repetition penalty, then what occurrences cost (vllm/v1/sample/sampler.py, ``apply_penalties``)."""
    values = np.array([[4.0, 1.0, -1.0, 0.5, 2.0]], np.float32)
    sampling = Sampling(repetition_penalty=2.0, frequency_penalty=1.0, presence_penalty=0.5, logit_bias={1: 1.0})
    canvas = speaking([1, 4], {1: 0, 2: 0, 3: 2}, 4, 1)
    found = candidates(torch.from_numpy(values.copy()), canvas.block_masked(), canvas, sampling, ())
    expected = np.array([4.0 / 2 - 2 * 1.0 - 0.5, (1.0 + 1.0) / 2, -1.0 * 2 - 1.0 - 0.5, 0.5, 2.0 / 2])
    assert found.tokens.tolist() == [1]
    np.testing.assert_allclose(found.confidence, softmax(expected[None])[:, 1], rtol=1e-6)


@given(st.integers(0, 200), st.sampled_from([0.0, 0.8]))
def test_a_penalty_of_one_changes_nothing(seed: int, temperature: float) -> None:
    values = rows(6, seed)
    plain, one = (
        draw(values, Sampling(temperature=temperature, seed=seed, **options), speaking([1, 2, 7], {}, 6, 6))  # type: ignore[arg-type]
        for options in ({}, {"repetition_penalty": 1.0})
    )
    for name in ("tokens", "confidence", "gap", "entropy"):
        np.testing.assert_array_equal(getattr(plain, name), getattr(one, name))


def test_masked_positions_hold_nothing() -> None:
    """A canvas keeps the mask's id where it is open: that is no token of the answer."""
    values = np.zeros((4, VOCAB), np.float32)
    values[:, 3] = 5.0
    found = draw(values, Sampling(repetition_penalty=50.0), speaking([9], {}, 4, 4))
    assert found.tokens.tolist() == [3] * 4
    np.testing.assert_allclose(found.confidence, softmax(values)[:, 3], rtol=1e-6)
    held = draw(values[:3], Sampling(repetition_penalty=50.0), speaking([9], {0: 3}, 4, 4))
    np.testing.assert_allclose(held.confidence, softmax(penalised(values[:3], {3}, 50.0)).max(-1), rtol=1e-5)


def test_what_stands_right_of_the_block_counts_too() -> None:
    values = rows(2, 5)
    token = int(values[0].argmax())
    canvas = speaking([20], {5: token}, 6, 2)
    found = draw(values, Sampling(repetition_penalty=1e4), canvas)
    assert found.tokens.tolist() == penalised(values, {20, token}, 1e4).argmax(-1).tolist()
    assert found.tokens[0] != token


@pytest.mark.parametrize("penalty", ["repetition_penalty", "frequency_penalty", "presence_penalty"])
def test_end_tokens_that_fill_a_canvas_are_not_penalised(penalty: str) -> None:
    values = rows(5, 5)
    end = int(values[0].argmax())
    sampling = Sampling(**{penalty: 2.0})  # type: ignore[arg-type]
    filled, padded = (speaking([20], {5: token}, 6, 6) for token in (end, VOCAB + 1))
    expected = draw(values, sampling, padded).confidence
    np.testing.assert_array_equal(draw(values, sampling, filled, frozenset({end})).confidence, expected)
    assert draw(values, sampling, filled).tokens[0] != end


def test_an_end_token_of_the_prompt_is_penalised() -> None:
    values = rows(1, 5)
    end = int(values[0].argmax())
    found, other = (
        draw(values, Sampling(repetition_penalty=2.0), speaking([token], {}, 1, 1), frozenset({end})).tokens[0]
        for token in (end, VOCAB + 1)
    )
    assert found != end == other


@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_the_penalty_comes_before_temperature_and_filters(temperature: float) -> None:
    row = rows(1, 8, spread=1.0)[0]
    held = {int(row.argmax()), int(row.argmin())}
    sampling = Sampling(temperature=temperature, repetition_penalty=1.7, min_p=0.1, top_k=8, seed=3)
    canvas = Canvas.create(np.array([*held]), new_tokens=4000, block_length=4000, mask_id=3)
    tokens = draw(np.tile(row, (4000, 1)), sampling, canvas).tokens
    logits = penalised(row[None], held, 1.7)[0]
    allowed = sorted(kept(logits, sampling))
    expected = np.zeros(VOCAB)
    expected[allowed] = softmax(logits / temperature)[allowed]
    np.testing.assert_allclose(np.bincount(tokens, minlength=VOCAB) / 4000, expected / expected.sum(), atol=0.035)


@pytest.mark.parametrize("penalty", [1e-39, 1e-300])
def test_a_penalty_next_to_nothing_leaves_numbers(penalty: float) -> None:
    found = draw(rows(4, 1), Sampling(repetition_penalty=penalty), speaking([*range(8)], {}, 4, 4))
    for figures in (found.confidence, found.entropy):
        assert np.isfinite(figures).all()


@pytest.mark.parametrize("penalty", [1e30, 1e300])
def test_a_penalty_past_everything_leaves_numbers(penalty: float) -> None:
    found = draw(rows(4, 1), Sampling(repetition_penalty=penalty), speaking([*range(8)], {}, 4, 4))
    for figures in (found.confidence, found.entropy):
        assert np.isfinite(figures).all()
