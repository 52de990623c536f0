"""The input of a K/V reduction for a request and for one layer, and its decision; the counting that several share.

A reduction selects the positions of a request that stay. Each layer and each K/V head has its own selection, of one
size, so that what is left fills the first of the request's pages and the others are free. Keys are stored rotated:
moving them does not change their positions.
Shapes in names: L positions held, G key/value heads, H query heads, K head size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from typing import ClassVar, Protocol

from torch import Tensor

from mmserve.core.values import Checked


class Signal(Enum):
    """What is noted of a request's passes."""

    ATTENTION = auto()  # how much each position held was attended to, a K/V head
    QUERIES = auto()  # mean and covariance of the queries


@dataclass(frozen=True)
class Held:
    """How many positions of a request have K/V now, and how many had them and were dropped.

    ``visual``: of the prompt; ``outputs``: answer tokens whose making has been noted.
    """

    positions: int
    dropped: int
    visual: int
    outputs: int
    page_size: int


@dataclass(frozen=True)
class LayerView:
    """One layer of a request, its positions in their order; all but keys and values in fp32.

    ``ahead(n)``: cosine and sine (``[1, rotated]``) of the rotary angles of the next n positions, averaged.
    """

    keys_LGK: Tensor  # rotated
    values_LGK: Tensor
    visual_GL: Tensor  # bool
    ahead: Callable[[int], tuple[Tensor, Tensor]]
    attention_GL: Tensor | None = None  # sums over the queries noted and the heads of a group
    query_mean_HK: Tensor | None = None  # before rotation
    query_covariance_HKK: Tensor | None = None


class Reduction(Protocol):
    """One policy with its numbers; it holds no state of a request."""

    #: What it asks to be noted.
    signals: ClassVar[frozenset[Signal]]

    def first_query(self, prompt: int) -> int:
        """The first position whose query is noted, of a request whose prompt has ``prompt`` positions."""
        ...

    def target(self, held: Held) -> int:
        """Positions that shall be left now; as many as there are = nothing is dropped."""
        ...

    def most(self, held: Held, left: int) -> int:
        """The most positions that are held from now on, where ``left`` more are to come."""
        ...

    def keep(self, view: LayerView, count: int) -> Tensor:
        """Which ``count`` of the positions held stay: int64 ``[G, count]``, ascending."""
        ...


class Budgeted(Checked):
    """What reductions to a ``budget`` of positions share."""

    budget: int

    def target(self, held: Held) -> int:
        """``budget`` positions where a whole page more is held: then a page is free again, and copying is worth it."""
        return self.budget if held.positions >= self.budget + held.page_size else held.positions

    def most(self, held: Held, left: int) -> int:
        """The most that ``target`` ever leaves held."""
        return min(held.positions + left, self.budget + held.page_size)


def check_budget(budget: int, sinks: int) -> None:
    """``ValueError`` for a budget that ``sinks`` leave nothing of."""
    if budget <= sinks:
        raise ValueError(f"budget must be at least {sinks + 1}, not {budget}")


def best(scores_GL: Tensor, count: int) -> Tensor:
    """The ``count`` positions of the highest scores of each head, in their order; of equal ones the first."""
    return scores_GL.argsort(dim=-1, descending=True, stable=True)[:, :count].sort(-1).values
