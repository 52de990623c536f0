"""The canvas: a position is committed once, blocks advance from left to right, and the answer is what is final."""

from __future__ import annotations

import numpy as np
import pytest
from helpers import blank
from hypothesis import assume, given
from hypothesis import strategies as st

from mmserve.core.canvas import MASKED, PROMPT, Canvas

MASK = 3


@st.composite
def filled(draw: st.DrawFn, *, by_block: bool = False) -> tuple[Canvas, list[tuple[list[int], list[int]]]]:
    """An empty canvas and a sequence of commits (positions, tokens) that fills a part of it, in any order."""
    prompt, new = draw(st.integers(0, 5)), draw(st.integers(1, 24))
    canvas = blank(prompt, new, draw(st.integers(1, 30)), mask_id=MASK)
    order = draw(st.permutations(range(prompt, prompt + new)))
    if by_block:
        order = sorted(order, key=lambda p: (p - prompt) // canvas.block_length)
    tokens = draw(st.lists(st.integers(0, 12), min_size=new, max_size=new))
    commits = []
    at = 0
    while at < new:
        size = draw(st.integers(1, 5))
        commits.append((list(order[at : at + size]), tokens[at : at + size]))
        at += size
    return canvas, commits[: draw(st.integers(0, len(commits)))]


def test_a_new_canvas_is_its_prompt_and_masks() -> None:
    canvas = Canvas.create(np.array([7, 8]), new_tokens=5, block_length=2, mask_id=MASK)
    assert canvas.tokens.tolist() == [7, 8, 3, 3, 3, 3, 3]
    assert canvas.committed_at.tolist() == [PROMPT] * 2 + [MASKED] * 5
    assert (canvas.size, canvas.new_tokens, canvas.step, canvas.block_step) == (7, 5, 0, 0)
    assert (canvas.block_start, canvas.block_end) == (2, 4)
    assert canvas.block_masked().tolist() == [2, 3]
    assert canvas.masked.tolist() == [False] * 2 + [True] * 5


def test_a_block_longer_than_the_answer_is_the_answer() -> None:
    canvas = blank(3, 5, 64)
    assert (canvas.block_length, canvas.block_end) == (5, 8)


def test_creating_a_canvas_leaves_the_prompt_array_alone() -> None:
    prompt = np.array([7, 8, 9])
    canvas = Canvas.create(prompt, new_tokens=2, block_length=2, mask_id=MASK)
    canvas.tokens[:] = 0
    assert prompt.tolist() == [7, 8, 9]


@given(filled())
def test_committed_tokens_never_change_and_each_carries_its_step(case: tuple) -> None:
    canvas, commits = case
    final: dict[int, tuple[int, int]] = {}
    for positions, tokens in commits:
        canvas.count_forward()
        canvas.commit(np.array(positions), np.array(tokens))
        final.update({p: (t, canvas.step) for p, t in zip(positions, tokens, strict=True)})
        for position in range(canvas.prompt_length, canvas.size):
            if position in final:
                assert (canvas.tokens[position], canvas.committed_at[position]) == final[position]
            else:
                assert (canvas.tokens[position], canvas.committed_at[position]) == (MASK, MASKED)
    assert canvas.tokens[: canvas.prompt_length].tolist() == list(range(100, 100 + canvas.prompt_length))


@given(filled(), st.data())
def test_a_committed_position_or_the_prompt_cannot_be_committed_again(case: tuple, data: st.DataObject) -> None:
    canvas, commits = case
    for positions, tokens in commits:
        canvas.commit(np.array(positions), np.array(tokens))
    taken = np.flatnonzero(~canvas.masked)
    assume(len(taken))
    before = canvas.tokens.copy()
    again = data.draw(st.sampled_from(taken.tolist()))
    with pytest.raises(ValueError, match="again"):
        canvas.commit(np.array([again]), np.array([999]))
    assert canvas.tokens.tolist() == before.tolist()


@given(filled())
def test_the_block_is_the_first_one_with_a_mask(case: tuple) -> None:
    canvas, commits = case
    blocks = range(canvas.prompt_length, canvas.size, canvas.block_length)
    for positions, tokens in commits:
        canvas.count_forward()
        before = canvas.block_start
        canvas.commit(np.array(positions), np.array(tokens))
        masked = set(np.flatnonzero(canvas.masked).tolist())
        open_blocks = [b for b in blocks if masked & set(range(b, min(b + canvas.block_length, canvas.size)))]
        assert canvas.block_start == (open_blocks[0] if open_blocks else canvas.size)
        assert canvas.block_end == min(canvas.block_start + canvas.block_length, canvas.size)
        assert canvas.block_masked().tolist() == sorted(p for p in masked if p < canvas.block_end)
        if canvas.block_start != before:
            assert canvas.block_step == 0


@given(filled(by_block=True))
def test_block_steps_count_the_forwards_of_the_block_alone(case: tuple) -> None:
    canvas, commits = case
    forwards: dict[int, int] = {}
    for index, (positions, tokens) in enumerate(commits):
        canvas.count_forward()
        block = canvas.block_start
        forwards[block] = forwards.get(block, 0) + 1
        assert (canvas.step, canvas.block_step) == (index + 1, forwards[block])
        canvas.commit(np.array(positions), np.array(tokens))


@given(filled(), st.sets(st.integers(0, 12), max_size=3))
def test_known_and_answer_agree_with_a_naive_reading(case: tuple, ends: set[int]) -> None:
    canvas, commits = case
    for positions, tokens in [([], []), *commits]:
        if positions:
            canvas.commit(np.array(positions), np.array(tokens))
        row = list(zip(canvas.tokens.tolist(), canvas.masked.tolist(), strict=True))
        left: list[int] = []
        for token, masked in row[canvas.prompt_length :]:
            if masked:
                break
            left.append(token)
        assert canvas.known() == canvas.prompt_length + len(left)
        ended = [i for i, token in enumerate(left) if token in ends]
        expected = (left[: ended[0]], True) if ended else (left, len(left) == canvas.new_tokens)
        answer, complete = canvas.answer(ends)
        assert (answer.tolist(), complete) == expected
