"""Typed questions that are answered together, and the text in which a model is asked them.

Every question has one slot of one token on the answer's canvas, right after its own text. The prompt ends with::

    Answer each with yes or no, a letter or a number.

and the canvas is, where ``_`` is a slot::

    Is there a red circle?_
    What color is the square? A red B green:_
    How many shapes are there? 0-4:_

Only the slots are masked. A model that answers one question a prompt has the question there, after the instruction, and
a canvas that is the slot alone.
"""

from __future__ import annotations

import math
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

#: The kinds of question.
YES_NO, CHOICE, SCORE = "yes_no", "choice", "score"
DECISION_KINDS = (YES_NO, CHOICE, SCORE)
#: Most options of a choice: each has a letter.
MOST_OPTIONS = len(string.ascii_uppercase)
#: Most levels of a score; which of them are one token depends on the tokenizer.
MOST_LEVELS = 101
#: The first line of the questions.
INSTRUCTION = "Answer each with yes or no, a letter or a number."


@dataclass(frozen=True, kw_only=True)
class Decision:
    """One typed question.

    ``options`` are what a choice is among (two to ``MOST_OPTIONS``); of the other kinds they are the meaning of each
    answer, or empty. ``low`` and ``high`` bound a score, both inclusive.
    ``instructions`` follow the question in the prompt.
    """

    kind: str
    text: str
    options: tuple[str, ...] = ()
    low: int = 0
    high: int = 9
    instructions: str = ""

    @property
    def answers(self) -> tuple[str, ...]:
        """What the slot may hold, in the order of the options or levels."""
        if self.kind == YES_NO:
            return ("yes", "no")
        if self.kind == CHOICE:
            return tuple(string.ascii_uppercase[: len(self.options)])
        return tuple(str(level) for level in range(self.low, self.high + 1))

    @property
    def labels(self) -> tuple[str, ...]:
        """What each of ``answers`` means to the caller: an option's text, else the answer itself."""
        return self.options if self.kind == CHOICE else self.answers

    @property
    def asked(self) -> str:
        """The question as the model reads it."""
        parts = [self.text.strip(), self.instructions.strip()]
        if self.options:
            parts += [f"{answer} {option}" for answer, option in zip(self.answers, self.options, strict=True) if option]
        elif self.kind == SCORE:
            parts.append(f"{self.low}-{self.high}")
        return " ".join(part for part in parts if part)


@dataclass(frozen=True, kw_only=True)
class Scaling:
    """How log-probabilities of one kind of question become probabilities: they are divided by ``temperature``, and
    ``bias`` is added to that of the first answer (yes, the first option, the lowest level)."""

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
    """The scaling of each kind of question of one model, and how it was measured; none = probabilities as they are."""

    kinds: Mapping[str, Scaling] = field(default_factory=dict)
    measured: Mapping[str, object] = field(default_factory=dict)

    def of(self, kind: str) -> Scaling:
        """The scaling of ``kind``."""
        return self.kinds.get(kind, Scaling())


@dataclass(frozen=True)
class Decided:
    """A model's scores for one question: ``log_probabilities`` of its answers (natural, over the whole vocabulary,
    before any scaling), calibrated ``probabilities``, which sum to 1, and the ``mass``: the probability of the whole
    vocabulary that the answers had together."""

    log_probabilities: tuple[float, ...]
    probabilities: tuple[float, ...]
    mass: float

    @classmethod
    def of(cls, log_probabilities: Sequence[float], scaling: Scaling) -> Decided:
        """The decision of these log-probabilities."""
        mass = math.fsum(math.exp(value) for value in log_probabilities)
        return cls(tuple(log_probabilities), scaling.probabilities(log_probabilities), min(1.0, mass))

    @property
    def best(self) -> int:
        """Index of the most probable answer."""
        return self.probabilities.index(max(self.probabilities))


def questions_text(questions: Sequence[Decision], *, together: bool) -> str:
    """The last text of the prompt; ``together``: whether the questions have one canvas, and not a prompt each."""
    return "\n".join((INSTRUCTION, *(() if together else (question.asked for question in questions))))


def before_slots(questions: Sequence[Decision], *, together: bool) -> list[str]:
    """The text of the canvas before each slot; ``together`` as of ``questions_text``."""
    if not together:
        return [""] * len(questions)
    asked = [question.asked if question.asked.endswith("?") else f"{question.asked}:" for question in questions]
    return [text if index == 0 else f"\n{text}" for index, text in enumerate(asked)]
