"""The newer commit policies by brute force, and what every pair of recompute and commit policy keeps."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import numpy as np
import pytest
from helpers import blank, proposal
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from plain_decoding import block_counts

from mmserve.core.canvas import MASKED, Canvas
from mmserve.decode.commit import COMMIT, Candidates, Commit
from mmserve.decode.commit.confident import Confident
from mmserve.decode.commit.early_commit import EarlyCommit
from mmserve.decode.commit.entropy_bound import EntropyBound
from mmserve.decode.commit.factor import Factor
from mmserve.decode.commit.low_confidence import LowConfidence
from mmserve.decode.commit.random import Random
from mmserve.decode.commit.threshold import Threshold
from mmserve.decode.pace import random_order
from mmserve.decode.recompute import RECOMPUTE, Recompute

RECOMPUTES = ("none", "prefix", "dual", "dkv_decode", "dkv_greedy", "free_cache")
COMMITS = ("low_confidence", "random", "threshold", "factor", "confident", "entropy_bound", "early_commit")
#: Probabilities with ties, and a few that are next to the limits in use.
PROBABILITIES = st.sampled_from([0.0, 0.25, 0.4, 0.5, 0.6, 0.75, 0.875, 0.95, 0.96, 1.0])
NEVER = {"early": math.inf, "middle": math.inf, "late": math.inf}


def confidences(size: int) -> st.SearchStrategy[np.ndarray]:
    return hnp.arrays(np.float32, size, elements=PROBABILITIES)


def chosen_by(policy: Commit, canvas: Canvas, candidates: Candidates) -> set[int]:
    """Positions that ``policy`` makes final."""
    chosen = policy.choose(canvas, candidates)
    assert chosen.dtype == bool and chosen.shape == candidates.positions.shape
    return set(candidates.positions[chosen].tolist())


def ranked(candidates: Candidates) -> list[int]:
    """Positions from the most confident on, the leftmost of equals first."""
    by = dict(zip(candidates.positions.tolist(), candidates.confidence.tolist(), strict=True))
    return sorted(by, key=lambda p: (-by[p], p))


# --- factor ---


@given(st.integers(1, 24), st.floats(0.01, 40.0), st.data())
def test_factor_takes_the_most_that_its_rule_allows(size: int, factor: float, data: st.DataObject) -> None:
    canvas = blank(2, size, size)
    candidates = proposal(canvas, data.draw(confidences(size)))
    ordered = sorted(map(float, candidates.confidence), reverse=True)
    limits = [1 - factor / (n + 1) for n in range(1, size + 1)]
    assume(all(abs(c - limit) > 1e-9 for c, limit in zip(ordered, limits, strict=True)))
    count = max((n for n in range(1, size + 1) if ordered[n - 1] >= limits[n - 1]), default=1)
    assert chosen_by(Factor(factor=factor), canvas, candidates) == set(ranked(candidates)[:count])


@given(st.integers(1, 24), st.data())
def test_a_larger_factor_never_takes_less(size: int, data: st.DataObject) -> None:
    canvas = blank(2, size, size)
    candidates = proposal(canvas, data.draw(confidences(size)))
    taken = [chosen_by(Factor(factor=factor), canvas, candidates) for factor in (1e-6, 0.5, 1.0, 2.0, 5.0, 1e6)]
    assert all(less <= more for less, more in itertools.pairwise(taken))
    assert len(taken[0]) == max(1, int((candidates.confidence == 1).sum()))
    assert len(taken[-1]) == size


def test_the_factor_rule_includes_equality() -> None:
    canvas = blank(1, 3, 3)  # 1 - 1/2, 1 - 1/3, 1 - 1/4
    assert len(chosen_by(Factor(factor=1.0), canvas, proposal(canvas, np.array([0.5, 0.5, 0.5])))) == 1
    assert len(chosen_by(Factor(factor=1.0), canvas, proposal(canvas, np.array([0.75, 0.75, 0.75])))) == 3
    below = np.nextafter(np.float32(0.75), np.float32(0))
    assert len(chosen_by(Factor(factor=1.0), canvas, proposal(canvas, np.array([0.75, 0.75, below])))) == 2


# --- confident ---


@given(st.integers(1, 30), st.sampled_from([0.25, 0.5, 0.875, 0.95, 1.0]), st.integers(0, 40), st.data())
def test_confident_takes_all_above_it_or_else_what_the_schedule_says(
    size: int, confidence: float, steps: int, data: st.DataObject
) -> None:
    canvas = blank(2, size, size)
    canvas.count_forward()
    candidates = proposal(canvas, data.draw(confidences(size)))
    limit = np.float32(confidence)
    above = {int(p) for p, c in zip(candidates.positions, candidates.confidence, strict=True) if c > limit}
    due = set(ranked(candidates)[: max(1, size // min(steps or size, size))])
    assert chosen_by(Confident(confidence=confidence, steps=steps), canvas, candidates) == (
        above if above and min(steps or size, size) > 1 else due
    )


@given(st.integers(1, 30), st.integers(1, 40), st.data())
def test_confident_lags_behind_its_grid_by_no_step_that_is_not_sure(size: int, steps: int, data: st.DataObject) -> None:
    """After a step without a sure candidate no more is masked than the grid says; one that is ahead takes one."""
    canvas, policy, steps = blank(2, size, size), Confident(confidence=0.5, steps=steps), min(steps, size)
    while canvas.block_start < canvas.size:
        masked = canvas.block_masked()
        sure = data.draw(st.integers(0, len(masked)))
        candidates = proposal(canvas, np.where(np.arange(len(masked)) < sure, 0.9, 0.1))
        canvas.count_forward()
        taken = policy.choose(canvas, candidates)
        left = size * (1 - canvas.block_step / steps)
        if not sure or canvas.block_step == steps:
            assert taken.any() and len(masked) - taken.sum() <= math.ceil(left - 1e-9)
        else:
            assert taken.sum() == sure
        assert canvas.block_step <= steps
        canvas.commit(candidates.positions[taken], candidates.tokens[taken])


# --- entropy bound ---


def entropies(size: int) -> st.SearchStrategy[np.ndarray]:
    return hnp.arrays(np.float32, size, elements=st.sampled_from([0.0, 0.03125, 0.0625, 0.125, 0.5, 1.0, 3.5]))


@given(st.integers(1, 8), st.sampled_from([0.0, 0.03125, 0.1, 0.5, 2.0, 100.0]), st.data())
def test_entropy_bound_takes_as_many_as_any_set_within_the_bound_could(
    size: int, bound: float, data: st.DataObject
) -> None:
    canvas = blank(2, size, size)
    candidates = proposal(canvas, entropy=data.draw(entropies(size)))
    value = dict(zip(candidates.positions.tolist(), map(float, candidates.entropy), strict=True))
    taken = chosen_by(EntropyBound(bound=bound), canvas, candidates)
    sets = [s for n in range(1, size + 1) for s in itertools.combinations(value, n)]
    allowed = [s for s in sets if sum(map(value.__getitem__, s)) - max(map(value.__getitem__, s)) <= bound]
    assert len(taken) == max(map(len, allowed))
    assert taken == set(sorted(value, key=lambda p: (value[p], p))[: len(taken)])


@given(st.integers(1, 30), st.data())
def test_a_bound_of_nothing_takes_one_or_what_is_certain(size: int, data: st.DataObject) -> None:
    """One more than the certain ones: of the sum its own entropy is left out."""
    canvas = blank(2, size, size)
    candidates = proposal(canvas, entropy=data.draw(entropies(size)))
    certain = int((candidates.entropy == 0).sum())
    taken = chosen_by(EntropyBound(bound=0.0), canvas, candidates)
    assert len(taken) == min(size, certain + 1)


# --- random ---


@given(st.integers(1, 9), st.integers(1, 40), st.integers(1, 40), st.integers(0, 2**64 - 1), st.data())
def test_the_random_order_depends_on_seed_and_block_alone(
    prompt: int, new: int, block: int, seed: int, data: st.DataObject
) -> None:
    canvas, longer = blank(prompt, new, block), blank(prompt + 3, new, block)
    while canvas.block_start < canvas.size:
        inside = np.arange(canvas.block_start, canvas.block_end)
        order = random_order(canvas, seed)
        assert sorted(order.tolist()) == inside.tolist(), "a permutation of the block"
        assert (random_order(longer, seed) - 3).tolist() == order.tolist(), "wherever the prompt ends"
        first = data.draw(st.lists(st.sampled_from(inside.tolist()), unique=True, max_size=len(inside) - 1))
        if first:
            canvas.count_forward()
            canvas.commit(np.array(first), np.zeros(len(first), np.int64))
            assert random_order(canvas, seed).tolist() == order.tolist(), "whatever is committed"
        for c, offset in ((canvas, 0), (longer, 3)):
            rest = c.block_masked()
            c.count_forward()
            c.commit(rest, np.full(len(rest), 5 + offset))


def test_random_orders_of_other_seeds_and_blocks_differ() -> None:
    canvas = blank(4, 64, 32)
    orders = [tuple((random_order(canvas, seed) - canvas.block_start).tolist()) for seed in range(50)]
    canvas.count_forward()
    canvas.commit(canvas.block_masked(), np.zeros(32, np.int64))
    orders += [tuple((random_order(canvas, seed) - canvas.block_start).tolist()) for seed in range(50)]
    assert len(set(orders)) == 100
    firsts = np.bincount([order[0] for order in orders], minlength=32)
    assert firsts.max() <= 12, "each position comes first about as often"


@given(st.integers(1, 50), st.integers(1, 60), st.integers(0, 70), st.integers(0, 999))
def test_random_follows_schedule_and_order_and_no_confidence(length: int, block: int, steps: int, seed: int) -> None:
    canvas, rng = blank(3, length, block), np.random.default_rng(seed)
    policy = Random(steps=steps, seed=seed)
    for of_block in block_counts(length, min(block, length), steps):
        order = random_order(canvas, seed).tolist()
        for count in of_block:
            candidates = proposal(canvas, rng.random(len(canvas.block_masked())))
            canvas.count_forward()
            taken = chosen_by(policy, canvas, candidates)
            assert taken == set(order[:count])
            order = order[count:]
            canvas.commit(np.array(sorted(taken)), np.zeros(len(taken), np.int64))
        assert not order
    assert canvas.block_start == canvas.size


# --- early commit ---


@dataclass(frozen=True)
class Told:
    """A base that commits the leftmost, and says what it was shown."""

    shown: list[list[int]]
    whole_canvas: bool = False

    def draft(self, canvas: Canvas) -> np.ndarray:
        return canvas.tokens[:0]

    def choose(self, canvas: Canvas, candidates: Candidates) -> np.ndarray:
        self.shown.append(candidates.positions.tolist())
        return np.arange(len(candidates.positions)) == 0


def early(shown: list[list[int]], **options: float) -> EarlyCommit:
    return EarlyCommit(base=Told(shown), **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("steps", [0, 3, 10, 100])
def test_early_commit_asks_for_less_as_steps_go_by(steps: int) -> None:
    total = steps or 30
    for step in range(1, total + 1):
        progress = step / total
        needed = 7.5 if progress < 0.33 else 5.0 if progress < 0.67 else 2.5
        for gap, expected in ((needed, True), (np.nextafter(np.float32(needed), np.float32(0)), False)):
            canvas = blank(2, 30, 10)
            canvas.step = step
            shown: list[list[int]] = []
            taken = chosen_by(early(shown, steps=steps), canvas, proposal(canvas, gap=np.full(10, gap)))
            assert taken == (set(range(2, 12)) if expected else {2})
            assert bool(shown) != expected


def test_early_commit_judges_the_mean() -> None:
    canvas = blank(2, 4, 4)
    canvas.count_forward()
    for gaps, taken in (([30, 0, 0, 0], 4), ([29, 0, 0, 0], 1), ([7.5, 7.5, 7.5, 7.5], 4), ([7, 8, 7, 7.9], 1)):
        candidates = proposal(canvas, gap=np.array(gaps, dtype=float))
        assert len(chosen_by(early([], steps=10), canvas, candidates)) == taken


def test_mistakes_are_counted_where_little_decides() -> None:
    """A gap of 0 is an even chance, and none that is sure makes up for it."""
    canvas = blank(2, 4, 4)
    canvas.count_forward()
    for gaps, mistakes, taken in (
        ([0, 1000, 1000, 1000], 0.5, 4),
        ([0, 1000, 1000, 1000], 0.49, 1),
        ([0, 0, 1000, np.inf], 1.0, 4),
        ([0, 0, 0.1, np.inf], 1.0, 1),
        ([math.log(9)] * 4, 0.41, 4),
        ([math.log(9)] * 4, 0.39, 1),
    ):
        candidates = proposal(canvas, gap=np.array(gaps, dtype=float))
        assert len(chosen_by(early([], mistakes=mistakes, **NEVER), canvas, candidates)) == taken, gaps


@given(st.integers(0, 14), st.integers(1, 20), st.sets(st.integers(2, 11), max_size=8), st.data())
def test_an_answer_region_is_judged_by_all_its_positions_and_commits_all(
    start: int, length: int, final: set[int], data: st.DataObject
) -> None:
    """Twelve new tokens in blocks of four; ``final`` are so already, and a pass shows the gaps of some of them."""
    assume(start < 12)
    canvas = blank(2, 12, 4)
    canvas.count_forward()
    if final:
        canvas.commit(np.array(sorted(final)), np.zeros(len(final), np.int64))
        canvas.count_forward()
    masked = canvas.all_masked()
    shown: list[list[int]] = []
    policy = early(shown, early=4.0, middle=4.0, late=4.0, answer_start=start, answer_length=length)
    assert policy.whole_canvas
    also_scored = policy.also_scored(canvas)
    answer = list(range(2 + start, min(2 + start + length, 14)))
    assert also_scored.tolist() == [p for p in answer if p in final]
    run = data.draw(st.sets(st.sampled_from(also_scored.tolist()))) if len(also_scored) else set()
    positions = np.array(sorted({*masked.tolist(), *run}))
    gaps = data.draw(hnp.arrays(np.float32, len(positions), elements=st.sampled_from([0.0, 2.0, 10.0])))
    taken = chosen_by(policy, canvas, proposal(canvas, gap=gaps, positions=positions))
    of_answer = [float(g) for p, g in zip(positions.tolist(), gaps, strict=True) if p in answer]
    if of_answer and sum(of_answer) / len(of_answer) >= 4.0:
        assert taken == set(masked.tolist())
    else:
        block = canvas.block_masked().tolist()
        assert shown == [block], "the base sees the open positions of its block and no more"
        assert taken == {block[0]}


@pytest.mark.parametrize("mistakes", [0.0, 0.5])
def test_a_final_answer_is_sure_only_if_no_mistake_is_expected_of_it(mistakes: float) -> None:
    """The mean of no gap is no mean; of no open position, none is expected to be wrong."""
    canvas = blank(2, 8, 4)
    canvas.count_forward()
    canvas.commit(np.array([2, 3]), np.zeros(2, np.int64))
    canvas.count_forward()
    policy = early([], mistakes=mistakes, **NEVER, answer_length=2)
    everything = proposal(canvas, positions=canvas.all_masked(), gap=np.full(6, 50.0))
    assert chosen_by(policy, canvas, everything) == (set(range(4, 10)) if mistakes else {4})


def test_without_an_answer_region_only_the_block_is_committed() -> None:
    canvas = blank(2, 12, 4)
    canvas.count_forward()
    policy = early([])
    assert not policy.whole_canvas
    assert chosen_by(policy, canvas, proposal(canvas, gap=np.full(4, 50.0))) == {2, 3, 4, 5}


@pytest.mark.parametrize("region", [{}, {"answer_length": 8}])
def test_what_is_behind_an_end_of_text_is_no_answer(region: dict[str, int]) -> None:
    """Padding is sure: with it among the answer, the mean would be."""
    policy = EarlyCommit(base=LowConfidence(), ends=frozenset({7, 9}), early=5.0, middle=5.0, late=5.0, **region)
    for gaps, final, sure in (
        ([6, 4, 5, 99], False, True),  # the mean with the end's own gap, which is of the answer
        ([6, 3, 5, 99], False, False),
        ([6, 3, 9, 99], True, False),  # the end is final: only what is open in front of it counts
        ([6, 4, 0, 0], True, True),
    ):
        canvas = blank(2, 8, 4)
        canvas.count_forward()
        positions = canvas.all_masked() if region else canvas.block_masked()
        tokens = np.array([1, 1, 9, 7, 1, 1, 1, 1])[: len(positions)]
        full = proposal(canvas, positions=positions, tokens=tokens, gap=np.resize(gaps, len(positions)).astype(float))
        kept = np.ones(len(positions), dtype=bool)
        if final:
            canvas.commit(np.array([4]), np.array([9]))
            canvas.count_forward()
            kept[2] = False
        taken = chosen_by(policy, canvas, full.where(kept))
        assert (taken == set(positions[kept].tolist())) == sure


def test_an_answer_that_was_not_run_is_in_doubt() -> None:
    canvas = blank(2, 12, 4)
    canvas.count_forward()
    policy = early([], answer_start=3, answer_length=2)  # positions 5 and 6; 6 is of the next block
    candidates = proposal(canvas, gap=np.full(4, 50.0), positions=canvas.block_masked())
    assert chosen_by(policy, canvas, candidates) == {2}


def test_an_answer_past_the_canvas_makes_nothing_sure() -> None:
    canvas = blank(2, 12, 4)
    canvas.count_forward()
    policy = early([], **NEVER, answer_start=12, answer_length=4)
    assert chosen_by(policy, canvas, proposal(canvas, positions=canvas.all_masked())) == {2}


def test_an_answer_that_stood_there_before_the_first_pass_makes_nothing_sure() -> None:
    for stood, taken in ((range(8, 14), {2}), (range(9, 14), set(range(2, 9)))):
        canvas = blank(2, 12, 4)
        canvas.commit(np.array(stood), np.full(len(stood), 9))
        canvas.count_forward()
        policy = early([], early=5.0, answer_start=6, answer_length=4)
        positions = canvas.all_masked()
        assert (
            chosen_by(policy, canvas, proposal(canvas, positions=positions, gap=np.full(len(positions), 9.0))) == taken
        )


# --- numbers that are refused ---


@pytest.mark.parametrize(
    ("make", "name", "values"),
    [
        (Threshold, "confidence", [0.0, -0.5, math.nan, math.inf, -math.inf]),
        (Factor, "factor", [0.0, -1.0, math.nan, math.inf, -math.inf]),
        (Confident, "confidence", [0.0, -0.5, 1.01, math.nan, math.inf, -math.inf]),
        (EntropyBound, "bound", [-1e-9, -1.0, math.nan, math.inf, -math.inf]),
    ],
)
def test_numbers_that_make_no_sense_are_refused(make: type, name: str, values: list[float]) -> None:
    for value in values:
        with pytest.raises(ValueError, match=name):
            make(**{name: value})


@pytest.mark.parametrize("mistakes", [-0.1, math.nan, -math.inf])
def test_mistakes_must_be_a_number_of_tokens(mistakes: float) -> None:
    with pytest.raises(ValueError, match="mistakes"):
        EarlyCommit(base=LowConfidence(), mistakes=mistakes)


@pytest.mark.parametrize("options", [{"early": math.nan}, {"middle": math.nan}, {"late": math.nan}])
def test_gaps_must_be_numbers(options: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="must be a number"):
        EarlyCommit(base=LowConfidence(), **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("options", [{"answer_start": -1}, {"answer_length": -1}])
def test_an_answer_region_is_not_negative(options: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="at least 0"):
        EarlyCommit(base=LowConfidence(), **options)  # type: ignore[arg-type]


# --- every pair ---


def made(name: str, steps: int, seed: int) -> list[Commit]:
    """The policy with numbers that matter among uniform random candidates."""
    if name == "low_confidence":
        return [LowConfidence(steps=steps)]
    if name == "random":
        return [Random(steps=steps, seed=seed)]
    if name == "confident":
        return [Confident(confidence=0.8, steps=steps), Confident(confidence=1.0, steps=steps)]
    if name == "early_commit":
        gaps = {"early": 0.9, "middle": 0.7, "late": 0.6, "steps": steps}
        bases = [LowConfidence(steps=steps), Random(steps=steps, seed=seed), Threshold(confidence=0.8)]
        return [
            EarlyCommit(base=base, **gaps, answer_start=start, answer_length=length)  # type: ignore[arg-type]
            for base, (start, length) in zip(bases, [(0, 0), (0, 3), (2, 99)], strict=True)
        ]
    return [COMMIT[name](**{"threshold": {"confidence": 0.8}, "factor": {"factor": 1.5}}.get(name, {"bound": 0.6}))]


def recomputes(name: str, steps: int, seed: int) -> list[Recompute]:
    if name == "dkv_greedy":
        return [RECOMPUTE[name](refresh=r, window=w, steps=steps, seed=seed) for r, w in ((2, 4), (5, 0), (99, 1))]
    return [RECOMPUTE[name](**({"refresh": 3} if name == "dkv_decode" else {}))]


def decode(canvas: Canvas, recompute: Recompute, commit: Commit, rng: np.random.Generator) -> int:
    """The loop with random candidates at the masked positions that each step runs; the number of its passes."""
    while canvas.block_start < canvas.size:
        rows = recompute.rows(canvas) if canvas.step else np.arange(canvas.size)
        assert (np.diff(rows) > 0).all() and rows[0] >= 0 and rows[-1] < canvas.size
        wanted = canvas.all_masked() if commit.whole_canvas else canvas.block_masked()
        positions = wanted[np.isin(wanted, rows)]
        numbers = rng.random((3, len(positions)))
        candidates = proposal(canvas, numbers[0], gap=numbers[1], entropy=numbers[2], positions=positions)
        canvas.count_forward()
        chosen = commit.choose(canvas, candidates)
        assert chosen.any(), "a step must commit something"
        canvas.commit(positions[chosen], candidates.tokens[chosen])
        assert canvas.step <= canvas.new_tokens
    assert not (canvas.committed_at == MASKED).any()
    return canvas.step


@pytest.mark.parametrize("commit", COMMITS)
@pytest.mark.parametrize("recompute", RECOMPUTES)
@settings(max_examples=5)
@given(
    length=st.integers(1, 30),
    block=st.integers(1, 30),
    steps=st.one_of(st.just(0), st.integers(1, 40)),
    seed=st.integers(0, 2**32),
)
def test_every_pair_commits_at_each_step_and_ends_in_time(
    recompute: str, commit: str, length: int, block: int, steps: int, seed: int
) -> None:
    planned = sum(map(len, block_counts(length, min(block, length), steps)))
    assert planned <= max(steps or length, -(-length // block))
    for how in recomputes(recompute, steps, seed):
        for which in made(commit, steps, seed):
            base = which.base if isinstance(which, EarlyCommit) else which
            forwards = decode(blank(3, length, block), how, which, np.random.default_rng(seed))
            if isinstance(base, LowConfidence | Random):
                assert forwards <= planned if isinstance(which, EarlyCommit) else forwards == planned
