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
    """Reads a request's logits in row order while the sampler makes candidates from them."""

    def restrict(self, logits: Tensor) -> None:
        """Mask out, in place, the tokens that are not allowed in the next rows ``logits [n, V]``."""
        ...

    def take(
        self,
        logits: Tensor,
        log_z: Tensor,
        tempered: Tensor | None,
        noised: Tensor | None,
        masks: Tensor | None = None,
    ) -> None:
        """Read the rows that ``restrict`` was just called with.

        ``log_z [n]``: logsumexp of the logits. ``tempered [n, V]``: logits after filters and temperature; ``noised [n,
        V]``: those plus Gumbel noise; None for greedy. ``masks [n]``: the mask token's logits, if it counts in the
        distribution although ``logits`` excludes it.
        """
        ...


@dataclass(frozen=True)
class Verdict:
    """A verifier model's scores for ``n`` drafted tokens at consecutive positions, beginning at the first masked one.

    ``own``: the verifier's own choice at each of these positions and, if the block has one, at the next position, each
    given the draft tokens to its left.
    """

    own: Candidates
    rank: np.ndarray  # int64 [n], number of tokens that are more probable than the drafted one
    relative: np.ndarray  # float32 [n], probability of the drafted token over that of the most probable one


class Commit(Protocol):
    """One policy with its numbers; it holds no state of a request."""

    @property
    def whole_canvas(self) -> bool:
        """Whether candidates are needed for every masked position, not only for those of the current block."""
        ...

    @property
    def revises(self) -> bool:
        """Whether committed tokens of the current block may be replaced; candidates are then made for them too."""
        ...

    @property
    def closes(self) -> bool:
        """Whether all positions after a final end-of-text token become padding immediately."""
        ...

    @property
    def whole_block(self) -> bool:
        """Whether candidates are needed for every position of the current block, committed or not."""
        ...

    @property
    def reads(self) -> frozenset[str]:
        """The fields of ``Candidates`` (of ``EVERY_FIGURE``) that the policy reads."""
        ...

    def is_final(self, canvas: Canvas, edited: int) -> bool:
        """Whether a full block is final, after a step that replaced ``edited`` of its tokens."""
        ...

    def draft(self, canvas: Canvas) -> np.ndarray:
        """Tokens (int64) to run at a next-token model's first masked positions, so that one pass can verify several.

        Deterministic for a given canvas; empty for policies that draft nothing. The loop truncates a draft before a
        token that the model cannot generate.
        """
        ...

    def choose(self, canvas: Canvas, candidates: Candidates) -> np.ndarray:
        """Bool ``[n]``: which candidates become final; at least one.

        Final positions are among the candidates only if the policy requests them (``whole_block``,
        ``Partial.also_scored``). ``canvas.block_step`` counts the forward passes of the block, including the one that
        gave the candidates.
        """
        ...


@runtime_checkable
class Verified(Protocol):
    """A commit policy whose candidates are verified by a verifier model before any is chosen."""

    def verified(self, canvas: Canvas, candidates: Candidates, verdict: Verdict) -> Candidates:
        """``candidates`` after verification: accepted ones and replacements, in ascending order, at least one."""
        ...


@runtime_checkable
class Drafted(Protocol):
    """A commit policy of a next-token model that uses a draft model."""

    def wanted(self, canvas: Canvas) -> int:
        """The number of tokens to draft before the next pass."""
        ...

    def agreed(self, canvas: Canvas, candidates: Candidates, drafted: np.ndarray) -> Candidates:
        """The ``candidates`` whose preceding tokens in ``drafted`` (int64, from the first masked position) were all
        accepted."""
        ...


@runtime_checkable
class Proposing(Protocol):
    """A commit policy that makes its candidates itself, from the block's logits."""

    def propose(
        self,
        logits_nV: Tensor,
        canvas: Canvas,
        sampling: Sampling,
        mask_id: int,
        banned: tuple[int, ...],
        observer: LogitsObserver | None = None,
    ) -> Candidates:
        """Candidates for positions of the current block, from its logits ``[block, V]``.

        Masked positions hold ``mask_id``; tokens of ``banned`` are never proposed. ``observer``, if given, restricts
        and observes each row. Deterministic for a given request and canvas, independent of other requests.
        """
        ...


@runtime_checkable
class Partial(Protocol):
    """A whole-canvas policy that can usually choose from a part of the candidates, so that the rest need not be
    computed."""

    def also_scored(self, canvas: Canvas) -> np.ndarray:
        """Final positions (int64, ascending) whose candidates are also used, if their logits are computed anyway."""
        ...

    def needed(self, canvas: Canvas, positions: np.ndarray) -> np.ndarray:
        """Bool ``[n]``: which of ``positions``, masked or regarded, must always have candidates."""
        ...

    def enough(self, canvas: Canvas, candidates: Candidates) -> bool:
        """Whether the choice from these ``candidates`` of needed positions is the same as from all candidates."""
        ...


@cache
def _follows(kind: type, protocol: type) -> bool:
    return issubclass(kind, protocol)


def is_proposing(commit: Commit) -> TypeGuard[Proposing]:
    """Cached replacement of ``isinstance``, which checks all protocol members at each call; called in every step."""
    return _follows(type(commit), Proposing)


def is_verified(commit: Commit) -> bool:
    """Whether a draft or verifier model changes its candidates."""
    return _follows(type(commit), Verified) or _follows(type(commit), Drafted)


def uses_verifier(commit: Commit) -> bool:
    """Whether the policy is ``Verified``; cached as in ``is_proposing``."""
    return _follows(type(commit), Verified)


def is_partial(commit: Commit) -> TypeGuard[Partial]:
    """Whether the policy is ``Partial``; cached as in ``is_proposing``."""
    return _follows(type(commit), Partial)


class CommitDefaults(Checked):
    """Defaults of policies that draft nothing and, unless overridden, neither replace tokens nor close canvases."""

    @property
    def revises(self) -> bool:
        """False."""
        return False

    @property
    def closes(self) -> bool:
        """False."""
        return False

    @property
    def whole_block(self) -> bool:
        """The same as ``revises``."""
        return self.revises

    @property
    def reads(self) -> frozenset[str]:
        """Empty: only token and confidence are read."""
        return frozenset()

    def is_final(self, canvas: Canvas, edited: int) -> bool:
        """True: a full block is final immediately."""
        return True

    def draft(self, canvas: Canvas) -> np.ndarray:
        """Empty."""
        return canvas.tokens[:0]


class BlockWise(CommitDefaults):
    """Base of policies that use only the current block."""

    @property
    def whole_canvas(self) -> bool:
        """False."""
        return False


def most_confident(candidates: Candidates, count: int) -> np.ndarray:
    """Bool ``[n]``: the ``count`` most confident candidates; of equals, the leftmost."""
    return first(-candidates.confidence, count)


def first(values: np.ndarray, count: int) -> np.ndarray:
    """Bool ``[n]``: True at the ``count`` smallest of ``values [n]``; ties go to the leftmost."""
    chosen = np.zeros(len(values), dtype=bool)
    chosen[np.argsort(values, kind="stable")[:count]] = True
    return chosen
