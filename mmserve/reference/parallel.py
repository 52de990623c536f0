"""Training on several processes: each takes its share of every batch's rows, and gradients are averaged.

Started by ``torchrun --nproc-per-node N -m mmserve.reference.train``; without it there is one process. On two cores two
processes of one thread took 0.45 s a step, one process of two threads about 0.7 s: small operations do not thread well.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

T = TypeVar("T")


class Processes:
    """This process among those that train together."""

    def __init__(self) -> None:
        self.count = int(os.environ.get("WORLD_SIZE", "1"))
        if self.count > 1 and not dist.is_initialized():
            dist.init_process_group("gloo")
        self.rank = dist.get_rank() if self.count > 1 else 0

    @property
    def first(self) -> bool:
        """Whether this process logs, measures and saves."""
        return self.rank == 0

    def share(self, rows: list[T]) -> list[T]:
        """The rows of a batch that this process takes."""
        return rows[self.rank :: self.count]

    def average(self, parameters: Iterable[Tensor]) -> None:
        """Replace the gradients by their means over all processes."""
        if self.count == 1:
            return
        gradients = [p.grad if p.grad is not None else torch.zeros_like(p) for p in parameters]
        flat = _flatten_dense_tensors(gradients)
        dist.all_reduce(flat)
        flat /= self.count
        for gradient, mean in zip(gradients, _unflatten_dense_tensors(flat, gradients), strict=True):
            gradient.copy_(mean)

    def close(self) -> None:
        """Leave the group."""
        if self.count > 1:
            dist.destroy_process_group()
