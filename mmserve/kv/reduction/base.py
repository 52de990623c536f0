"""The interface of K/V reductions: their input for a request and for one layer, and their decision.

A reduction selects the positions of a request that are kept. Each layer and each K/V head has its own selection, all of
the same size, so that the kept positions fill the first of the request's pages and the others can be freed. Keys are
stored rotated: moving them does not change their positions. Shapes in names: L positions held, G key/value heads, H
query heads, K head size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from typing import ClassVar, Protocol

from torch import Tensor

from mmserve.core.values import Checked


class Signal(Enum):
    """The evidence recorded in a request's passes."""

    ATTENTION = auto()  # attention to each position held, for each K/V head
    QUERIES = auto()  # mean and covariance of the queries


@dataclass(frozen=True)
class Held:
    """The number of positions of a request that have K/V now, and of those that were dropped.

    ``visual``: visual positions of the prompt; ``outputs``: answer tokens whose passes were observed.
    """

    positions: int
    dropped: int
    visual: int
    outputs: int
    page_size: int


@dataclass(frozen=True)
class LayerView:
    """One layer of a request, its positions in order; everything but keys and values is fp32.

    ``ahead(n)``: cosine and sine (``[1, rotated]``) of the rotary angles of the next n positions, averaged.
    """

    keys_LGK: Tensor  # rotated
    values_LGK: Tensor
    visual_GL: Tensor  # bool
    ahead: Callable[[int], tuple[Tensor, Tensor]]
    attention_GL: Tensor | None = None  # sums over observed queries and the heads of a group
    query_mean_HK: Tensor | None = None  # before rotation
    query_covariance_HKK: Tensor | None = None


class Reduction(Protocol):
    """One policy with its parameters; holds no state of a request."""

    #: The observations that it needs.
    signals: ClassVar[frozenset[Signal]]

    def first_query(self, prompt: int) -> int:
        """The first position whose query is observed, for a prompt of ``prompt`` positions."""
        ...

    def target(self, held: Held) -> int:
        """The number of positions to keep now; the current number = nothing is dropped."""
        ...

    def most(self, held: Held, left: int) -> int:
        """The maximum number of positions held from now on, if ``left`` more follow."""
        ...

    def select(self, view: LayerView, count: int) -> Tensor:
        """The ``count`` positions to keep: int64 ``[G, count]``, ascending."""
        ...


class Budgeted(Checked):
    """Base of reductions to a ``budget`` of positions."""

    budget: int

    def target(self, held: Held) -> int:
        """``budget``, once a full page more is held: then a page can be freed, which is worth the copying."""
        return self.budget if held.positions >= self.budget + held.page_size else held.positions

    def most(self, held: Held, left: int) -> int:
        """The maximum that ``target`` leaves."""
        return min(held.positions + left, self.budget + held.page_size)


def check_budget(budget: int, sinks: int) -> None:
    """Raises ``ValueError`` if ``sinks`` use up the whole budget."""
    if budget <= sinks:
        raise ValueError(f"budget must be at least {sinks + 1}, not {budget}")


def best(scores_GL: Tensor, count: int) -> Tensor:
    """The ``count`` positions with the highest scores of each head, ascending; ties go to the first."""
    return scores_GL.argsort(dim=-1, descending=True, stable=True)[:, :count].sort(-1).values
