"""Candidates of a step, one for each position asked for, and those of them that become final."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

#: Figures of a candidate that take another pass over its logits, by name: they are made where a policy reads them.
GAP, ENTROPY = "gap", "entropy"
EVERY_FIGURE = frozenset({GAP, ENTROPY})


@dataclass(frozen=True)
class Alternatives:
    """The ``k`` most probable tokens of each of ``n`` positions, in falling order, before temperature and filters."""

    tokens: np.ndarray  # int64 [n, k]
    log_probabilities: np.ndarray  # float32 [n, k]; -inf: there is no such token

    @classmethod
    def none(cls, positions: int, count: int) -> Alternatives:
        """Nothing known of so many positions."""
        return cls(np.zeros((positions, count), np.int64), np.full((positions, count), -np.inf, np.float32))

    def where(self, kept: np.ndarray | slice) -> Alternatives:
        """Those of the positions where bool ``kept [n]``, of some of them (int64), or of a slice."""
        return Alternatives(self.tokens[kept], self.log_probabilities[kept])


@dataclass(frozen=True)
class Candidates:
    """One proposed token for each masked position that was asked for, and its scores by the model's logits.

    ``gap`` and ``entropy`` are None where no policy in use reads them (``commit.base.Commit.reads``), ``alternatives``
    where the request asks for none.
    """

    positions: np.ndarray  # int64 [n], ascending
    tokens: np.ndarray  # int64 [n]
    confidence: np.ndarray  # float32 [n], untempered softmax probability of the token
    gap: np.ndarray | None  # float32 [n], highest logit minus the second highest
    entropy: np.ndarray | None  # float32 [n], of the untempered softmax, in nats
    alternatives: Alternatives | None = None

    def where(self, kept: np.ndarray | slice) -> Candidates:
        """The candidates where bool ``kept [n]``, or of a slice."""
        gap = None if self.gap is None else self.gap[kept]
        entropy = None if self.entropy is None else self.entropy[kept]
        others = None if self.alternatives is None else self.alternatives.where(kept)
        return Candidates(self.positions[kept], self.tokens[kept], self.confidence[kept], gap, entropy, others)

    def split(self, counts: Sequence[int]) -> list[Candidates]:
        """The first ``counts[0]`` candidates, those that follow, and so on."""
        made, start = [], 0
        for count in counts:
            made.append(self.where(slice(start, start + count)))
            start += count
        return made

    def and_then(self, other: Candidates) -> Candidates:
        """These and, after them, ``other``."""
        return Candidates(
            np.concatenate([self.positions, other.positions]),
            np.concatenate([self.tokens, other.tokens]),
            np.concatenate([self.confidence, other.confidence]),
            _joined(self.gap, other.gap),
            _joined(self.entropy, other.entropy),
        )

    def read_gap(self) -> np.ndarray:
        """``gap``; ``ValueError`` where it was not made."""
        return _made(self.gap, GAP)

    def read_entropy(self) -> np.ndarray:
        """``entropy``; ``ValueError`` where it was not made."""
        return _made(self.entropy, ENTROPY)


def _joined(one: np.ndarray | None, other: np.ndarray | None) -> np.ndarray | None:
    return None if one is None or other is None else np.concatenate([one, other])


def _made(figure: np.ndarray | None, name: str) -> np.ndarray:
    if figure is None:
        raise ValueError(f"the policy reads {name!r} of candidates, but does not name it in `reads`")
    return figure


@dataclass(frozen=True)
class Chosen:
    """What becomes final in a step: tokens for positions of the canvas, and their log-probabilities."""

    positions: np.ndarray  # int64 [n]
    tokens: np.ndarray  # int64 [n]
    log_probabilities: np.ndarray  # float32 [n], before temperature, filters and constraint


def leading(agreed: np.ndarray) -> int:
    """How many of bool ``agreed [n]`` are true before the first that is not."""
    return len(agreed) if agreed.all() else int(np.argmin(agreed))
