"""Early commit behind a text: where the answer begins, and what is committed before and after it is found."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from helpers import blank, proposal, tokenizer
from hypothesis import given
from hypothesis import strategies as st

from mmserve.core.canvas import Canvas
from mmserve.decode.commit.early_commit import EarlyCommit
from mmserve.decode.commit.low_confidence import LowConfidence
from mmserve.decode.text import speller

#: Tokens of a made-up tokenizer; some hold the end of the text and what follows it, or what stands before it.
PIECES = ["", "The ", "an", "An", "swer", "Answer", ":", " is", "er: 4", ": 7", "n. Answer:", "x"]
ALWAYS = {"early": -math.inf, "middle": -math.inf, "late": -math.inf}


def spell(tokens: np.ndarray) -> str:
    return "".join(PIECES[t] for t in tokens)


def early(text: str = "Answer:", **options: float) -> EarlyCommit:
    return EarlyCommit(base=LowConfidence(), answer_after=text, spell=spell, **{**ALWAYS, **options})  # type: ignore[arg-type]


def canvas_of(block: int, *tokens: int) -> Canvas:
    """A canvas whose prompt is two ``x`` and whose generated tokens are these; 0 is masked."""
    canvas = Canvas.create(np.array([11, 11]), new_tokens=len(tokens), block_length=block, mask_id=0)
    canvas.count_forward()
    row = np.array(tokens)
    places = np.flatnonzero(row)
    if len(places):
        canvas.commit(places + 2, row[places])
        canvas.count_forward()
    return canvas


def committed(policy: EarlyCommit, canvas: Canvas, gap: np.ndarray | None = None) -> list[int]:
    """Generated positions that become final, counted from 0."""
    wanted = canvas.all_masked() if policy.whole_canvas else canvas.block_masked()
    chosen = policy.choose(canvas, proposal(canvas, positions=wanted, gap=gap))
    return (wanted[chosen] - canvas.prompt_length).tolist()


@pytest.mark.parametrize(
    ("tokens", "behind"),
    [
        ((5, 6, 0, 0), 2),
        ((3, 4, 6, 0), 3),
        ((1, 5, 9, 0), 3),  # ": 7": the answer has begun in the token that ends the text
        ((3, 4, 0, 0), None),
        ((5, 0, 6, 0), None),  # not next to one another
        ((0, 5, 6, 0), 3),  # nothing to its left need be final
        ((10, 0, 0, 0), 1),
        ((5, 6, 5, 6, 0, 0), 2),  # the first of two
        ((2, 0, 5, 6, 0, 0), 4),
        ((0, 0, 0, 0), None),
    ],
)
def test_the_answer_begins_behind_the_token_that_completes_the_text(tokens: tuple[int, ...], behind: int) -> None:
    canvas = canvas_of(len(tokens), *tokens)
    policy = early()
    found = policy._answer_begin(canvas) - canvas.prompt_length
    assert found == (len(tokens) if behind is None else behind)
    everything = [i for i, t in enumerate(tokens) if t == 0]
    if behind is not None:
        assert committed(policy, canvas) == everything
    else:
        assert len(committed(policy, canvas)) == 1, "the base goes on"


def test_the_prompt_does_not_count() -> None:
    canvas = Canvas.create(np.array([5, 6]), new_tokens=4, block_length=4, mask_id=0)
    canvas.count_forward()
    assert len(committed(early(), canvas)) == 1


def test_only_positions_behind_the_text_are_judged() -> None:
    canvas = canvas_of(6, 0, 5, 6, 0, 0, 0)
    sure = {"early": 5.0, "middle": 5.0, "late": 5.0}
    assert committed(early(**sure), canvas, np.array([0.0, 6, 4, 5])) == [0, 3, 4, 5]
    assert len(committed(early(**sure), canvas, np.array([99.0, 6, 3, 5]))) == 1
    assert committed(early(**sure, answer_length=1), canvas, np.array([0.0, 6, 0, 0])) == [0, 3, 4, 5]


def test_without_a_length_only_the_block_is_committed_and_the_next_is_judged_by_itself() -> None:
    first = canvas_of(4, 5, 6, 0, 0, 0, 0, 0, 0)
    assert not early().whole_canvas
    assert committed(early(), first) == [2, 3]
    second = canvas_of(4, 5, 6, 11, 11, 0, 0, 0, 0)
    never = {"early": 5.0, "middle": 5.0, "late": 5.0}
    assert committed(early(), second) == [4, 5, 6, 7]
    assert len(committed(early(**never), second, np.array([9.0, 0, 0, 0]))) == 1, "all of it is behind the text"


def test_a_text_at_the_end_of_its_block_waits_for_the_next() -> None:
    ends_block = canvas_of(4, 0, 0, 5, 6, 0, 0, 0, 0)
    assert len(committed(early(), ends_block)) == 1
    assert committed(early(answer_length=2), ends_block) == [0, 1, 4, 5, 6, 7], "with a length it may lie there"


def test_a_text_at_the_end_of_the_canvas_has_no_answer_behind_it() -> None:
    for options in ({}, {"answer_length": 3}):
        assert len(committed(early(**options), canvas_of(4, 0, 0, 5, 6))) == 1


def test_it_cannot_begin_in_two_places_or_be_looked_for_without_a_tokenizer() -> None:
    with pytest.raises(ValueError, match="answer_start must be 0"):
        early(answer_start=1)
    blind = EarlyCommit(base=LowConfidence(), answer_after="x")
    with pytest.raises(ValueError, match="tokenizer"):
        committed(blind, canvas_of(2, 5, 0))


TEXT = st.text(alphabet="Answer: 47\nü€", max_size=12)


@given(TEXT, TEXT, st.sets(st.integers(0, 40), max_size=6))
def test_it_is_found_however_the_models_tokenizer_cut_it(before: str, after: str, cuts: set[int]) -> None:
    """Tokens of pieces cut anywhere: within the text, or across where the answer begins."""
    whole = f"{before}Answer:{after}"
    edges = sorted({0, len(whole), *(c for c in cuts if c < len(whole))})
    pieces = [whole[a:b] for a, b in itertools.pairwise(edges)]
    tokens = [t for piece in pieces for t in tokenizer().encode(piece, add_special_tokens=False)]
    canvas = blank(2, len(tokens) + 2, len(tokens) + 2)
    canvas.commit(np.arange(2, len(tokens) + 2), np.array(tokens))
    policy = EarlyCommit(base=LowConfidence(), answer_after="Answer:", spell=speller(tokenizer()))
    found = policy._answer_begin(canvas) - 2
    assert "Answer:" in tokenizer().decode(tokens[:found])
    assert "Answer:" not in tokenizer().decode(tokens[: found - 1])
