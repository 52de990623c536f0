"""The location of a parameter in a checkpoint's tensor that contains several."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class Rows:
    """Rows from ``start`` on of a tensor of ``total`` rows that contains several parameters."""

    name: str
    start: int
    total: int


@dataclass(frozen=True)
class ExpertSlice:
    """One expert's weights in a tensor of all ``experts``: rows from ``start`` on of ``[experts, total, in]``.

    Or columns from ``start`` on of ``[experts, in, total]``, depending on the tensor's shape. If both fit, the first,
    as in transformers.
    """

    name: str
    expert: int
    experts: int
    start: int
    total: int

    def whole(self, shape: tuple[int, ...], *, transposed: bool = False) -> tuple[int, ...]:
        """The shape of the tensor for weights of ``shape``."""
        return (self.experts, shape[1], self.total) if transposed else (self.experts, self.total, shape[1])

    def of(self, header: Any, shape: tuple[int, ...]) -> Tensor:
        """The weights ``[out, in]`` of ``shape`` from an open safetensors tensor; only these are read."""
        here = slice(self.start, self.start + shape[0])
        if tuple(header.get_shape()) == self.whole(shape):
            made: Tensor = header[self.expert, here]
            return made
        columns: Tensor = header[self.expert, :, here]
        return columns.T


@dataclass(frozen=True)
class Whole:
    """A tensor in memory with the interface of a safetensors slice, for ``ExpertSlice.of``."""

    tensor: Tensor

    def get_shape(self) -> list[int]:
        """The tensor's shape."""
        return list(self.tensor.shape)

    def __getitem__(self, where: Any) -> Tensor:
        return self.tensor[where]


#: The location of a parameter: a tensor, or a part of one.
Part = str | Rows | ExpertSlice
