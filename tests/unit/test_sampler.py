"""From logits to candidates: greedy, drawn, filtered, and repeatable."""

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


def logits(rows: int, seed: int = 0, vocab: int = VOCAB, spread: float = 2.0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * spread


def draw(values: torch.Tensor, sampling: Sampling, canvas: Canvas | None = None, banned: tuple = ()) -> Candidates:
    """Candidates of a fresh one-block canvas, or of ``canvas``, for the given logits."""
    canvas = canvas or blank(3, len(values), len(values))
    return candidates(values.clone(), canvas.block_masked(), canvas, sampling, banned)


def many(row: torch.Tensor, sampling: Sampling, draws: int = 4000, banned: tuple = ()) -> np.ndarray:
    """Tokens of ``draws`` positions of one block that all have the logits ``row``."""
    return draw(row.expand(draws, -1), sampling, banned=banned).tokens


def chi_square(tokens: np.ndarray, probabilities: np.ndarray) -> float:
    """Pearson's statistic per degree of freedom, over the outcomes expected at least five times."""
    expected = probabilities * len(tokens)
    seen = np.bincount(tokens, minlength=len(probabilities))
    often = expected >= 5
    assert often.sum() > 3
    return float((((seen - expected) ** 2 / np.maximum(expected, 1e-9))[often]).sum() / (often.sum() - 1))


@given(st.integers(1, 20), st.integers(0, 500))
def test_temperature_zero_is_the_argmax(rows: int, seed: int) -> None:
    values = logits(rows, seed)
    assert draw(values, Sampling(seed=seed)).tokens.tolist() == values.argmax(-1).tolist()


@given(st.integers(1, 20), st.integers(0, 500), st.sampled_from([0.0, 0.7, 3.0]), st.sampled_from([0, 3]))
def test_confidence_is_the_untempered_unfiltered_probability(
    rows: int, seed: int, temperature: float, top_k: int
) -> None:
    values = logits(rows, seed)
    drawn = draw(values, Sampling(temperature=temperature, top_k=top_k, top_p=0.9 if top_k else 1.0, seed=seed))
    expected = values.double().softmax(-1)[torch.arange(rows), torch.from_numpy(drawn.tokens)]
    np.testing.assert_allclose(drawn.confidence, expected.numpy(), rtol=1e-5, atol=1e-7)
    assert drawn.confidence.dtype == np.float32
    assert drawn.tokens.dtype == drawn.positions.dtype == np.int64


def test_confidence_leaves_banned_tokens_out_of_the_whole() -> None:
    values = logits(5)
    drawn = draw(values, Sampling(), banned=(0, 7))
    values[:, [0, 7]] = -torch.inf
    np.testing.assert_allclose(drawn.confidence, values.double().softmax(-1).max(-1).values, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_logits_of_any_dtype_are_judged_in_fp32(dtype: torch.dtype) -> None:
    values = logits(6).to(dtype)
    drawn = draw(values, Sampling())
    expected = values.double().softmax(-1)
    assert drawn.tokens.tolist() == expected.argmax(-1).tolist()
    np.testing.assert_allclose(drawn.confidence, expected.max(-1).values, rtol=1e-5)


@given(st.integers(0, 2**63 - 1), st.integers(0, 50))
def test_the_same_seed_draws_the_same_tokens(seed: int, step: int) -> None:
    values, sampling = logits(6), Sampling(temperature=1.0, seed=seed)
    first, second = blank(3, 6, 6), blank(40, 6, 6)
    first.step = second.step = step
    assert draw(values, sampling, first).tokens.tolist() == draw(values, sampling, second).tokens.tolist()


def test_drawing_leaves_the_global_generator_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3).tolist()
    torch.manual_seed(5)
    draw(logits(6), Sampling(temperature=1.0, seed=1))
    assert torch.rand(3).tolist() == expected


def test_other_seeds_steps_and_positions_draw_other_tokens() -> None:
    row = torch.zeros(64, 200)
    base = draw(row, Sampling(temperature=1.0, seed=1)).tokens
    assert len(set(base.tolist())) > 40, "positions of one block draw independently"
    other_seed = draw(row, Sampling(temperature=1.0, seed=2)).tokens
    later = blank(3, 64, 64)
    later.step = 1
    other_step = draw(row, Sampling(temperature=1.0, seed=1), later).tokens
    for other in (other_seed, other_step):
        assert (base == other).mean() < 0.1


@given(st.integers(0, 200), st.sets(st.integers(0, 15), max_size=15), st.sampled_from([(0, 1.0), (4, 1.0), (0, 0.8)]))
def test_a_draw_does_not_depend_on_which_other_positions_are_masked(
    seed: int, taken: set[int], kept: tuple[int, float]
) -> None:
    values = logits(16, seed)
    sampling = Sampling(temperature=1.0, seed=seed, top_k=kept[0], top_p=kept[1])
    whole = draw(values, sampling, blank(3, 16, 16))
    canvas = blank(3, 16, 16)
    if taken:
        canvas.commit(np.array(sorted(taken)) + 3, np.zeros(len(taken), np.int64))
    left = [i for i in range(16) if i not in taken]
    part = draw(values[left], sampling, canvas)
    assert part.positions.tolist() == [i + 3 for i in left]
    assert part.tokens.tolist() == whole.tokens[left].tolist()
    np.testing.assert_allclose(part.confidence, whole.confidence[left], rtol=1e-6)


@given(st.integers(1, VOCAB + 5), st.integers(0, 99))
def test_top_k_draws_only_the_k_most_probable_and_one_is_greedy(k: int, seed: int) -> None:
    row = logits(1, seed)[0]
    allowed = set(row.topk(min(k, VOCAB)).indices.tolist())
    drawn = set(many(row, Sampling(temperature=5.0, top_k=k, seed=seed), 300).tolist())
    assert drawn <= allowed
    if k == 1:
        assert drawn == {int(row.argmax())}


def _nucleus(row: torch.Tensor, temperature: float, top_p: float) -> set[int]:
    probabilities = (row.double() / temperature).softmax(-1)
    kept: set[int] = set()
    mass = 0.0
    for token in probabilities.argsort(descending=True).tolist():
        if mass >= top_p:
            break
        kept.add(token)
        mass += float(probabilities[token])
    return kept


@given(st.floats(0.02, 0.98), st.integers(0, 99), st.sampled_from([0.5, 1.0, 2.0]))
def test_top_p_draws_only_the_smallest_set_with_that_mass(top_p: float, seed: int, temperature: float) -> None:
    row = logits(1, seed)[0]
    drawn = set(many(row, Sampling(temperature=temperature, top_p=top_p, seed=seed), 300).tolist())
    assert drawn <= _nucleus(row, temperature, top_p)


@pytest.mark.parametrize("options", [{"top_k": 5}, {"top_p": 0.6}, {"top_k": 6, "top_p": 0.7}, {"top_p": 1e-6}])
def test_every_token_that_the_filters_keep_is_drawn(options: dict[str, float]) -> None:
    row = logits(1, 3, spread=0.5)[0]
    kept = set(range(VOCAB))
    if "top_k" in options:
        kept = set(row.topk(int(options["top_k"])).indices.tolist())
    if "top_p" in options:
        inside = row.clone()
        inside[[t for t in range(VOCAB) if t not in kept]] = -torch.inf
        kept = _nucleus(inside, 1.0, options["top_p"])
    assert set(many(row, Sampling(temperature=1.0, seed=4, **options)).tolist()) == kept


def test_equal_logits_at_the_edge_of_top_k_give_no_token_outside_the_ties() -> None:
    row = torch.tensor([3.0, 2.0, 2.0, 2.0, 1.0, 0.0])
    assert set(many(row, Sampling(temperature=4.0, top_k=2), 400).tolist()) <= {0, 1, 2, 3}


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
def test_frequencies_of_drawn_tokens_match_the_tempered_softmax(temperature: float) -> None:
    row = logits(1, 11, spread=1.0)[0]
    tokens = many(row, Sampling(temperature=temperature, seed=21))
    expected = (row.double() / temperature).softmax(-1).numpy()
    assert chi_square(tokens, expected) < 2.0
    assert chi_square(tokens, np.roll(expected, 1)) > 10, "the statistic tells another distribution apart"


def test_frequencies_over_steps_match_the_softmax_too() -> None:
    """One position, step after step: each step's noise is fresh."""
    row = logits(1, 11, spread=1.0)
    tokens = []
    for step in range(2000):
        canvas = blank(3, 1, 1)
        canvas.step = step
        tokens += draw(row, Sampling(temperature=1.0, seed=3), canvas).tokens.tolist()
    assert chi_square(np.array(tokens), row[0].double().softmax(-1).numpy()) < 2.0


def test_frequencies_over_seeds_match_the_softmax_too() -> None:
    row = logits(1, 12, spread=1.0)
    tokens = [int(draw(row, Sampling(temperature=1.0, seed=seed)).tokens[0]) for seed in range(2000)]
    assert chi_square(np.array(tokens), row[0].double().softmax(-1).numpy()) < 2.0


@pytest.mark.parametrize("options", [{"top_k": 6}, {"top_p": 0.7}])
def test_filtered_frequencies_match_the_renormalised_softmax(options: dict[str, float]) -> None:
    row = logits(1, 13, spread=1.0)[0]
    kept = set(row.topk(6).indices.tolist()) if "top_k" in options else _nucleus(row, 1.0, 0.7)
    inside = row.double()
    inside[[t for t in range(VOCAB) if t not in kept]] = -torch.inf
    tokens = many(row, Sampling(temperature=1.0, seed=8, **options))
    assert chi_square(tokens, inside.softmax(-1).numpy()) < 2.0


def test_a_tiny_temperature_is_greedy_and_a_huge_one_uniform() -> None:
    values = logits(50, 9)
    cold = draw(values, Sampling(temperature=1e-5, seed=2))
    assert cold.tokens.tolist() == values.argmax(-1).tolist()
    hot = many(logits(1, 9)[0], Sampling(temperature=1e5, seed=2))
    assert chi_square(hot, np.full(VOCAB, 1 / VOCAB)) < 2.0
    beyond = draw(values, Sampling(temperature=1e300, seed=2), banned=(0, 3))  # past fp32
    assert (beyond.tokens == draw(values, Sampling(temperature=1e20, seed=2), banned=(0, 3)).tokens).all()


def test_a_top_p_below_fp32_is_greedy() -> None:
    values = logits(50, 9)
    assert (draw(values, Sampling(temperature=1.0, top_p=1e-60)).tokens == values.argmax(-1).numpy()).all()


@given(
    st.sets(st.integers(0, VOCAB - 1), max_size=VOCAB - 1),
    st.sampled_from([0.0, 1.0, 50.0, 1e300]),
    st.sampled_from([{}, {"top_k": 3}, {"top_p": 0.9}, {"top_p": 1e-60}]),
)
def test_a_banned_token_is_never_chosen(banned: set[int], temperature: float, options: dict[str, float]) -> None:
    values = logits(40, 5)
    values[:, sorted(banned)] += 50
    drawn = draw(values, Sampling(temperature=temperature, seed=1, **options), banned=tuple(banned))
    assert not set(drawn.tokens.tolist()) & banned
    assert np.isfinite(drawn.confidence).all()
    assert (drawn.confidence > 0).all()
