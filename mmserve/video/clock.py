"""Conversion of times that an answer mentions to seconds of the stream's clock.

A stream labels its frames with whole seconds modulo a period: second 13 is labelled "5s:" if the period is 8. So "at 5
s" in an answer is a label, which occurs once in any 8 seconds, and "3 s ago" counts back from the newest frame.
Durations ("for 3 s") are not converted.
"""

from __future__ import annotations

import math
import re

from mmserve.core.session import Moment
from mmserve.errors import InvalidArgument

#: Period (seconds) of the labels of the bundled models' frames.
CYCLE = 8
#: The maximum time of a session's clock: a century, so that float arithmetic with microseconds stays exact.
_LAST_SECOND = 100 * 366 * 86_400.0
_MOMENT = re.compile(r"\bat (?P<label>\d+) s\b|\b(?P<ago>\d+) (?:s|seconds?) ago\b")


def clock_seconds(value: float, field: str) -> float:
    """``value`` as a time on a session's clock; raises ``InvalidArgument`` for ``field`` if it is not valid."""
    if not 0 <= value <= _LAST_SECOND:
        raise InvalidArgument.of(field, f"must be at least 0, and at most a century, not {value}")
    return value


def labelled(label: int, begin: float, end: float, cycle: int = CYCLE) -> int | None:
    """The newest whole second with ``label`` among frames from ``begin`` to ``end`` (seconds); None if there is
    none."""
    if not 0 <= label < cycle:
        return None
    last = math.floor(end)
    second = last - (last - label) % cycle
    return second if second >= math.floor(begin) else None


def ago(seconds: int, begin: float, end: float) -> int | None:
    """The whole second ``seconds`` before the newest frame, at ``end``; None if it is before ``begin``."""
    second = math.floor(end) - seconds
    return second if second >= math.floor(begin) else None


def moments(answer: str, begin: float, end: float, cycle: int = CYCLE) -> list[Moment]:
    """The times mentioned in ``answer``, for frames from ``begin`` to ``end`` (seconds), in the order of the text."""
    found = []
    for match in _MOMENT.finditer(answer):
        name = match.lastgroup or ""
        number = int(match[name][:9])  # more digits are no second of any stream
        is_label = name == "label"
        second = labelled(number, begin, end, cycle) if is_label else ago(number, begin, end)
        again = is_label and second is not None and second - cycle >= math.floor(begin)
        found.append(Moment(*match.span(), second, again))
    return found


def on_the_clock(answer: str, begin: float, end: float, cycle: int = CYCLE) -> str:
    """``answer`` with mentioned times as seconds of the stream's clock ("at 13 s"); unknown ones are unchanged."""
    for moment in reversed(moments(answer, begin, end, cycle)):
        if moment.seconds is not None:
            answer = f"{answer[: moment.start]}at {moment.seconds} s{answer[moment.end :]}"
    return answer
