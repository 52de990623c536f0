"""Expected futures: of each beginning that samples have had, how probable it is that it goes on to a valid answer.

Adaptive Sampling with Approximate expected futures (ASAp, arXiv 2405.21047): a token is drawn by its probability times
the expected future after it, which is 1 until something is known. What a sample has visit makes it less, never too
little, so that samples come nearer and nearer to the model's distribution over valid answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np


@dataclass
class PrefixNode:
    """A beginning of answers."""

    future: float = 1.0  # at least the probability that the model goes on from here to a valid answer
    allowed: float = 1.0  # probability of all tokens that the grammar allows here
    next: dict[int, tuple[float, PrefixNode]] = field(
        default_factory=dict
    )  # token → its probability and what is after it

    def futures(self, tokens: np.ndarray) -> np.ndarray:
        """Float64 ``[n]``: the expected futures after ``tokens`` (int64 ``[n]``)."""
        found = np.ones(len(tokens))
        for token, (_probability, node) in self.next.items():
            found[tokens == token] = node.future
        return found


@dataclass(frozen=True)
class Visit:
    """What a sample visit at one node: its own token, and tokens after which no answer is valid."""

    token: int | None  # None = there was none
    probability: float
    allowed: float
    rejected: tuple[tuple[int, float], ...]  # tokens and their probabilities


def learn(root: PrefixNode, way: Sequence[Visit]) -> None:
    """Take in, in node, what a sample visit from the first token of its answer to the last."""
    nodes = [root]
    for visit in way:
        node = nodes[-1]
        node.allowed = visit.allowed
        for token, probability in visit.rejected:
            node.next[token] = (probability, PrefixNode(future=0.0))
        if visit.token is not None:
            nodes.append(node.next.setdefault(visit.token, (visit.probability, PrefixNode()))[1])
    for node in reversed(nodes[: len(way)]):
        lost = sum(probability * (1.0 - other.future) for probability, other in node.next.values())
        node.future = min(node.future, max(0.0, node.allowed - lost))


def child(node: PrefixNode | None, token: int) -> PrefixNode | None:
    """What is known after ``token`` at ``node``; None = nothing."""
    found = None if node is None else node.next.get(token)
    return None if found is None else found[1]
