"""Partial paths of the beam search (``beam.py``): forks, their extensions with ranks, and options not tried."""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass, field

from mmserve.constraint.search.parser_states import ParserState


@dataclass(frozen=True)
class Path:
    """Tokens of the answer from the first masked position on, without end tokens, and their score."""

    tokens: list[int]
    score: float  # sum of log-probabilities up to the horizon


@dataclass(slots=True)
class Fork:
    """A path up to some position: its score, the parser's state there, and the path it extends by ``token``."""

    score: float
    state: ParserState
    last: Fork | None = field(default=None, repr=False)
    token: int = -1
    on_witness: bool = False  # whether this fork is a prefix of the old witness

    def tokens(self) -> list[int]:
        """All tokens of the path."""
        found: list[int] = []
        fork: Fork | None = self
        while fork is not None:
            if fork.token >= 0:
                found.append(fork.token)
            fork = fork.last
        return found[::-1]


#: A fork extended by one token: rank, score, the previous fork, the token, and its index among the options.
Extension = tuple[float, float, Fork, int, int]


class Extensions:
    """The extensions of all forks by one position."""

    def __init__(self, width: int) -> None:
        self.found: list[Extension] = []
        self.lowest = -math.inf  # rank below which a further one would not be kept
        self._width = width
        self._ranks: list[float] = []  # a heap of the best ranks so far, as many as forks are kept

    def add(self, penalty: float, score: float, fork: Fork, token: int, option: int) -> None:
        """Add ``fork`` extended by ``token``; its rank is the score minus ``penalty``."""
        rank, ranks = score - penalty, self._ranks
        self.found.append((rank, score, fork, token, option))
        if len(ranks) < self._width:
            heapq.heappush(ranks, rank)
        else:
            heapq.heappushpop(ranks, rank)
        if len(ranks) == self._width:
            self.lowest = ranks[0]


@dataclass(slots=True)
class Untried:
    """An option not tried: from ``fork``, at position ``p``, by one option of that position or also by those after
    it."""

    upper_bound: float  # of the scores of its paths
    p: int
    fork: Fork
    option: int
    alone: bool = False
