"""How slow each worker is: its passes beside those of the same kind and size, of the other workers and its own before.

Pure bookkeeping: passes are noted, and ratios asked for.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median

from mmserve.core.stats import Pass

#: How much of a mean is new with each pass: of a kind and size, and of a worker's ratio to what others take.
_NEW_MEAN, _NEW_RATIO = 1 / 32, 1 / 8
#: Passes of a worker until its mean counts: to judge others by, and to judge itself by where there are none.
_KNOWN, _OWN = 8, 32
#: Passes that must have been judged until a worker's ratio counts.
_JUDGED = 8
#: One pass counts as so many times as slow at most: a single accident is none.
_MOST = 12.0


@dataclass
class _Mean:
    seconds: float = 0.0
    passes: int = 0

    def add(self, seconds: float) -> None:
        self.passes += 1
        self.seconds += max(1 / self.passes, _NEW_MEAN) * (seconds - self.seconds)


@dataclass
class _Ratio:
    value: float = 1.0
    judged: int = 0


class Pace:
    """Of all workers that serve. Sizes count as the same within a factor of two."""

    def __init__(self) -> None:
        self._means: dict[tuple[str, int], dict[str, _Mean]] = defaultdict(dict)
        self._ratios: dict[str, dict[str, _Ratio]] = defaultdict(dict)  # of each worker, by stage

    def note(self, worker: str, passes: Iterable[Pass]) -> None:
        """``worker`` reports passes."""
        for each in passes:
            means = self._means[each.stage, each.size.bit_length()]
            own = means.setdefault(worker, _Mean())
            others = [mean.seconds for name, mean in means.items() if name != worker and mean.passes >= _KNOWN]
            usual = median(others) if others else own.seconds if own.passes >= _OWN else 0.0
            if usual > 0:
                ratio = self._ratios[worker].setdefault(each.stage, _Ratio())
                ratio.judged += 1
                ratio.value += _NEW_RATIO * (min(each.seconds / usual, _MOST) - ratio.value)
            own.add(each.seconds)

    def slowness(self, worker: str) -> float:
        """How many times as long as usual the latest passes of its slowest stage took; 1 = not known."""
        ratios = self._ratios.get(worker, {}).values()
        return max((ratio.value for ratio in ratios if ratio.judged >= _JUDGED), default=1.0)

    def rest(self, worker: str) -> None:
        """Judge it anew from here on."""
        self._ratios.pop(worker, None)

    def forget(self, worker: str) -> None:
        """It has ended."""
        self.rest(worker)
        for means in self._means.values():
            means.pop(worker, None)
