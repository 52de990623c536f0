"""Expected futures: of each beginning that samples have had, how probable it is that it goes on to a valid answer.

Adaptive Sampling with Approximate expected futures (ASAp, arXiv 2405.21047): a token is drawn by its probability times
the expected future behind it, which is 1 until something is known. What a sample has met makes it less, never too
little, so that samples come nearer and nearer to the model's distribution over valid answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np


@dataclass
class Place:
    """A beginning of answers."""

    future: float = 1.0  # at least the probability that the model goes on from here to a valid answer
    allowed: float = 1.0  # probability of all tokens that the grammar allows here
    next: dict[int, tuple[float, Place]] = field(default_factory=dict)  # token → its probability and what is behind it

    def futures(self, tokens: np.ndarray) -> np.ndarray:
        """Float64 ``[n]``: the expected futures behind ``tokens`` (int64 ``[n]``)."""
        found = np.ones(len(tokens))
        for token, (_probability, place) in self.next.items():
            found[tokens == token] = place.future
        return found


@dataclass(frozen=True)
class Met:
    """What a sample met at one place: its own token, and tokens behind which no answer is valid."""

    token: int | None  # None = there was none
    probability: float
    allowed: float
    rejected: tuple[tuple[int, float], ...]  # tokens and their probabilities


def learn(root: Place, way: Sequence[Met]) -> None:
    """Take in, in place, what a sample met from the first token of its answer to the last."""
    places = [root]
    for met in way:
        place = places[-1]
        place.allowed = met.allowed
        for token, probability in met.rejected:
            place.next[token] = (probability, Place(future=0.0))
        if met.token is not None:
            places.append(place.next.setdefault(met.token, (met.probability, Place()))[1])
    for place in reversed(places[: len(way)]):
        lost = sum(probability * (1.0 - behind.future) for probability, behind in place.next.values())
        place.future = min(place.future, max(0.0, place.allowed - lost))


def behind(place: Place | None, token: int) -> Place | None:
    """What is known behind ``token`` at ``place``; None = nothing."""
    found = None if place is None else place.next.get(token)
    return None if found is None else found[1]
