"""The allowed answers of a question as token sequences, and their probabilities from those of the tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

Tokens = tuple[int, ...]


@dataclass(frozen=True)
class Choices:
    """Allowed answers, each a sequence of at least one token, all different."""

    sequences: tuple[Tokens, ...]

    @property
    def begun(self) -> tuple[Tokens, ...]:
        """All prefixes before a token of an answer, the shortest first, including the empty one."""
        found = {sequence[:length]: None for sequence in self.sequences for length in range(len(sequence))}
        return tuple(sorted(found, key=len))

    def probabilities(self, log_probability: Sequence[dict[int, float]]) -> list[float]:
        """The probability that the answer begins with each choice.

        ``log_probability``: for each prefix of ``begun``, natural log-probabilities of the possible next tokens.
        Answers that begin with a longer choice count only for that one, so the sum is at most 1.
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
        """The possible tokens after the prefix ``beginning``, in ascending order."""
        length = len(beginning)
        return sorted({s[length] for s in self.sequences if len(s) > length and s[:length] == beginning})
