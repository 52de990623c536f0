"""The token lattice of a search: the options, committed tokens and scores of each position of a part of the canvas."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from mmserve.constraint.search.vocabulary import Lexicon

Rows = slice | np.ndarray  # numeric indices, or a bool mask


@dataclass(frozen=True)
class TopK:
    """The model's best tokens for masked positions, best first."""

    positions: np.ndarray  # int64 [n], ascending; 0 is the first position of the answer
    tokens: np.ndarray  # int64 [n, K]
    log_probabilities: np.ndarray  # float32 [n, K]

    def rows(self, rows: Rows) -> TopK:
        """The entries of ``rows``."""
        return TopK(self.positions[rows], self.tokens[rows], self.log_probabilities[rows])


#: Log-probability of a token at a position without a row of logits.
UNSCORED = -20.0
#: Nats by which a token that is not a candidate is assumed to be less probable than the last candidate.
_UNLISTED = 1.0
#: Candidates that are less probable than the best one by this many nats are not tried.
_WINDOW = 9.0


@dataclass(frozen=True)
class TokenLattice:
    """Positions ``start`` to ``start + size``; all lists count from ``start``."""

    start: int
    size: int
    fixed: list[int | None]  # the committed token
    run: list[list[int]]  # committed tokens from here to the next masked position
    options: list[list[tuple[int, float]]]  # tokens with bytes to try, and their log-probabilities; the best first
    floor: list[float]  # log-probability of any other token
    end_token: list[int]  # the end token that is most probable here
    first: list[int]  # the committed token or the most probable one
    first_end: int  # number of first choices before the first end token
    ends_first: bool  # whether the first choices after that are all end tokens
    first_score: float
    upper_bound: list[float]  # [size + 1] of the score from here to the lattice's end
    end_score: list[float]  # [size + 1] score of end tokens only from here on; -inf where another token is committed
    old_score: list[float]  # [size + 1] score of the old witness from here on
    fixed_at: list[int]  # the committed positions, ascending
    old: list[int]  # the old witness
    old_content: list[int]  # the old witness up to its end, beyond the lattice
    ends: frozenset[int]
    lexicon: Lexicon

    def content(self, run: list[int]) -> list[int]:
        """``run`` up to its first end token."""
        for i, token in enumerate(run):
            if token in self.ends:
                return run[:i]
        return run

    def room(self, size: int) -> int:
        """Number of positions from ``start`` to the first committed end token, or to the end of an answer of
        ``size``."""
        return next((p for p in range(self.size) if self.fixed[p] in self.ends), size - self.start)

    def agrees(self, begin: int, tokens: Sequence[int], since: int = 0) -> bool:
        """Whether ``tokens[since:]`` at ``begin``, followed by the end of text, are consistent with committed tokens.

        A search calls this for many ``since`` of one long list, so nothing is copied.
        """
        shift = since - begin
        for p in self.fixed_at[bisect_left(self.fixed_at, begin) :]:
            token, i = self.fixed[p], p + shift
            if token != tokens[i] if i < len(tokens) else token not in self.ends:
                return False
        return True

    def score(self, begin: int, tokens: Sequence[int]) -> float:
        """Sum of log-probabilities of ``tokens`` and the end of text after them, from ``begin`` to the lattice's end.

        They must be consistent with committed tokens.
        """
        last = min(begin + len(tokens), self.size)
        total, fixed, floor, scores = self.end_score[last], self.fixed, self.floor, self._scores
        for p in range(begin, last):
            if fixed[p] is None:
                total += scores[p].get(tokens[p - begin], floor[p])
        return total

    @cached_property
    def _scores(self) -> list[dict[int, float]]:
        """Log-probabilities of the options."""
        return [dict(options) for options in self.options]


def build_lattice(
    known: np.ndarray,
    start: int,
    horizon: int,
    top: TopK,
    witness: np.ndarray,
    length: int,
    ends: frozenset[int],
    lexicon: Lexicon,
) -> TokenLattice:
    """The lattice from ``start`` to ``horizon``.

    Args:
        known: int64 ``[N]``, the answer's committed tokens, -1 where masked.
        witness: int64 ``[N]``, the old witness; ``length`` its tokens before the end.
    """
    size = horizon - start
    fixed: list[int | None] = [token if token >= 0 else None for token in known[start:horizon].tolist()]
    old = witness[start:horizon].tolist()
    candidates = dict(zip((top.positions - start).tolist(), _candidates(top), strict=True))
    scores = _position_scores(fixed, old, candidates, ends, lexicon.content)
    first_end = next((i for i, token in enumerate(scores.first) if token in ends), size)
    sums = _suffix_sums(fixed, scores)
    return TokenLattice(
        start,
        size,
        fixed,
        sums.run,
        scores.options,
        scores.floor,
        scores.end_token,
        scores.first,
        first_end,
        all(token in ends for token in scores.first[first_end:]),
        scores.first_score,
        sums.upper_bound,
        sums.end_score,
        sums.old_score,
        [p for p in range(size) if fixed[p] is not None],
        old,
        witness[start:length].tolist(),
        ends,
        lexicon,
    )


class _PositionScores(NamedTuple):
    """The options of each position and their scores; all lists are by position."""

    options: list[list[tuple[int, float]]]
    floor: list[float]
    end_score: list[float]  # of the best end token; -inf where another token is committed
    end_token: list[int]
    old_score: list[float]  # of the old witness's token
    first: list[int]
    first_score: float  # of all first choices together


def _position_scores(
    fixed: list[int | None],
    old: list[int],
    candidates: dict[int, list[tuple[int, float]]],
    ends: frozenset[int],
    content: frozenset[int],
) -> _PositionScores:
    """The scores of positions with the committed tokens ``fixed``, the old witness ``old`` and, by position, the
    model's ``candidates``."""
    default_end, first_score = min(ends), 0.0
    options: list[list[tuple[int, float]]] = []
    floor, end_score, end_token, old_score, first = [], [], [], [], []
    for p, committed in enumerate(fixed):
        tried: list[tuple[int, float]] = []
        if committed is not None:
            options.append(tried)
            floor.append(UNSCORED)
            end_score.append(0.0 if committed in ends else -math.inf)
            end_token.append(default_end)
            first.append(committed)
            old_score.append(0.0)
            continue
        witnessed = old[p]
        end, lowest, best, best_score, kept = None, UNSCORED, witnessed, UNSCORED, None
        listed = candidates.get(p)
        if listed:
            best, best_score = listed[0]
            lowest = listed[-1][1] - _UNLISTED
            scores = dict(listed)
            kept = scores.get(witnessed)
            if content.issuperset(scores):
                tried = listed
            else:
                tried = [option for option in listed if option[0] in content]
                end = next((option for option in listed if option[0] in ends), None)
        ending = end[1] if end else lowest
        if witnessed in ends:
            kept = ending
        elif kept is None:
            kept = lowest
            tried.append((witnessed, lowest))
        options.append(tried)
        floor.append(lowest)
        end_score.append(ending)
        end_token.append(end[0] if end else default_end)
        old_score.append(kept)
        first.append(best)
        first_score += best_score
    return _PositionScores(options, floor, end_score, end_token, old_score, first, first_score)


class _SuffixSums(NamedTuple):
    """The fields of ``TokenLattice`` that describe all positions from each one on."""

    run: list[list[int]]
    upper_bound: list[float]
    end_score: list[float]
    old_score: list[float]


def _suffix_sums(fixed: list[int | None], scores: _PositionScores) -> _SuffixSums:
    size, options, floor, of_end, of_old = len(fixed), scores.options, scores.floor, scores.end_score, scores.old_score
    run: list[list[int]] = [[] for _ in range(size + 1)]
    upper_bound, end_score, old_score = [0.0] * (size + 1), [0.0] * (size + 1), [0.0] * (size + 1)
    for p in range(size - 1, -1, -1):
        token = fixed[p]
        end_score[p] = end_score[p + 1] + of_end[p]
        if token is not None:
            run[p] = [token, *run[p + 1]]
            upper_bound[p], old_score[p] = upper_bound[p + 1], old_score[p + 1]
            continue
        best = max(options[p][0][1] if options[p] else floor[p], of_end[p], floor[p])
        upper_bound[p] = upper_bound[p + 1] + best
        old_score[p] = old_score[p + 1] + of_old[p]
    return _SuffixSums(run, upper_bound, end_score, old_score)


def _candidates(top: TopK) -> list[list[tuple[int, float]]]:
    """For each position the candidates to try and their log-probabilities, best first."""
    if not len(top.positions):
        return []
    scores = top.log_probabilities
    worth = np.isfinite(scores) & (scores >= scores[:, :1] - _WINDOW)
    counts = worth.sum(-1).tolist()
    most = max(counts)
    rows = zip(top.tokens[:, :most].tolist(), scores[:, :most].tolist(), counts, strict=True)
    return [list(zip(tokens[:n], row[:n], strict=True)) for tokens, row, n in rows]
