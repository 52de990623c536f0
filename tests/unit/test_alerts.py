"""Alerts: hysteresis over the probabilities of a standing question."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmserve.errors import InvalidArgument
from mmserve.video.alerts import Rule, Watch

share = st.floats(0, 1)
rules = st.builds(
    lambda on, off, frames, interval, mass: Rule(
        on=on, off=off * on * 0.99, frames=frames, interval=interval, mass=mass
    ),
    st.floats(0.01, 1),
    share,
    st.integers(1, 4),
    st.sampled_from((0.0, 2.0, 5.5)),
    st.floats(0, 0.9),
)
#: Probability, mass and seconds since the frame before.
streams = st.lists(st.tuples(share, share, st.floats(0.1, 3)), max_size=60)


def alerts(rule: Rule, frames: list[tuple[float, float, float]]) -> list[bool | None]:
    """What each of ``frames`` (probability, mass, seconds) raises: the new state; None = no alert."""
    watch = Watch(rule)
    return [watch.update(*frame) for frame in frames]


def timed(frames: list[tuple[float, float, float]]) -> list[tuple[float, float, float]]:
    """Frames with the seconds of the stream instead of those since the one before."""
    total, found = 0.0, []
    for probability, mass, since in frames:
        total += since
        found.append((probability, mass, total))
    return found


@given(rules, streams)
def test_alerts_obey_their_rule(rule: Rule, gaps: list[tuple[float, float, float]]) -> None:
    rule.check()
    frames = timed(gaps)
    raised = alerts(rule, frames)
    on, last_on = False, None
    for index, (alert, (probability, mass, seconds)) in enumerate(zip(raised, frames, strict=True)):
        run = frames[max(0, index + 1 - rule.frames) : index + 1]
        held = len(run) == rule.frames and all(p >= rule.on and m >= rule.mass for p, m, _ in run)
        rested = last_on is None or seconds - last_on >= rule.interval
        expected = None
        if mass >= rule.mass and not on and held and rested:
            expected, last_on = True, seconds
        elif mass >= rule.mass and on and probability <= rule.off:
            expected = False
        assert alert is expected
        on = on if expected is None else expected


@given(rules, streams, st.floats(0, 1))
def test_unsure_frames_raise_nothing_and_never_hasten_an_alert(
    rule: Rule, gaps: list[tuple[float, float, float]], probability: float
) -> None:
    unsure = [(probability, rule.mass / 2 - 1e-9, since) for _p, _m, since in gaps]
    assert set(alerts(rule, timed(unsure))) <= {None}
    mixed = [frame for pair in zip(unsure, gaps, strict=True) for frame in pair]
    if rule.frames > 1:  # no two sure frames are in a row
        assert set(alerts(rule, timed(mixed))) <= {None}


def test_a_watch_turns_true_once_while_its_answer_holds_and_false_at_its_end() -> None:
    rule = Rule(on=0.8, off=0.2, frames=2)
    probabilities = (0.9, 0.1, 0.9, 0.9, 0.95, 0.5, 0.9, 0.2, 0.1, 0.9)
    raised = alerts(rule, [(p, 1.0, float(i)) for i, p in enumerate(probabilities)])
    assert [(on, i) for i, on in enumerate(raised) if on is not None] == [(True, 3), (False, 7)]


def test_an_alert_within_the_interval_comes_after_it_if_still_due() -> None:
    rule = Rule(on=0.8, off=0.2, interval=5)
    raised = alerts(rule, [(p, 1.0, float(i)) for i, p in enumerate((0.9, 0.1, 0.9, 0.9, 0.9, 0.9, 0.9))])
    assert [(on, i) for i, on in enumerate(raised) if on is not None] == [(True, 0), (False, 1), (True, 5)]


@pytest.mark.parametrize(
    "field, rule",
    [
        ("on", Rule(on=0.0, off=-1.0)),
        ("on", Rule(on=float("nan"))),
        ("off", Rule(on=0.5, off=0.5)),
        ("frames", Rule(frames=0)),
        ("interval", Rule(interval=-1)),
        ("interval", Rule(interval=float("nan"))),
        ("mass", Rule(mass=1.5)),
    ],
)
def test_rules_out_of_range_are_refused_by_field(field: str, rule: Rule) -> None:
    with pytest.raises(InvalidArgument) as refused:
        rule.check("watch.rule")
    assert f"watch.rule.{field}" in {violation.field for violation in refused.value.violations}
