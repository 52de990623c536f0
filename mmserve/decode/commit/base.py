"""Commit policies: which candidates of a step become final."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Protocol, TypeGuard, runtime_checkable

import numpy as np
from torch import Tensor

from mmserve.core.canvas import Canvas
from mmserve.core.request import Sampling
from mmserve.core.values import Checked
from mmserve.decode.constrained.best import Notes

#: Figures of a candidate that take another pass over its logits, by name: they are made where a policy reads them.
GAP, ENTROPY = "gap", "entropy"
EVERY_FIGURE = frozenset({GAP, ENTROPY})


@dataclass(frozen=True)
class Candidates:
    """One proposed token for each masked position that was asked for, and what the model's logits say of it.

    ``gap`` and ``entropy`` are None where no policy in use reads them (``Commit.reads``).
    """

    positions: np.ndarray  # int64 [n], ascending
    tokens: np.ndarray  # int64 [n]
    confidence: np.ndarray  # float32 [n], untempered softmax probability of the token
    gap: np.ndarray | None  # float32 [n], highest logit minus the second highest
    entropy: np.ndarray | None  # float32 [n], of the untempered softmax, in nats

    def where(self, kept: np.ndarray | slice) -> Candidates:
        """The candidates where bool ``kept [n]``, or of a slice."""
        gap = None if self.gap is None else self.gap[kept]
        entropy = None if self.entropy is None else self.entropy[kept]
        return Candidates(self.positions[kept], self.tokens[kept], self.confidence[kept], gap, entropy)

    def split(self, counts: Sequence[int]) -> list[Candidates]:
        """The first ``counts[0]`` candidates, those that follow, and so on."""
        made, start = [], 0
        for count in counts:
            made.append(self.where(slice(start, start + count)))
            start += count
        return made

    def and_then(self, other: Candidates) -> Candidates:
        """These and, behind them, ``other``."""
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
class Verdict:
    """What a companion says of ``n`` drafted tokens that stand one behind another from the first masked position on.

    ``own`` is its own choice at each of their positions and, if the block has one, at the position behind them, each
    given the draft left of it.
    """

    own: Candidates
    rank: np.ndarray  # int64 [n], tokens that it finds more probable than the drafted one
    relative: np.ndarray  # float32 [n], probability of the drafted token over that of the most probable one


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

    @property
    def closes(self) -> bool:
        """Whether an end of text that becomes final settles everything right of it, as padding."""
        ...

    @property
    def whole_block(self) -> bool:
        """Whether it wants candidates for every position of the current block, committed or not."""
        ...

    @property
    def reads(self) -> frozenset[str]:
        """Which of ``EVERY_FIGURE`` it reads of candidates."""
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

        Positions that are final already are among the candidates only of policies that ask for them (``whole_block``,
        ``Partial.regarded``). ``canvas.block_step`` counts the forward passes made for the block, the one that gave the
        candidates included.
        """
        ...


@runtime_checkable
class Judged(Protocol):
    """A commit policy whose candidates a companion judges before any is chosen."""

    def verified(self, canvas: Canvas, candidates: Candidates, verdict: Verdict) -> Candidates:
        """What is left of ``candidates``, and what stands instead, ascending and at least one."""
        ...


@runtime_checkable
class Drafted(Protocol):
    """A commit policy of a next-token model for which a companion drafts."""

    def wanted(self, canvas: Canvas) -> int:
        """Tokens that the companion shall draft before the next pass."""
        ...

    def agreed(self, canvas: Canvas, candidates: Candidates, drafted: np.ndarray) -> Candidates:
        """Those of ``candidates`` that ``drafted`` (int64, from the first masked position on) has not led astray."""
        ...


@runtime_checkable
class Proposing(Protocol):
    """A commit policy that makes its own candidates of the block's logits."""

    def propose(
        self,
        logits_nV: Tensor,
        canvas: Canvas,
        sampling: Sampling,
        mask_id: int,
        banned: tuple[int, ...],
        best: Notes | None = None,
    ) -> Candidates:
        """Candidates for positions of the current block, from the logits ``[block, V]`` of all of them.

        ``mask_id`` stands at masked positions; tokens of ``banned`` are never proposed. ``best`` notes more of each
        row, and may rule tokens out first. The same for the same request and canvas, whoever else is served.
        """
        ...


@runtime_checkable
class Partial(Protocol):
    """A commit policy of the whole canvas that mostly chooses from a part of it: the rest need not be scored before."""

    def regarded(self, canvas: Canvas) -> np.ndarray:
        """Final positions (int64, ascending) of which it wants candidates too, if their logits are computed anyway."""
        ...

    def needed(self, canvas: Canvas, positions: np.ndarray) -> np.ndarray:
        """Bool ``[n]``: which of ``positions``, masked or regarded, it looks at in any case."""
        ...

    def enough(self, canvas: Canvas, candidates: Candidates) -> bool:
        """Whether it chooses from these ``candidates`` of needed positions and would choose no other."""
        ...


@cache
def _follows(kind: type, protocol: type) -> bool:
    return issubclass(kind, protocol)


def is_proposing(commit: Commit) -> TypeGuard[Proposing]:
    """As ``isinstance``, which looks through a protocol's members at each call; this is asked at every step."""
    return _follows(type(commit), Proposing)


def is_partial(commit: Commit) -> TypeGuard[Partial]:
    """As ``is_proposing``."""
    return _follows(type(commit), Partial)


class Undrafted(Checked):
    """What policies share that draft nothing and, unless they say so, replace and close nothing."""

    @property
    def revises(self) -> bool:
        """Never."""
        return False

    @property
    def closes(self) -> bool:
        """Never."""
        return False

    @property
    def whole_block(self) -> bool:
        """If tokens of it may be replaced."""
        return self.revises

    @property
    def reads(self) -> frozenset[str]:
        """None: token and confidence are enough."""
        return frozenset()

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


def leading(agreed: np.ndarray) -> int:
    """How many of bool ``agreed [n]`` are true before the first that is not."""
    return len(agreed) if agreed.all() else int(np.argmin(agreed))
