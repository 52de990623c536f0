"""Commit policies: which candidates of a step become final."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from mmserve.core.canvas import Canvas


@dataclass(frozen=True)
class Candidates:
    """One proposed token for each masked position that was asked for, and what the model's logits say of it."""

    positions: np.ndarray  # int64 [n], ascending
    tokens: np.ndarray  # int64 [n]
    confidence: np.ndarray  # float32 [n], untempered softmax probability of the token
    gap: np.ndarray  # float32 [n], highest logit minus the second highest
    entropy: np.ndarray  # float32 [n], of the untempered softmax, in nats

    def where(self, kept: np.ndarray) -> Candidates:
        """The candidates where bool ``kept [n]``."""
        return Candidates(
            self.positions[kept], self.tokens[kept], self.confidence[kept], self.gap[kept], self.entropy[kept]
        )


class Commit(Protocol):
    """One policy with its numbers; it holds no state of a request."""

    @property
    def whole_canvas(self) -> bool:
        """Whether it wants candidates for every masked position, not only for those of the current block."""
        ...

    @property
    def revises(self) -> bool:
        """Whether committed tokens of the current block may be replaced: then it wants candidates for them too."""
        ...

    def settled(self, canvas: Canvas, edited: int) -> bool:
        """Whether a full block is final, after a step that replaced ``edited`` of its tokens."""
        ...

    def draft(self, canvas: Canvas) -> np.ndarray:
        """Tokens (int64) to run at a next-token model's first masked positions, so that one pass may judge several.

        The same for the same canvas; empty for policies that draft nothing. The loop cuts a draft before a token that
        cannot be generated.
        """
        ...

    def choose(self, canvas: Canvas, candidates: Candidates) -> np.ndarray:
        """Bool ``[n]``: the candidates that become final, at least one of them.

        ``canvas.block_step`` counts the forward passes made for the block, the one behind the candidates included.
        """
        ...


class Undrafted:
    """What policies share that draft nothing and, unless they say so, replace nothing."""

    @property
    def revises(self) -> bool:
        """Never."""
        return False

    def settled(self, canvas: Canvas, edited: int) -> bool:
        """At once."""
        return True

    def draft(self, canvas: Canvas) -> np.ndarray:
        """Nothing."""
        return canvas.tokens[:0]


class BlockWise(Undrafted):
    """What policies share that look at the current block only."""

    @property
    def whole_canvas(self) -> bool:
        """Never."""
        return False


def most_confident(candidates: Candidates, count: int) -> np.ndarray:
    """Bool ``[n]``: the ``count`` most confident candidates; of equals, the leftmost."""
    return first(-candidates.confidence, count)


def first(values: np.ndarray, count: int) -> np.ndarray:
    """Bool ``[n]``: where the ``count`` smallest of ``values [n]`` stand; of equals, the leftmost."""
    chosen = np.zeros(len(values), dtype=bool)
    chosen[np.argsort(values, kind="stable")[:count]] = True
    return chosen
