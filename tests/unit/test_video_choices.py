"""Shared beginnings of token sequences, and the probabilities of answers that begin alike."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmserve.video.choices import Choices
from mmserve.video.forest import Forest

sequences = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=5), min_size=1, max_size=8)


@given(sequences)
def test_each_node_of_a_forest_sees_its_own_path(rows: list[list[int]]) -> None:
    forest = Forest()
    ends = [forest.add(row) for row in rows]
    seen = forest.mask()
    for row, end in zip(rows, ends, strict=True):
        path = np.flatnonzero(seen[end])
        assert [forest.tokens[node] for node in path] == row
        assert [forest.depths[node] for node in path] == list(range(len(row)))
    assert len(forest) == len({tuple(row[: i + 1]) for row in rows for i in range(len(row))})
    assert ends == [forest.add(row) for row in rows]  # nothing is added twice


def uniform(choices: Choices, vocabulary: int) -> list[dict[int, float]]:
    """Each token of ``vocabulary`` as likely as the next, everywhere."""
    return [dict.fromkeys(choices.next_tokens(b), -math.log(vocabulary)) for b in choices.begun]


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=3).map(tuple), min_size=1, max_size=8, unique=True))
def test_probabilities_count_every_answer_once(rows: list[tuple[int, ...]]) -> None:
    choices = Choices(tuple(rows))
    found = choices.probabilities(uniform(choices, 3))
    # All answers of three tokens out of three are equally likely: count those of which each choice is the longest
    # that they begin with.
    answers = [(a, b, c) for a in range(3) for b in range(3) for c in range(3)]
    counts = dict.fromkeys(rows, 0)
    for answer in answers:
        held = [row for row in rows if answer[: len(row)] == row]
        if held:
            counts[max(held, key=len)] += 1
    assert found == pytest.approx([counts[row] / 27 for row in rows], abs=1e-12)


def test_beginnings_are_asked_once_each() -> None:
    choices = Choices(((5, 6), (5, 7, 8), (9,)))
    assert choices.begun == ((), (5,), (5, 7))
    assert [choices.next_tokens(b) for b in choices.begun] == [[5, 9], [6, 7], [8]]
