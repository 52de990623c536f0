"""Recompute policies against their definition, step by step, over random canvases and commit orders."""

from __future__ import annotations

import numpy as np
import pytest
from helpers import blank
from hypothesis import given
from hypothesis import strategies as st

from mmserve.core.canvas import Canvas
from mmserve.decode.recompute import BLOCK_CAUSAL_ATTENTION, CAUSAL_ATTENTION, FULL_ATTENTION, RECOMPUTE, Recompute
from mmserve.decode.recompute.dkv_decode import DkvDecode
from mmserve.decode.recompute.last import Last
from mmserve.decode.recompute.none import NoCache


@st.composite
def decodings(draw: st.DrawFn) -> tuple[Canvas, list[int], list[int]]:
    """A canvas, the order in which each block's positions become known, and how many each step makes known."""
    canvas = blank(draw(st.integers(1, 6)), draw(st.integers(1, 40)), draw(st.integers(1, 24)))
    order = draw(st.permutations(range(canvas.prompt_length, canvas.size)))
    return canvas, order, draw(st.lists(st.integers(1, 4), min_size=40, max_size=40))


def run(canvas: Canvas, order: list[int], counts: list[int], policy: Recompute) -> list[tuple[int, set[int], set[int]]]:
    """Decode as the loop does; per step its number within the block, the rows run, and the positions masked before."""
    steps = []
    for count in counts:
        if canvas.block_start == canvas.size:
            break
        rows = policy.rows(canvas)
        assert (np.diff(rows) > 0).all(), "rows must ascend"
        steps.append((canvas.block_step, set(rows.tolist()), set(np.flatnonzero(canvas.masked).tolist())))
        canvas.count_forward()
        chosen = [p for p in order if p in set(canvas.block_masked().tolist())][:count]
        canvas.commit(np.array(chosen), np.zeros(len(chosen), np.int64))
    return steps


@given(decodings(), st.integers(1, 9))
def test_dkv_decode_runs_what_its_definition_says(case: tuple, refresh: int) -> None:
    """METHODS: T_i = known after step i of a block; step i runs the positions outside T_(i-2), or all of them."""
    canvas, order, counts = case
    everything = set(range(canvas.size))
    known_after: list[set[int]] = []  # T_0, T_1, … of the current block
    steps = run(canvas, order, counts, DkvDecode(refresh=refresh))
    for at, (i, rows, masked) in enumerate(steps):
        if i == 0:
            known_after = []
        assert i == len(known_after), "the cache starts anew with each block"
        if i in (0, 1) or i % refresh == 0:
            assert rows == everything
        else:
            assert rows == everything - known_after[i - 2]
            decoded_last = known_after[i - 1] - known_after[i - 2]
            assert decoded_last
            assert rows == masked | decoded_last
        # T_i: what is no longer masked when the next step begins.
        known_after.append(everything - steps[at + 1][2] if at + 1 < len(steps) else everything)


@given(decodings(), st.integers(1, 9))
def test_every_entry_that_dkv_decode_reads_was_written_while_its_token_was_known(case: tuple, refresh: int) -> None:
    """What is not run is read from the store: never the K/V of a mask that has become a token since."""
    canvas, order, counts = case
    written_with_mask: dict[int, bool] = {}
    for _i, rows, masked in run(canvas, order, counts, DkvDecode(refresh=refresh)):
        for position in set(range(canvas.size)) - rows:
            assert written_with_mask[position] is False
            assert position not in masked
        written_with_mask.update({position: position in masked for position in rows})


@given(decodings(), st.sampled_from([name for name in FULL_ATTENTION if name not in ("dual", "dkv_greedy")]))
def test_every_masked_position_is_run(case: tuple, name: str) -> None:
    """By all but the two whose sense it is to run few of them: see ``test_policies_recompute``."""
    canvas, order, counts = case
    for _i, rows, masked in run(canvas, order, counts, RECOMPUTE[name]()):
        assert masked
        assert masked <= rows


@given(decodings(), st.sampled_from(FULL_ATTENTION))
def test_a_block_begins_with_all_of_it_and_each_step_runs_something_masked_of_it(case: tuple, name: str) -> None:
    canvas, order, counts = case
    block: set[int] = set()
    for i, rows, masked in run(canvas, order, counts, RECOMPUTE[name]()):
        if i == 0:
            start = min(masked)
            block = set(range(start, start + canvas.block_length)) & masked
            assert block <= rows
        assert rows & masked & block


@given(st.integers(1, 6), st.integers(1, 20))
def test_last_runs_the_token_committed_at_the_step_before(prompt: int, new: int) -> None:
    """From left to right in blocks of one: each step after prefill runs the newest token and nothing else."""
    canvas = blank(prompt, new, 1)
    canvas.count_forward()
    for position in range(prompt, canvas.size):
        canvas.commit(np.array([position]), np.array([7]))
        assert Last().rows(canvas).tolist() == [position]
        canvas.count_forward()


def test_every_policy_is_for_some_attention() -> None:
    assert set(RECOMPUTE) == {*FULL_ATTENTION, *BLOCK_CAUSAL_ATTENTION, *CAUSAL_ATTENTION}


@given(decodings())
def test_refresh_one_and_no_cache_run_everything(case: tuple) -> None:
    canvas, order, counts = case
    for _i, rows, _masked in run(canvas, order, counts, DkvDecode(refresh=1)):
        assert rows == set(range(canvas.size))
    assert NoCache().rows(canvas).tolist() == list(range(canvas.size))


def test_dkv_decode_saves_most_of_the_work() -> None:
    canvas = blank(40, 32, 32)
    steps = run(canvas, list(range(canvas.prompt_length, canvas.size)), [1] * 32, DkvDecode())
    full = [i for i, rows, _masked in steps if len(rows) == canvas.size]
    assert full == [0, 1, 8, 16, 24]
    assert all(len(rows) <= 33 for i, rows, _masked in steps if i not in full)


@pytest.mark.parametrize("refresh", [0, -1])
def test_a_refresh_below_one_is_refused(refresh: int) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        DkvDecode(refresh=refresh)
