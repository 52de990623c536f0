"""Tries of token sequences: common prefixes share nodes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np


@dataclass
class Forest:
    """Nodes in the order in which they were added, parents before children; the parent of a first token is -1."""

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)  # 0 for a first token
    _children: dict[tuple[int, int], int] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.tokens)

    def add(self, tokens: Iterable[int], after: int = -1) -> int:
        """Add ``tokens`` after the node ``after``, reusing existing nodes. Returns the last node."""
        for token in tokens:
            node = self._children.get((after, token))
            if node is None:
                node = self._children[after, token] = len(self.tokens)
                self.tokens.append(token)
                self.parents.append(after)
                self.depths.append(self.depths[after] + 1 if after >= 0 else 0)
            after = node
        return after

    def mask(self) -> np.ndarray:
        """The attention mask of the nodes, bool ``[nodes, nodes]``: each attends to itself and its ancestors."""
        mask = np.eye(len(self), dtype=bool)
        for node, parent in enumerate(self.parents):
            if parent >= 0:
                mask[node] |= mask[parent]
        return mask
