"""The newer recompute policies against their definitions, step by step, over random canvases and commit orders."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from helpers import blank
from hypothesis import given
from hypothesis import strategies as st
from plain_decoding import block_counts

from mmserve.core.canvas import Canvas
from mmserve.decode.pace import random_order
from mmserve.decode.recompute import RECOMPUTE, Recompute
from mmserve.decode.recompute.dkv_greedy import DkvGreedy
from mmserve.decode.recompute.dual import Dual
from mmserve.decode.recompute.free_cache import FreeCache
from mmserve.decode.recompute.prefix import Prefix

NAMES = ("none", "prefix", "dual", "dkv_decode", "dkv_greedy", "free_cache")
#: Block step, block start, block end, rows run, positions masked before, positions that became final after.
Pass = tuple[int, int, int, set[int], set[int], set[int]]


@st.composite
def decodings(draw: st.DrawFn) -> tuple[Canvas, list[int], list[int]]:
    """A canvas, an order for its positions, and how many each step makes final."""
    canvas = blank(draw(st.integers(1, 6)), draw(st.integers(1, 32)), draw(st.integers(1, 20)))
    order = draw(st.permutations(range(canvas.prompt_length, canvas.size)))
    return canvas, order, draw(st.lists(st.integers(1, 4), min_size=32, max_size=32))


def run(canvas: Canvas, order: list[int], counts: list[int], policy: Recompute) -> list[Pass]:
    """Decode as the loop does, of the positions that were run the first in ``order``."""
    steps = []
    for count in counts:
        if canvas.block_start == canvas.size:
            break
        rows = policy.rows(canvas)
        assert (np.diff(rows) > 0).all(), "rows must ascend"
        before = set(np.flatnonzero(canvas.masked).tolist())
        where = (canvas.block_step, canvas.block_start, canvas.block_end)
        canvas.count_forward()
        open_here = set(canvas.block_masked().tolist()) & set(rows.tolist())
        assert open_here, "something that can be committed is run"
        chosen = [p for p in order if p in open_here][:count]
        canvas.commit(np.array(chosen), np.zeros(len(chosen), np.int64))
        steps.append((*where, set(rows.tolist()), before, set(chosen)))
    return steps


@given(decodings())
def test_prefix_runs_everything_once_a_block_and_then_from_the_block_on(case: tuple) -> None:
    size = case[0].size
    for i, start, _end, rows, _masked, _final in run(*case, Prefix()):
        assert rows == set(range(0 if i == 0 else start, size))


@given(decodings())
def test_dual_runs_everything_once_a_block_and_then_the_block(case: tuple) -> None:
    size = case[0].size
    for i, start, end, rows, _masked, _final in run(*case, Dual()):
        assert rows == (set(range(size)) if i == 0 else set(range(start, end)))


@given(decodings())
def test_free_cache_runs_everything_once_and_then_from_the_block_on(case: tuple) -> None:
    size = case[0].size
    for at, (_i, start, _end, rows, _masked, _final) in enumerate(run(*case, FreeCache())):
        assert rows == set(range(start if at else 0, size))


@given(decodings(), st.sampled_from(["none", "prefix", "dkv_decode", "free_cache"]))
def test_these_run_every_masked_position(case: tuple, name: str) -> None:
    for _i, _start, _end, rows, masked, _final in run(*case, RECOMPUTE[name]()):
        assert masked <= rows


@given(decodings())
def test_dual_runs_every_masked_position_of_the_block(case: tuple) -> None:
    for _i, start, end, rows, masked, _final in run(*case, Dual()):
        assert masked & set(range(start, end)) <= rows


@given(decodings(), st.sampled_from(NAMES))
def test_what_was_just_decoded_is_run_once_more_unless_its_block_is_over(case: tuple, name: str) -> None:
    """Its key and value were those of a mask; FreeCache keeps them where they belong to a block's last step."""
    steps = run(*case, RECOMPUTE[name]())
    for (_i, start, _e, _r, _m, final), (_i2, start2, _e2, rows, _m2, _f2) in itertools.pairwise(steps):
        if start == start2 or name != "free_cache":
            assert final <= rows


# --- dKV-Cache-Greedy ---


def neighbours(rows: set[int], due: list[int], masked: set[int], size: int, window: int) -> set[int]:
    """``rows`` and, for each of ``due`` in turn, the nearest masked positions that are not among them, left first."""
    rows = set(rows)
    for p in due:
        free = [q for q in masked if q not in rows and 0 <= q < size]
        rows |= set(sorted(free, key=lambda q: (abs(q - p), q))[:window])
    return rows


@given(
    st.integers(1, 6),
    st.integers(1, 32),
    st.integers(1, 20),
    st.integers(0, 40),
    st.integers(1, 7),
    st.integers(0, 6),
    st.integers(0, 2**40),
)
def test_dkv_greedy_runs_what_is_due_what_was_decoded_and_neighbours(
    prompt: int, new: int, block: int, steps: int, refresh: int, window: int, seed: int
) -> None:
    canvas = blank(prompt, new, block)
    policy = DkvGreedy(refresh=refresh, window=window, steps=steps, seed=seed)
    for of_block in block_counts(new, min(block, new), steps):
        order, last = random_order(canvas, seed).tolist(), set()
        for i, count in enumerate(of_block):
            due, order = order[:count], order[count:]
            masked = set(canvas.all_masked().tolist())
            rows = set(policy.rows(canvas).tolist())
            if i % refresh == 0:
                assert rows == set(range(canvas.size))
            else:
                assert rows == neighbours({*due, *last}, due, masked, canvas.size, window)
                assert len(rows) <= len(due) * (1 + window) + len(last)
            canvas.count_forward()
            canvas.commit(np.array(due), np.zeros(len(due), np.int64))
            last = set(due)
        assert not order
    assert canvas.block_start == canvas.size


@given(decodings(), st.integers(1, 5), st.integers(0, 5), st.integers(0, 99))
def test_dkv_greedy_beside_another_commit_policy_still_runs_what_is_due_next(
    case: tuple, refresh: int, window: int, seed: int
) -> None:
    canvas, _order, _counts = case
    steps = 7
    due_of = []

    class Spied:
        def rows(self, canvas: Canvas) -> np.ndarray:
            counts = block_counts(canvas.new_tokens, canvas.block_length, steps)
            of_block = counts[(canvas.block_start - canvas.prompt_length) // canvas.block_length]
            done = canvas.block_step
            count = of_block[done] if done < len(of_block) - 1 else canvas.size
            due_of.append([p for p in random_order(canvas, seed).tolist() if canvas.masked[p]][:count])
            return DkvGreedy(refresh=refresh, window=window, steps=steps, seed=seed).rows(canvas)

    last: set[int] = set()
    done = run(*case, Spied())
    for due, (i, _start, _end, rows, masked, final) in zip(due_of, done, strict=True):
        if i % refresh:
            assert rows == neighbours({*due, *last}, due, masked, canvas.size, window)
        else:
            assert rows == set(range(canvas.size))
        last = final


def test_the_window_reaches_past_the_block_and_skips_what_is_known() -> None:
    canvas = blank(3, 12, 4)  # blocks 3-6, 7-10, 11-14
    order = random_order(canvas, 5).tolist()
    canvas.count_forward()
    canvas.commit(np.array(order[:2]), np.zeros(2, np.int64))
    rows = set(DkvGreedy(refresh=9, window=20, seed=5).rows(canvas).tolist())
    assert rows == set(range(3, 15)), "all masks of the canvas and what was decoded last, but no prompt"


@given(decodings(), st.integers(0, 9))
def test_dkv_greedy_with_refresh_one_runs_everything(case: tuple, window: int) -> None:
    for _i, _start, _end, rows, _masked, _final in run(*case, DkvGreedy(refresh=1, window=window)):
        assert rows == set(range(case[0].size))


@pytest.mark.parametrize("options", [{"refresh": 0}, {"refresh": -2}, {"window": -1}])
def test_numbers_of_dkv_greedy_that_make_no_sense_are_refused(options: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="at least"):
        DkvGreedy(**options)
