"""A canvas whose answer is several branches: each continues the prompt as if it were alone, and none sees another.

The K/V of the prompt's whole pages are there once. A branch has pages of its own, which begin with the rest of the
prompt, since a page belongs to one branch or to all: K/V that are the same for all branches are copied there, as of a
prefix that is forked (copy-on-write of vLLM's pages, arXiv 2309.06180, section 4.4).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import gcd

import numpy as np


def branch_room(lengths: Sequence[int], page_size: int, block: int | None = None) -> int:
    """The most positions that branches of so many tokens take after a prompt, whatever its length. ``block``: as of
    ``Branches.laid_out``."""
    prefix = page_size - 1
    if block is not None:
        prefix += block - gcd(page_size, block)
    return page_size - 1 + sum(-(-(prefix + length) // page_size) * page_size for length in lengths)


@dataclass(frozen=True)
class Branches:
    """Where the branches of a canvas are.

    ``prompt``: length of the prompt; ``alike``: how many of its first positions see no branch, and have the same K/V
    for all; ``fork``: the positions of whole pages of those. Branch k is at positions ``starts[k]`` up to
    ``starts[k] + sizes[k]`` of the canvas: first the prompt's positions from ``fork`` on, then its own. The K/V of
    those before ``alike`` are copied, the others are run in each branch. ``starts`` are whole pages; what lies between
    branches holds nothing and is never run.
    """

    prompt: int
    alike: int
    fork: int
    starts: np.ndarray  # int64 [branches], ascending
    sizes: np.ndarray  # int64 [branches]

    @classmethod
    def laid_out(cls, prompt: int, lengths: Sequence[int], page_size: int, block: int | None = None) -> Branches:
        """Branches of ``lengths`` tokens of their own after a prompt of ``prompt`` positions.

        ``block``: positions, counted from 0 on, that see all of their block; None = the prompt sees no branch.
        """
        alike = prompt if block is None else prompt // block * block
        fork = alike // page_size * page_size
        sizes = np.array(lengths, np.int64) + (prompt - fork)
        pages = -(-sizes // page_size)
        first = -(-prompt // page_size)
        return cls(prompt, alike, fork, (first + np.cumsum(pages) - pages) * page_size, sizes)

    @property
    def size(self) -> int:
        """Positions of the canvas."""
        return int(self.starts[-1] + self.sizes[-1])

    @property
    def copied(self) -> int:
        """Positions that each branch begins with, and whose K/V are copied."""
        return self.alike - self.fork

    @property
    def prefix(self) -> int:
        """Positions of the prompt that each branch begins with."""
        return self.prompt - self.fork

    @property
    def own(self) -> int:
        """Tokens of all branches together, without those of the prompt."""
        return int(self.sizes.sum()) - len(self.sizes) * self.prefix

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
            own = at[..., self.prompt :] + np.arange(len(positions) - self.prefix)
            found[..., positions] = np.concatenate([at[..., self.fork : self.prompt], own], axis=-1)
        return found

    def repeats(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Where branches run those of ``positions`` (int64, ascending, of the prompt) again that differ among them:
        positions of the canvas (int64, ascending), and of each the index of its original in ``positions``."""
        indices = np.flatnonzero((positions >= self.alike) & (positions < self.prompt))
        shifted = self.starts[:, None] + (positions[indices] - self.fork)[None]
        return shifted.ravel(), np.tile(indices, len(self.starts))
