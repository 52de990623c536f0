"""A canvas whose answer is several branches: each continues the prompt as if it were alone, and none sees another.

The K/V of the prompt's whole pages are there once. A branch has pages of its own, which begin with a copy of the rest
of the prompt, since a page belongs to one branch or to all.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np


def branch_room(lengths: Sequence[int], page_size: int) -> int:
    """The most positions that branches of so many tokens take after a prompt, whatever its length."""
    copied = page_size - 1
    return copied + sum(-(-(copied + length) // page_size) * page_size for length in lengths)


@dataclass(frozen=True)
class Branches:
    """Where the branches of a canvas are.

    ``prompt``: length of the prompt; ``fork``: the positions of its whole pages. Branch k is at positions
    ``starts[k]`` up to ``starts[k] + sizes[k]`` of the canvas: first a copy of the prompt's positions from ``fork``
    on, then its own. ``starts`` are whole pages; what lies between branches holds nothing and is never run.
    """

    prompt: int
    fork: int
    starts: np.ndarray  # int64 [branches], ascending
    sizes: np.ndarray  # int64 [branches]

    @classmethod
    def laid_out(cls, prompt: int, lengths: Sequence[int], page_size: int) -> Branches:
        """Branches of ``lengths`` tokens of their own after a prompt of ``prompt`` positions."""
        fork = prompt // page_size * page_size
        sizes = np.array(lengths, np.int64) + (prompt - fork)
        pages = -(-sizes // page_size)
        first = -(-prompt // page_size)
        return cls(prompt, fork, (first + np.cumsum(pages) - pages) * page_size, sizes)

    @property
    def size(self) -> int:
        """Positions of the canvas."""
        return int(self.starts[-1] + self.sizes[-1])

    @property
    def copied(self) -> int:
        """Positions of the prompt that each branch begins with."""
        return self.prompt - self.fork

    @property
    def own(self) -> int:
        """Tokens of all branches together, without what they copy."""
        return int(self.sizes.sum()) - len(self.sizes) * self.copied

    @property
    def last(self) -> np.ndarray:
        """The last position (int64) of each branch."""
        return self.starts + self.sizes - 1

    def each(self) -> Iterator[np.ndarray]:
        """The positions (int64, ascending) of each branch."""
        for start, size in zip(self.starts.tolist(), self.sizes.tolist(), strict=True):
            yield np.arange(start, start + size)

    def places(self, prompt: np.ndarray | None) -> np.ndarray:
        """Rotary positions of the whole canvas, int64 ``[size]``, or ``[axes, size]`` as of ``prompt``: those of the
        prompt and the one after it, ``[.., prompt + 1]``; None = each is its index."""
        at = np.arange(self.prompt + 1) if prompt is None else prompt
        found = np.zeros((*at.shape[:-1], self.size), np.int64)
        found[..., : self.prompt] = at[..., : self.prompt]
        for positions in self.each():
            own = at[..., self.prompt :] + np.arange(len(positions) - self.copied)
            found[..., positions] = np.concatenate([at[..., self.fork : self.prompt], own], axis=-1)
        return found

    def copies(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Where branches have copies of those of ``positions`` (int64, ascending, of the prompt) that they copy:
        positions of the canvas (int64, ascending), and of each the index of its original in ``positions``."""
        indices = np.flatnonzero((positions >= self.fork) & (positions < self.prompt))
        shifted = self.starts[:, None] + (positions[indices] - self.fork)[None]
        return shifted.ravel(), np.tile(indices, len(self.starts))
