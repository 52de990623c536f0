"""The allowed answers of a question as sequences of tokens, and their probabilities from those of the tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

Tokens = tuple[int, ...]


@dataclass(frozen=True)
class Choices:
    """Allowed answers, each a sequence of one token or more, no two equal."""

    sequences: tuple[Tokens, ...]

    @property
    def begun(self) -> tuple[Tokens, ...]:
        """All that may precede a token of an answer, the shortest first: the empty beginning among them."""
        found = {sequence[:length]: None for sequence in self.sequences for length in range(len(sequence))}
        return tuple(sorted(found, key=len))

    def probabilities(self, log_probability: Sequence[dict[int, float]]) -> list[float]:
        """The probability that the answer begins with each choice.

        ``log_probability``: for each of ``begun``, natural logarithms of the probability of the tokens that may be
        next. What begins with a longer choice counts for that one only, so the sum is at most 1.
        """
        by_beginning = dict(zip(self.begun, log_probability, strict=True))
        begins = {
            sequence: math.exp(sum(by_beginning[sequence[:i]][token] for i, token in enumerate(sequence)))
            for sequence in self.sequences
        }
        own = dict(begins)
        for sequence in self.sequences:
            shorter = [other for other in self.sequences if other != sequence and sequence[: len(other)] == other]
            if shorter:
                own[max(shorter, key=len)] -= begins[sequence]
        return [max(0.0, own[sequence]) for sequence in self.sequences]

    def next_tokens(self, beginning: Tokens) -> list[int]:
        """The tokens that may follow ``beginning``, in ascending order."""
        length = len(beginning)
        return sorted({s[length] for s in self.sequences if len(s) > length and s[:length] == beginning})
