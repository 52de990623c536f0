"""Alerts of standing questions: hysteresis over the probabilities of consecutive frames.

Pure state, one ``Watch`` for each standing question: no clock, no thread, no model.
"""

from __future__ import annotations

from dataclasses import dataclass

from mmserve.errors import FieldViolation, InvalidArgument


@dataclass(frozen=True, kw_only=True)
class Rule:
    """The conditions under which a watch becomes true or false. Probabilities are those of the expected answer among
    the allowed ones."""

    on: float = 0.7  # becomes true at this probability or above …
    off: float = 0.3  # … and false at this or below; no change between them
    frames: int = 1  # consecutive frames required at ``on``
    interval: float = 0.0  # minimum seconds of the stream between two alerts of becoming true
    mass: float = 0.5  # minimum total probability of the allowed answers; frames below are ignored

    def check(self, path: str = "rule") -> None:
        """Raises ``InvalidArgument`` if a number is out of its range; ``path`` names the rule in the request."""
        right = {
            "on": (0 < self.on <= 1, "must be above 0 and at most 1"),
            "off": (0 <= self.off < self.on, "must be at least 0 and below `on`"),
            "frames": (1 <= self.frames <= 1000, "must be 1 to 1000"),
            "interval": (0 <= self.interval < 1e6, "must be at least 0 and below 1e6 seconds"),
            "mass": (0 <= self.mass <= 1, "must be 0 to 1"),
        }
        wrong = [FieldViolation(f"{path}.{name}", text) for name, (fine, text) in right.items() if not fine]
        if wrong:
            raise InvalidArgument(*wrong)


class Watch:
    """The state of one standing question; false until its rule makes it true."""

    def __init__(self, rule: Rule) -> None:
        self.rule, self.on = rule, False
        self._run = 0  # consecutive frames at ``rule.on``
        self._turned_on: float | None = None  # seconds of the last alert of becoming true

    def update(self, probability: float, mass: float, seconds: float) -> bool | None:
        """Process the answer to the frame at ``seconds`` of the stream. Returns the new state if it is an alert.

        A frame with too small a ``mass`` changes nothing, but interrupts a run of consecutive frames. An alert delayed
        by ``interval`` is sent with the first frame after it, if its condition still holds.
        """
        rule = self.rule
        if mass < rule.mass:
            self._run = 0
            return None
        self._run = min(self._run + 1, rule.frames) if probability >= rule.on else 0
        if not self.on and self._run == rule.frames and self._may_turn_on(seconds):
            self.on, self._turned_on = True, seconds
        elif self.on and probability <= rule.off:
            self.on = False
        else:
            return None
        return self.on

    def _may_turn_on(self, seconds: float) -> bool:
        return self._turned_on is None or seconds - self._turned_on >= self.rule.interval
