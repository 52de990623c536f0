"""What a pruner sees of a picture, and what it decides; the counting that pruners share.

A pruner judges the grid of one image, or of each frame of a clip, by what the vision tower shows of itself. It never
sees the tokens that the decoder gets: it says which of them stay, and which are averaged into one, and that is then
done behind projector and pooling, the same for each model that looks at the picture.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from mmserve.core.request import Amount


class Evidence(Enum):
    """What a vision tower can show of its patches, all in fp32. "Its layer" is the one that made the features."""

    CLS_ROW = auto()  # [n]: how much the class token of its layer attends to each, mean over heads
    FIRST_CLS_ROW = auto()  # [n]: the same of the first layer
    COLUMN_MEANS = auto()  # [n]: how much all positions of its layer attend to each, mean over positions and heads
    KEYS = auto()  # [n, C]: keys of its layer, the heads side by side
    FIRST_FEATURES = auto()  # [n, C]: what the first layer made


@dataclass(frozen=True)
class Part:
    """A rectangle of a picture, in shares of its height and width."""

    top: float
    bottom: float
    left: float
    right: float


@dataclass(frozen=True)
class Look:
    """The grid of an image, tile or frame, row by row, and the evidence that was asked for.

    ``part``: which part of the picture a tile shows; the one grid of such a picture without it shows it whole.
    """

    rows: int
    columns: int
    evidence: Mapping[Evidence, Tensor]
    part: Part | None = None

    @property
    def size(self) -> int:
        """Patches of the grid."""
        return self.rows * self.columns

    def __getitem__(self, kind: Evidence) -> Tensor:
        return self.evidence[kind]


@dataclass(frozen=True)
class Plan:
    """What becomes of a grid of n patches.

    ``places``: int64 ``[k]``, ascending, the patches that stay, or in whose place their average stands. ``weights``:
    fp32 ``[k, n]``, what each is averaged from (rows sum to 1); None = the patches themselves.
    """

    places: Tensor
    weights: Tensor | None = None

    def apply(self, tokens: Tensor) -> Tensor:
        """The tokens ``[k, D]`` that are left of ``tokens [n, D]``, in their dtype."""
        if self.weights is None:
            return tokens[self.places.to(tokens.device)]
        return (self.weights.to(tokens.device) @ tokens.float()).to(tokens.dtype)


class Pruner(Protocol):
    """One method; it holds no state of a request."""

    #: What it judges by: towers that cannot show it cannot serve it.
    needs: ClassVar[frozenset[Evidence]]
    #: Names of the amounts that it understands.
    amounts: ClassVar[frozenset[str]]

    def plans(self, looks: Sequence[Look], amount: Amount) -> list[Plan]:
        """A plan for each grid of one image or clip; those of a clip share the amount."""
        ...


#: Amounts that say a number of tokens.
COUNTED = frozenset({"keep_ratio", "token_budget"})
#: Also those that leave the number to the scores.
SCORED = COUNTED | {"attention_mass"}


def total_count(sizes: Sequence[int], amount: Amount) -> int:
    """How many patches a ``COUNTED`` amount keeps of grids of these ``sizes`` together, one at least."""
    total = sum(sizes)
    wanted = amount.value if amount.name == "token_budget" else total * amount.value + 0.5
    return min(total, max(1, int(wanted)))


def counts(sizes: Sequence[int], amount: Amount) -> list[int]:
    """How many patches a ``COUNTED`` amount keeps of each grid: the total, spread in proportion and evenly over them.

    Fewer tokens than frames leave frames without any.
    """
    keep, total = total_count(sizes, amount), sum(sizes)
    ends = [sum(sizes[: i + 1]) * keep // total for i in range(len(sizes))]
    return [end - start for start, end in zip([0, *ends], ends, strict=False)]


def mass_count(scores: Tensor, mass: float) -> int:
    """The fewest of ``scores [n]`` (at least 0) whose sum is ``mass`` of all, as ZipVL counts (arXiv 2410.08584)."""
    ordered = scores.double().sort(descending=True).values.cumsum(0)
    return min(len(scores), int((ordered < mass * ordered[-1]).sum()) + 1)


def best(scores: Tensor, count: int) -> Plan:
    """The ``count`` patches with the highest ``scores [n]``, in their order; of equal ones the first."""
    return Plan(scores.argsort(descending=True, stable=True)[:count].sort().values)


def by_scores(scores: Sequence[Tensor], amount: Amount) -> list[Plan]:
    """The best patches of each grid, as many as ``amount`` says."""
    if amount.name == "attention_mass":
        kept = [mass_count(s, amount.value) for s in scores]
    else:
        kept = counts([len(s) for s in scores], amount)
    return [best(s, k) for s, k in zip(scores, kept, strict=True)]


def averaged(groups: Tensor, places: Tensor) -> Plan:
    """Each group of patches averaged into one.

    ``groups``: int64 ``[n]``, the group of each patch, -1 = dropped; ``places``: int64 ``[k]``, where each group's
    average stands.
    """
    members = (groups[None] == torch.arange(len(places), device=groups.device)[:, None]).float()
    order = places.argsort()
    return Plan(places[order], (members / members.sum(1, keepdim=True))[order])
