"""A canvas whose answer has several branches: each continues the prompt alone, and does not attend to the others.

The K/V of the prompt's full pages are stored once. Each branch has its own pages, which begin with the rest of the
prompt: K/V that are equal for all branches are copied there, as when a prefix is forked (copy-on-write of vLLM's pages,
arXiv 2309.06180, section 4.4).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import gcd

import numpy as np


def branch_capacity(lengths: Sequence[int], page_size: int, block: int | None = None) -> int:
    """The maximum number of positions that branches of these ``lengths`` take after a prompt of any length. ``block``:
    see ``Branches.laid_out``."""
    prefix = page_size - 1
    if block is not None:
        prefix += block - gcd(page_size, block)
    return page_size - 1 + sum(-(-(prefix + length) // page_size) * page_size for length in lengths)


@dataclass(frozen=True)
class Branches:
    """The layout of the branches of a canvas.

    ``prompt``: length of the prompt; ``alike``: number of its leading positions that attend to no branch, and have the
    same K/V for all; ``fork``: number of those on full pages. Branch k is at positions ``starts[k]`` to ``starts[k] +
    sizes[k]`` of the canvas: first the prompt's positions from ``fork`` on, then its own. The K/V of those before
    ``alike`` are copied, the others are computed in each branch. ``starts`` are page boundaries; the positions between
    branches are unused and never run.
    """

    prompt: int
    alike: int
    fork: int
    starts: np.ndarray  # int64 [branches], ascending
    sizes: np.ndarray  # int64 [branches]

    @classmethod
    def laid_out(cls, prompt: int, lengths: Sequence[int], page_size: int, block: int | None = None) -> Branches:
        """Branches with ``lengths`` tokens of their own, after a prompt of ``prompt`` positions.

        ``block``: length of attention blocks, counted from position 0; None = the prompt attends to no branch.
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
        """Number of positions at the start of each branch whose K/V are copied."""
        return self.alike - self.fork

    @property
    def prefix(self) -> int:
        """Number of prompt positions at the start of each branch."""
        return self.prompt - self.fork

    @property
    def own(self) -> int:
        """Total number of tokens of all branches, without those of the prompt."""
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
        """Rotary positions of the whole canvas, int64 ``[size]`` or ``[axes, size]``, from those of the prompt and of
        the position after it, ``[.., prompt + 1]``; None = each position is its index."""
        at = np.arange(self.prompt + 1) if prompt is None else prompt
        found = np.zeros((*at.shape[:-1], self.size), np.int64)
        found[..., : self.prompt] = at[..., : self.prompt]
        for positions in self.each():
            own = at[..., self.prompt :] + np.arange(len(positions) - self.prefix)
            found[..., positions] = np.concatenate([at[..., self.fork : self.prompt], own], axis=-1)
        return found

    def repeats(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Positions of the canvas (int64, ascending) at which branches recompute prompt ``positions`` (int64,
        ascending), and for each the index of its original in ``positions``."""
        indices = np.flatnonzero((positions >= self.alike) & (positions < self.prompt))
        shifted = self.starts[:, None] + (positions[indices] - self.fork)[None]
        return shifted.ravel(), np.tile(indices, len(self.starts))
