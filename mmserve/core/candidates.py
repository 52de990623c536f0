"""Candidates of a step, one for each position, and the choice of those that become final."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

#: Optional fields of candidates that need another pass over the logits; computed only if a policy reads them.
GAP, ENTROPY = "gap", "entropy"
EVERY_FIGURE = frozenset({GAP, ENTROPY})


@dataclass(frozen=True)
class Alternatives:
    """The ``k`` most probable tokens of each of ``n`` positions, in descending order, before temperature and
    filters."""

    tokens: np.ndarray  # int64 [n, k]
    log_probabilities: np.ndarray  # float32 [n, k]; -inf: no token

    @classmethod
    def none(cls, positions: int, count: int) -> Alternatives:
        """Empty alternatives of ``positions`` positions."""
        return cls(np.zeros((positions, count), np.int64), np.full((positions, count), -np.inf, np.float32))

    def where(self, kept: np.ndarray | slice) -> Alternatives:
        """The alternatives of some positions, by a bool mask ``[n]``, indices (int64), or a slice."""
        return Alternatives(self.tokens[kept], self.log_probabilities[kept])


@dataclass(frozen=True)
class Candidates:
    """One proposed token for each candidate position, with its scores by the model's logits.

    ``gap`` and ``entropy`` are None if no policy in use reads them (``commit.base.Commit.reads``), ``alternatives`` if
    the request does not ask for them.
    """

    positions: np.ndarray  # int64 [n], ascending
    tokens: np.ndarray  # int64 [n]
    confidence: np.ndarray  # float32 [n], untempered softmax probability of the token
    gap: np.ndarray | None  # float32 [n], highest logit minus the second highest
    entropy: np.ndarray | None  # float32 [n], of the untempered softmax, in nats
    alternatives: Alternatives | None = None

    def where(self, kept: np.ndarray | slice) -> Candidates:
        """Some of the candidates, by a bool mask ``[n]`` or a slice."""
        gap = None if self.gap is None else self.gap[kept]
        entropy = None if self.entropy is None else self.entropy[kept]
        others = None if self.alternatives is None else self.alternatives.where(kept)
        return Candidates(self.positions[kept], self.tokens[kept], self.confidence[kept], gap, entropy, others)

    def split(self, counts: Sequence[int]) -> list[Candidates]:
        """Splits the candidates into consecutive groups with these ``counts``."""
        made, start = [], 0
        for count in counts:
            made.append(self.where(slice(start, start + count)))
            start += count
        return made

    def and_then(self, other: Candidates) -> Candidates:
        """These candidates, followed by ``other``."""
        return Candidates(
            np.concatenate([self.positions, other.positions]),
            np.concatenate([self.tokens, other.tokens]),
            np.concatenate([self.confidence, other.confidence]),
            _joined(self.gap, other.gap),
            _joined(self.entropy, other.entropy),
        )

    def read_gap(self) -> np.ndarray:
        """``gap``; raises ``ValueError`` if it was not computed."""
        return _made(self.gap, GAP)

    def read_entropy(self) -> np.ndarray:
        """``entropy``; raises ``ValueError`` if it was not computed."""
        return _made(self.entropy, ENTROPY)


def _joined(one: np.ndarray | None, other: np.ndarray | None) -> np.ndarray | None:
    return None if one is None or other is None else np.concatenate([one, other])


def _made(figure: np.ndarray | None, name: str) -> np.ndarray:
    if figure is None:
        raise ValueError(f"the policy reads {name!r} of candidates, but does not name it in `reads`")
    return figure


@dataclass(frozen=True)
class Chosen:
    """The tokens that become final in a step, with their positions and log-probabilities."""

    positions: np.ndarray  # int64 [n]
    tokens: np.ndarray  # int64 [n]
    log_probabilities: np.ndarray  # float32 [n], before temperature, filters and constraint


def leading(agreed: np.ndarray) -> int:
    """Number of leading True values in bool ``agreed [n]``."""
    return len(agreed) if agreed.all() else int(np.argmin(agreed))
