"""Observation of a pass: the top-K tokens of each row of logits, from which the search draws; and the constraint's
cost.

Only a few numbers of each row are kept, slice by slice. The cost of a constraint is CPU time of the decode thread, not
wall time: it does not depend on the machine's load.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from mmserve.constraint.search.lattice import Rows, TopK
from mmserve.constraint.search.vocabulary import flags_of
from mmserve.constraint.search.witness import Outcome
from mmserve.core.events import ConstraintStats


@dataclass
class Meter:
    """Cost counters of one request; a step is all the work of the constraint for one forward pass."""

    fallbacks: int = 0
    late: int = 0
    forward_seconds: float = 0.0
    _steps: list[float] = field(default_factory=list)  # seconds
    _open: float = 0.0  # seconds of the current step
    _outcomes: set[Outcome] = field(default_factory=set)  # of its searches

    @property
    def seconds(self) -> float:
        """CPU time of all steps so far."""
        return sum(self._steps) + self._open

    @contextmanager
    def running(self) -> Iterator[None]:
        """Add the CPU time of the block, which stays on one thread, to the current step."""
        begun = time.thread_time()
        try:
            yield
        finally:
            self._open += time.thread_time() - begun

    def searched(self, outcome: Outcome) -> None:
        """Record the outcome of a search of the current step."""
        self._outcomes.add(outcome)

    def end_step(self) -> None:
        """End the current step."""
        self._steps.append(self._open)
        self.fallbacks += self._outcomes != {Outcome.FOUND} and bool(self._outcomes)
        self.late += Outcome.LATE in self._outcomes
        self._open, self._outcomes = 0.0, set()

    def report(self) -> ConstraintStats:
        """The counts so far."""
        return ConstraintStats(
            steps=len(self._steps),
            fallbacks=self.fallbacks,
            late=self.late,
            search_seconds=sum(self._steps),
            forward_seconds=self.forward_seconds,
            step_ms=tuple(1000 * seconds for seconds in self._steps),
        )


#: Number of tokens kept of each row. The search leaves out tokens 9 nats below the best, usually more than these.
KEPT = 16


@dataclass(frozen=True)
class Ranked:
    """The top-K tokens of each position of a pass."""

    top: TopK  # positions relative to the answer's start; scored as sampled, or by log-probability
    plain: np.ndarray  # float32 [n, K], log-probabilities of these tokens before temperature, filters and constraint
    own: np.ndarray  # float32 [n], log-probabilities of the witness's tokens
    kept: np.ndarray  # float32 [n], log of the total probability of allowed tokens; 0 if unknown

    def log_probabilities(self, witness: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """Float32 ``[n]``: log-probabilities of ``tokens [n]``, one for each position; ``own`` are those of ``witness
        [n]``.

        A token that is neither among the best nor the witness's gets the log-probability of the last of the best.
        """
        same = self.top.tokens == tokens[:, None]
        listed = np.where(same, self.plain, -np.inf).max(-1)
        lowest = np.where(np.isfinite(self.plain), self.plain, np.inf).min(-1)
        other = np.where(tokens == witness, self.own, np.where(np.isfinite(lowest), lowest, -np.inf))
        return np.where(same.any(-1), listed, other).astype(np.float32)

    def rows(self, rows: Rows) -> Ranked:
        """The entries of ``rows``."""
        return Ranked(self.top.rows(rows), self.plain[rows], self.own[rows], self.kept[rows])

    @classmethod
    def joined(cls, parts: Sequence[Ranked]) -> Ranked:
        """``parts`` merged, by position."""
        order = np.argsort(np.concatenate([part.top.positions for part in parts]))
        arrays = [(*vars(part.top).values(), part.plain, part.own, part.kept) for part in parts]
        positions, tokens, scores, *others = (np.concatenate(each)[order] for each in zip(*arrays, strict=True))
        return cls(TopK(positions, tokens, scores), *others)


class TopKObserver:
    """Records a ``Ranked`` while logits become candidates (``decode/sampler.py``).

    ``positions`` are relative to the answer's start; ``witness`` are tokens whose logits are recorded in addition, one
    for each position; ``allowed``: the allowed tokens (a bitmask) of rows where they are known: other tokens are masked
    out.
    """

    def __init__(
        self, positions: np.ndarray, witness: np.ndarray, allowed: Mapping[int, np.ndarray], meter: Meter
    ) -> None:
        self._positions, self._witness, self._allowed = positions, torch.from_numpy(witness), allowed
        self.meter = meter
        self._own = torch.zeros(0)  # logits of the witness's tokens, for the current slice
        self._restricted: dict[int, Tensor] = {}  # restricted rows, with their logsumexp before
        self._parts: list[tuple[Tensor, ...]] = []
        self._row = 0

    def restrict(self, logits: Tensor) -> None:
        """Mask out, in place, the tokens that are not allowed in the next rows ``logits [n, V]``."""
        with self.meter.running():
            own = self._witness[self._row : self._row + len(logits)].to(logits.device)
            self._own = logits.gather(-1, own[:, None])[:, 0]
            self._restricted = {}
            for i in range(len(logits)):
                mask = self._allowed.get(self._row + i)
                if mask is not None:
                    ruled_out = torch.from_numpy(~flags_of(mask, logits.shape[-1]))
                    kept = logits[i].masked_fill(ruled_out.to(logits.device), -torch.inf)
                    if kept.max() > -torch.inf:  # else all allowed tokens have probability 0: nothing is ruled out
                        self._restricted[i] = torch.logsumexp(logits[i], -1)
                        logits[i] = kept

    def take(
        self,
        logits: Tensor,
        log_z: Tensor,
        tempered: Tensor | None,
        noised: Tensor | None,
        masks: Tensor | None = None,
    ) -> None:
        """Record the best tokens of the rows that were just restricted: by log-probability, or as sampled."""
        with self.meter.running():
            before = log_z.clone() if self._restricted else log_z
            for i, whole in self._restricted.items():
                before[i] = whole
            if masks is not None:
                before = torch.logaddexp(before, masks)
            if tempered is None or noised is None:
                scores, mass = logits, log_z[:, None]
            else:
                scores, mass = noised, torch.logsumexp(tempered, -1, keepdim=True)
            best = scores.topk(min(KEPT, logits.shape[-1]), -1)
            values = best.values - mass
            plain = logits.gather(-1, best.indices) - before[:, None]
            self._parts.append((best.indices, values, plain, self._own - before, log_z - before))
            self._row += len(logits)

    def ranked(self) -> Ranked:
        """All rows."""
        with self.meter.running():
            tokens, scores, plain, own, kept = (
                torch.cat(parts).cpu().numpy() for parts in zip(*self._parts, strict=True)
            )
            top = TopK(self._positions, tokens.astype(np.int64), scores.astype(np.float32))
            return Ranked(top, plain.astype(np.float32), own.astype(np.float32), kept.astype(np.float32))


def first_among(top: TopK, row: int, token: int) -> TopK:
    """``top`` with ``token`` as the best of a row, scored just above the previous best."""
    at = np.flatnonzero(top.tokens[row] == token)
    tokens, scores = top.tokens.copy(), top.log_probabilities.copy()
    last = int(at[0]) if len(at) else tokens.shape[1] - 1
    tokens[row, 1 : last + 1] = top.tokens[row, :last]
    scores[row, 1 : last + 1] = top.log_probabilities[row, :last]
    tokens[row, 0], scores[row, 0] = token, np.nextafter(scores[row, 0], np.float32(np.inf))
    return TopK(top.positions, tokens, scores)
