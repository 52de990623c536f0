"""Typed questions that are answered together, and their prompt text.

The prompt is the subject of all questions, and ends with an instruction; each question follows it separately, in the
user's turn, and its answer is one token, the slot (``_``)::

    … Answer with yes or no, a number or a letter.
    ├ Is there a red circle? … _
    ├ What color is the square? 1 red 2 green … _
    └ How many shapes are there? 0-4 … _

The questions are branches (``core/branches.py``): all run in one forward pass without attending to each other, and the
prompt does not attend to them, so an answer depends neither on the other questions nor on their order.
"""

from __future__ import annotations

import math
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

#: The kinds of question.
YES_NO, CHOICE, SCORE = "yes_no", "choice", "score"
DECISION_KINDS = (YES_NO, CHOICE, SCORE)
#: Maximum number of options of a choice: each is labelled by one digit or, if there are more than nine, by a letter.
MOST_OPTIONS = len(string.ascii_uppercase)
#: Maximum number of levels of a score; which of them are single tokens depends on the tokenizer.
MOST_LEVELS = 101
#: The last line of the prompt.
INSTRUCTION = "Answer with yes or no, a number or a letter."


@dataclass(frozen=True, kw_only=True)
class Decision:
    """One typed question.

    ``options``: for a choice, its options (two to ``MOST_OPTIONS``); for other kinds, the meaning of each answer, or
    empty. ``low`` and ``high``: bounds of a score, both inclusive. ``instructions`` are appended to the question's
    text.
    """

    kind: str
    text: str
    options: tuple[str, ...] = ()
    low: int = 0
    high: int = 9
    instructions: str = ""

    @property
    def answers(self) -> tuple[str, ...]:
        """The possible contents of the slot, in the order of options or levels."""
        if self.kind == YES_NO:
            return ("yes", "no")
        if self.kind == CHOICE:
            names = string.digits[1:] if len(self.options) < len(string.digits) else string.ascii_uppercase
            return tuple(names[: len(self.options)])
        return tuple(str(level) for level in range(self.low, self.high + 1))

    @property
    def labels(self) -> tuple[str, ...]:
        """The meaning of each of ``answers`` for the caller: an option's text, else the answer itself."""
        return self.options if self.kind == CHOICE else self.answers

    @property
    def asked(self) -> str:
        """The question's text in the prompt."""
        parts = [self.text.strip(), self.instructions.strip()]
        if self.options:
            parts += [f"{answer} {option}" for answer, option in zip(self.answers, self.options, strict=True) if option]
        elif self.kind == SCORE:
            parts.append(f"{self.low}-{self.high}")
        return " ".join(part for part in parts if part)


@dataclass(frozen=True, kw_only=True)
class Scaling:
    """Calibration of one kind of question: log-probabilities are divided by ``temperature``, and ``bias`` is added to
    that of the first answer (yes, the first option, the lowest level)."""

    temperature: float = 1.0
    bias: float = 0.0

    def probabilities(self, log_probabilities: Sequence[float]) -> tuple[float, ...]:
        """Probabilities of the answers, which sum to 1."""
        scores = [value / self.temperature for value in log_probabilities]
        scores[0] += self.bias
        highest = max(scores)
        weights = [math.exp(score - highest) for score in scores]
        total = math.fsum(weights)
        return tuple(weight / total for weight in weights)


@dataclass(frozen=True)
class Calibration:
    """The scaling of each kind of question of one model, and how it was measured; none = no calibration."""

    kinds: Mapping[str, Scaling] = field(default_factory=dict)
    measured: Mapping[str, object] = field(default_factory=dict)

    def of(self, kind: str) -> Scaling:
        """The scaling of ``kind``."""
        return self.kinds.get(kind, Scaling())


@dataclass(frozen=True)
class Decided:
    """A model's scores for one question: ``log_probabilities`` of its answers (natural, over the whole vocabulary, not
    calibrated), calibrated ``probabilities``, which sum to 1, and ``mass``: the total probability of the answers in the
    whole vocabulary."""

    log_probabilities: tuple[float, ...]
    probabilities: tuple[float, ...]
    mass: float

    @classmethod
    def of(cls, log_probabilities: Sequence[float], scaling: Scaling) -> Decided:
        """The decision with these log-probabilities, calibrated by ``scaling``."""
        mass = math.fsum(math.exp(value) for value in log_probabilities)
        return cls(tuple(log_probabilities), scaling.probabilities(log_probabilities), min(1.0, mass))

    @property
    def best(self) -> int:
        """Index of the most probable answer."""
        return self.probabilities.index(max(self.probabilities))
