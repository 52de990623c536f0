"""The slowness of each worker: its pass times relative to those of other workers, and to its own earlier ones, for the
same kind and size.

Without side effects: passes are recorded, and ratios are read.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median

from mmserve.core.stats import Pass

#: Weight of a new pass in the running means: of a kind and size, and of a worker's ratio.
_NEW_MEAN, _NEW_RATIO = 1 / 32, 1 / 8
#: Number of a worker's passes until its mean is used: as reference for others, and for itself if there are none.
_MIN_PASSES, _MIN_OWN_PASSES = 8, 32
#: Number of compared passes until a worker's ratio is used.
_MIN_COMPARED = 8
#: Maximum ratio of a single pass, so that one outlier has little effect.
_MAX_RATIO = 12.0


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
    compared: int = 0


class Pace:
    """Pass times of all serving workers. Sizes within a factor of two are treated as equal."""

    def __init__(self) -> None:
        self._means: dict[tuple[str, int], dict[str, _Mean]] = defaultdict(dict)
        self._ratios: dict[str, dict[str, _Ratio]] = defaultdict(dict)  # of each worker, by stage

    def record(self, worker: str, passes: Iterable[Pass]) -> None:
        """Record passes of ``worker``."""
        for each in passes:
            means = self._means[each.stage, each.size.bit_length()]
            own = means.setdefault(worker, _Mean())
            others = [mean.seconds for name, mean in means.items() if name != worker and mean.passes >= _MIN_PASSES]
            usual = median(others) if others else own.seconds if own.passes >= _MIN_OWN_PASSES else 0.0
            if usual > 0:
                ratio = self._ratios[worker].setdefault(each.stage, _Ratio())
                ratio.compared += 1
                ratio.value += _NEW_RATIO * (min(each.seconds / usual, _MAX_RATIO) - ratio.value)
            own.add(each.seconds)

    def slowness(self, worker: str) -> float:
        """The relative duration of recent passes in its slowest stage; 1 = as usual, or unknown."""
        ratios = self._ratios.get(worker, {}).values()
        return max((ratio.value for ratio in ratios if ratio.compared >= _MIN_COMPARED), default=1.0)

    def reset(self, worker: str) -> None:
        """Reset the worker's ratios."""
        self._ratios.pop(worker, None)

    def discard(self, worker: str) -> None:
        """The worker has exited: remove its data."""
        self.reset(worker)
        for means in self._means.values():
            means.pop(worker, None)
