"""What is foreseen of the wait for a start, from plain numbers."""

from __future__ import annotations

from itertools import pairwise

import pytest

from mmserve.schedule.expected_wait import FADE_SECONDS, Measured, expected_wait, measured, retry_after


def busy(rate: float, seconds: float, *, begin: Measured | None = None, start: float = 100.0) -> Measured:
    """An engine that ends ``rate`` work a second, looked at ten times a second, while others always wait."""
    engine = measured(begin or Measured(), start, waiting=True, ended=0.0)
    for look in range(1, round(seconds * 10) + 1):
        engine = measured(engine, start + look / 10, waiting=True, ended=rate / 10)
    return engine


def test_nothing_is_foreseen_before_there_are_measurements() -> None:
    assert expected_wait(Measured(), 1e9) == 0.0
    assert expected_wait(busy(50.0, 1.5), 1e9) == 0.0
    assert expected_wait(busy(0.0, 60.0), 1e9) == 0.0  # nothing has ended: it may be the first request of all


def test_the_wait_is_the_work_ahead_at_the_rate_measured() -> None:
    assert expected_wait(busy(50.0, 20.0), 1000.0) == pytest.approx(20.0, rel=0.01)
    assert expected_wait(busy(50.0, 20.0), 0.0) == 0.0


def test_a_server_with_places_to_spare_measures_nothing() -> None:
    """It ends as much as it is asked for: that it could do no more does not follow."""
    engine = Measured()
    for second in range(600):
        for part in range(10):  # somebody waits now and then, for a tenth of a second
            engine = measured(engine, second + part / 10, waiting=part == 0, ended=1.0)
    assert expected_wait(engine, 1e9) == 0.0


def test_what_was_measured_fades_and_does_not_jump() -> None:
    fast = busy(100.0, 60.0)
    waits = []
    engine = fast
    for second in range(int(3 * FADE_SECONDS)):
        engine = busy(10.0, 1.0, begin=engine, start=160.0 + second)
        waits.append(expected_wait(engine, 1000.0))
    assert waits[0] < 11.5
    assert all(0 <= later - earlier < 4.0 for earlier, later in pairwise(waits))
    assert waits[-1] > 60.0


def test_a_pause_is_no_time_in_which_nothing_ended() -> None:
    engine = busy(50.0, 20.0)
    idle = measured(engine, 121.0, waiting=False, ended=0.0)
    later = measured(idle, 10_000.0, waiting=True, ended=0.0)
    assert expected_wait(later, 1000.0) == pytest.approx(expected_wait(engine, 1000.0), rel=0.1)


@pytest.mark.parametrize(
    ("wait", "most", "left", "refused"),
    [
        (0.0, 0.0, 0.001, False),  # an idle server refuses nothing
        (59.0, 60.0, None, False),
        (61.0, 60.0, None, True),
        (61.0, 0.0, None, False),
        (61.0, 0.0, 70.0, False),
        (61.0, 0.0, 30.0, True),
        (10.0, 60.0, 5.0, True),
    ],
)
def test_who_is_refused(wait: float, most: float, left: float | None, refused: bool) -> None:
    later = retry_after(wait, most, left)
    assert (later is not None) == refused
    assert later is None or 0.5 <= later <= 30.0
