"""Token sequences that share their beginnings, as the nodes of a forest: each shared beginning is one path."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np


@dataclass
class Forest:
    """Nodes in the order in which they were added, parents before children; -1 is the parent of a first token."""

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)  # 0 of a first token
    _children: dict[tuple[int, int], int] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.tokens)

    def add(self, tokens: Iterable[int], after: int = -1) -> int:
        """The node at which ``tokens`` after the node ``after`` end; nodes are added where there are none yet."""
        for token in tokens:
            node = self._children.get((after, token))
            if node is None:
                node = self._children[after, token] = len(self.tokens)
                self.tokens.append(token)
                self.parents.append(after)
                self.depths.append(self.depths[after] + 1 if after >= 0 else 0)
            after = node
        return after

    def seen(self) -> np.ndarray:
        """Which nodes each node sees: itself and those on the path to it (bool ``[nodes, nodes]``)."""
        seen = np.eye(len(self), dtype=bool)
        for node, parent in enumerate(self.parents):
            if parent >= 0:
                seen[node] |= seen[parent]
        return seen
