"""Where a parameter lies within a tensor of a checkpoint that holds several."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class Rows:
    """Rows from ``start`` on of a tensor of ``total`` rows, where several parameters lie in one tensor."""

    name: str
    start: int
    total: int


@dataclass(frozen=True)
class Slab:
    """One expert's weights within those of all ``experts``: from row ``start`` on of ``[experts, total, in]``.

    Or from column ``start`` on of ``[experts, in, total]``: the tensor's shape decides. Where both fit, it is the
    first, as in transformers.
    """

    name: str
    expert: int
    experts: int
    start: int
    total: int

    def whole(self, shape: tuple[int, ...], *, transposed: bool = False) -> tuple[int, ...]:
        """The shape that the tensor has if the weights have ``shape``."""
        return (self.experts, shape[1], self.total) if transposed else (self.experts, self.total, shape[1])

    def of(self, header: Any, shape: tuple[int, ...]) -> Tensor:
        """The weights ``[out, in]`` of ``shape``, of an open tensor of safetensors; only they are read."""
        here = slice(self.start, self.start + shape[0])
        if tuple(header.get_shape()) == self.whole(shape):
            made: Tensor = header[self.expert, here]
            return made
        columns: Tensor = header[self.expert, :, here]
        return columns.T


@dataclass(frozen=True)
class Whole:
    """A tensor in memory as safetensors has one in a file, for ``Slab.of``."""

    tensor: Tensor

    def get_shape(self) -> list[int]:
        """Its shape."""
        return list(self.tensor.shape)

    def __getitem__(self, where: Any) -> Tensor:
        return self.tensor[where]


#: Where a parameter lies: a tensor, or a part of one.
Part = str | Rows | Slab
