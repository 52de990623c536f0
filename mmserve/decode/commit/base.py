"""Commit policies: which candidates of a step become final."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Protocol, TypeGuard, runtime_checkable

import numpy as np
from torch import Tensor

from mmserve.core.candidates import ENTROPY as ENTROPY
from mmserve.core.candidates import EVERY_FIGURE as EVERY_FIGURE
from mmserve.core.candidates import GAP as GAP
from mmserve.core.candidates import Candidates as Candidates
from mmserve.core.candidates import leading as leading
from mmserve.core.canvas import Canvas
from mmserve.core.request import Sampling
from mmserve.core.values import Checked


class LogitsObserver(Protocol):
    """Reads a request's logits row by row while the sampler makes candidates of them."""

    def restrict(self, logits: Tensor) -> None:
        """Rule out, in place, the tokens not allowed in the next rows ``logits [n, V]``."""
        ...

    def take(
        self,
        logits: Tensor,
        log_z: Tensor,
        tempered: Tensor | None,
        noised: Tensor | None,
        masks: Tensor | None = None,
    ) -> None:
        """Read the rows that were just restricted.

        ``log_z [n]``: log of the sum of their exponentials. ``tempered [n, V]``: filtered and tempered logits,
        ``noised [n, V]``: these and Gumbel noise; None = greedy. ``masks [n]``: the mask token's logits, where it is
        part of the distribution though it is not among ``logits``.
        """
        ...


@dataclass(frozen=True)
class Verdict:
    """A companion's scores for ``n`` drafted tokens at consecutive positions from the first masked one on.

    ``own`` is its own choice at each of their positions and, if the block has one, at the position after them, each
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
        """What is left of ``candidates``, and what replaces the rest, ascending and at least one."""
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
        best: LogitsObserver | None = None,
    ) -> Candidates:
        """Candidates for positions of the current block, from the logits ``[block, V]`` of all of them.

        ``mask_id`` is at masked positions; tokens of ``banned`` are never proposed. ``best`` notes more of each
        row, and may rule tokens out first. The same for the same request and canvas, whatever else is served.
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


def is_verified(commit: Commit) -> bool:
    """Whether a draft or verifier model changes its candidates."""
    return _follows(type(commit), Judged) or _follows(type(commit), Drafted)


def is_judged(commit: Commit) -> bool:
    """Whether the policy is ``Judged``; as ``is_proposing``."""
    return _follows(type(commit), Judged)


def is_partial(commit: Commit) -> TypeGuard[Partial]:
    """As ``is_proposing``."""
    return _follows(type(commit), Partial)


class Undrafted(Checked):
    """Defaults of policies that draft nothing and, unless they override these, replace and close nothing."""

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
    """Bool ``[n]``: where the ``count`` smallest of ``values [n]`` are; of equals, the leftmost."""
    chosen = np.zeros(len(values), dtype=bool)
    chosen[np.argsort(values, kind="stable")[:count]] = True
    return chosen
