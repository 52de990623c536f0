"""Moments that an answer names, as seconds of its stream's clock.

A stream labels its frames with whole seconds that repeat: second 13 is labelled "5s:" where they repeat after 8. So
"at 5 s" in an answer is a label, of which there is one in any 8 seconds, and "3 s ago" counts back from the newest
frame. Lengths of time ("for 3 s") are seconds as they are.
"""

from __future__ import annotations

import math
import re

from mmserve.core.session import Moment
from mmserve.errors import InvalidArgument

#: Seconds after which the labels of the bundled models' frames repeat.
CYCLE = 8
#: The last second of a session's clock: a century, so that float arithmetic with frames of a microsecond stays exact.
_LAST_SECOND = 100 * 366 * 86_400.0
_MOMENT = re.compile(r"\bat (?P<label>\d+) s\b|\b(?P<ago>\d+) (?:s|seconds?) ago\b")


def clock_seconds(value: float, field: str) -> float:
    """``value`` as a time on a session's clock; raises ``InvalidArgument`` for ``field`` where it is none."""
    if not 0 <= value <= _LAST_SECOND:
        raise InvalidArgument.of(field, f"must be at least 0, and at most a century, not {value}")
    return value


def labelled(label: int, begin: float, end: float, cycle: int = CYCLE) -> int | None:
    """The newest whole second with ``label`` among those of frames from ``begin`` to ``end`` (seconds); None = none."""
    if not 0 <= label < cycle:
        return None
    last = math.floor(end)
    second = last - (last - label) % cycle
    return second if second >= math.floor(begin) else None


def ago(seconds: int, begin: float, end: float) -> int | None:
    """The whole second ``seconds`` before the newest frame at ``end``; None where it is before ``begin``."""
    second = math.floor(end) - seconds
    return second if second >= math.floor(begin) else None


def moments(answer: str, begin: float, end: float, cycle: int = CYCLE) -> list[Moment]:
    """The moments that ``answer`` names, of frames from ``begin`` to ``end`` (seconds), in the order of the text."""
    found = []
    for match in _MOMENT.finditer(answer):
        name = match.lastgroup or ""
        number = int(match[name][:9])  # digits without end are no second of any stream
        is_label = name == "label"
        second = labelled(number, begin, end, cycle) if is_label else ago(number, begin, end)
        again = is_label and second is not None and second - cycle >= math.floor(begin)
        found.append(Moment(*match.span(), second, again))
    return found


def on_the_clock(answer: str, begin: float, end: float, cycle: int = CYCLE) -> str:
    """``answer`` with the moments that it names as seconds of the stream's clock ("at 13 s"); unknown ones stay."""
    for moment in reversed(moments(answer, begin, end, cycle)):
        if moment.seconds is not None:
            answer = f"{answer[: moment.start]}at {moment.seconds} s{answer[moment.end :]}"
    return answer
