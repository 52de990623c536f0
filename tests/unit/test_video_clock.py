"""Labels that repeat, and times counted backwards, as seconds of a stream's clock."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmserve.core.session import Moment
from mmserve.video.clock import ago, labelled, moments, on_the_clock

spans = st.tuples(st.floats(0, 1e6), st.floats(0, 100)).map(lambda x: (x[0], x[0] + x[1]))


@given(spans, st.integers(-2, 12), st.integers(2, 10))
def test_a_label_is_its_newest_second_in_the_window(span: tuple[float, float], label: int, cycle: int) -> None:
    begin, end = span
    having = [s for s in range(math.floor(begin), math.floor(end) + 1) if s % cycle == label]
    assert labelled(label, begin, end, cycle) == (having[-1] if having else None)


@given(spans, st.integers(0, 200))
def test_times_ago_lie_in_the_window(span: tuple[float, float], seconds: int) -> None:
    begin, end = span
    second = math.floor(end) - seconds
    assert ago(seconds, begin, end) == (second if second >= math.floor(begin) else None)


@pytest.mark.parametrize(
    "answer, expected",
    [
        ("at 5 s", "at 93 s"),  # 93 % 8 = 5
        ("at 4 s", "at 100 s"),  # the newest second
        ("at 5 s and at 7 s", "at 93 s and at 95 s"),
        ("3 seconds ago", "at 97 s"),
        ("1 s ago", "at 99 s"),
        ("for 3 s", "for 3 s"),
        ("at 9 s", "at 9 s"),  # no label
        ("30 s ago", "30 s ago"),  # before the first frame
        ("at 99999999999999999999 s", "at 99999999999999999999 s"),
        ("the red circle appears at 2 s, the square stays", "the red circle appears at 98 s, the square stays"),
    ],
)
def test_answers_are_told_in_seconds_of_the_clock(answer: str, expected: str) -> None:
    assert on_the_clock(answer, 90.25, 100.9) == expected


def test_moments_name_their_place_in_the_text() -> None:
    answer = "it appears at 1 s"
    assert moments(answer, 0.0, 7.5) == [Moment(11, 17, 1)]
    assert answer[11:17] == "at 1 s"
    assert moments(answer, 2.0, 7.5) == [Moment(11, 17, None)]  # the window holds no second 1 nor 9


def test_a_label_that_an_older_frame_has_too_is_ambiguous() -> None:
    assert moments("at 1 s", 1.0, 8.9) == [Moment(0, 6, 1, False)]
    assert moments("at 1 s", 1.0, 9.0) == [Moment(0, 6, 9, True)]
    assert moments("8 s ago", 1.0, 9.0) == [Moment(0, 7, 1, False)]
