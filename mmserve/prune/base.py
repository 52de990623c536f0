"""What a pruner sees of a picture, and what it decides; the counting that pruners share.

A pruner judges the grid of one image, or of each frame of a clip, by what the vision tower shows of itself. It never
sees the tokens that the decoder gets: it returns which of them are kept, and which are averaged into one. That is
applied after projector and pooling, the same for each model.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import ClassVar, Protocol

import numpy as np
import torch
from torch import Tensor

from mmserve.core.request import Amount


class Evidence(Enum):
    """What a model can show of its patches, all in fp32: its tower, whose layer is the one that made the features,
    or its decoder, of the whole prompt (``OF_DECODER``)."""

    CLS_ROW = auto()  # [n]: how much the class token of its layer attends to each, mean over heads
    FIRST_CLS_ROW = auto()  # [n]: the same of the first layer
    LAST_CLS_ROW = auto()  # [n]: the same of the tower's last layer, which may come after its layer
    COLUMN_MEANS = auto()  # [n]: how much all positions of its layer attend to each, mean over positions and heads
    KEYS = auto()  # [n, K]: keys of its layer before any rotation, mean over heads
    FIRST_FEATURES = auto()  # [n, C]: what the first layer made
    LAST_ROW = auto()  # [n]: how much the prompt's last token attends to each in the decoder's second layer
    MASK_ROWS = auto()  # [n]: how much the masked answer attends to each in the decoder's middle layer


#: What is known only when the prompt is whole. Means over heads, and over rows where there are several.
OF_DECODER = frozenset({Evidence.LAST_ROW, Evidence.MASK_ROWS})


@dataclass(frozen=True)
class Part:
    """A rectangle of a picture, in shares of its height and width."""

    top: float
    bottom: float
    left: float
    right: float


@dataclass(frozen=True)
class GridView:
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
    """What is done with a grid of n patches.

    ``places``: int64 ``[k]``, ascending: the patches that stay, or whose place a merged token takes. ``weights``: fp32
    ``[k, n]``, the weight of each patch in each token; None = the patches themselves. Both on the CPU.
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

    def plans(self, views: Sequence[GridView], amount: Amount) -> list[Plan]:
        """A plan for each grid of one image or clip; those of a clip share the amount."""
        ...


def judged_by_decoder(pruner: Pruner | None) -> bool:
    """Whether ``pruner`` must see the whole prompt."""
    return pruner is not None and bool(pruner.needs & OF_DECODER)


#: Amounts that are a number of tokens.
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


def on_cpu(scores: Sequence[Tensor]) -> list[np.ndarray]:
    """Scores (fp32 ``[n]``) of each grid where they are sorted and counted: on the CPU, all brought there together."""
    if all(s.device.type == "cpu" for s in scores):
        return [s.numpy() for s in scores]
    ends = np.cumsum([len(s) for s in scores])
    return np.split(torch.cat(list(scores)).cpu().numpy(), ends[:-1])


def mass_count(scores: np.ndarray, mass: float) -> int:
    """The fewest of ``scores [n]`` (at least 0) whose sum is ``mass`` of all.

    ZipVL (arXiv 2410.08584) counts the important tokens of each layer of a decoder so.
    """
    summed = np.cumsum(np.sort(scores.astype(np.float64))[::-1])
    return min(len(scores), int(np.count_nonzero(summed < mass * summed[-1])) + 1)


def highest(scores: np.ndarray, count: int) -> np.ndarray:
    """The ``count`` patches with the highest ``scores [n]``, ascending; of equal ones the first."""
    found = np.argsort(-scores, kind="stable")[:count]
    found.sort()
    return found


def best(scores: np.ndarray, count: int) -> Plan:
    """That the ``highest`` patches stay."""
    return Plan(torch.from_numpy(highest(scores, count)))


def by_scores(scores: Sequence[Tensor], amount: Amount) -> list[Plan]:
    """The best patches of each grid, as many as ``amount`` gives."""
    found = on_cpu(scores)
    if amount.name == "attention_mass":
        kept = [mass_count(s, amount.value) for s in found]
    else:
        kept = counts([len(s) for s in found], amount)
    return [best(s, k) for s, k in zip(found, kept, strict=True)]


def best_together(scores: Sequence[Tensor], amount: Amount) -> list[Plan]:
    """The best patches of all grids together, as many as a ``SCORED`` amount gives: frames without any may be left."""
    found = on_cpu(scores)
    joined = found[0] if len(found) == 1 else np.concatenate(found)
    count = mass_count(joined, amount.value) if amount.name == "attention_mass" else total_count([len(joined)], amount)
    chosen = highest(joined, count)
    starts = np.cumsum([0, *(len(s) for s in found)])
    cuts = np.searchsorted(chosen, starts).tolist()
    return [
        Plan(torch.from_numpy(chosen[cut:end] - start))
        for start, cut, end in zip(starts.tolist(), cuts, cuts[1:], strict=False)
    ]


def averaged(groups_Tn: np.ndarray, places_Tk: np.ndarray) -> list[Plan]:
    """Each group of patches averaged into one, in T grids of one size.

    ``groups_Tn``: int64, the group of each patch in its grid, -1 = dropped; ``places_Tk``: int64, the place of each
    group's average, which is 0 where a group has no patches.
    """
    (tiles, size), count = groups_Tn.shape, places_Tk.shape[1]
    order = places_Tk.argsort(1) + np.arange(tiles)[:, None] * count
    row = np.empty(tiles * count, np.int64)
    row[order.ravel()] = np.arange(tiles * count)
    tile, member = np.nonzero(groups_Tn >= 0)
    of = groups_Tn[tile, member] + tile * count
    weights = np.zeros((tiles * count, size), np.float32)
    weights[row[of], member] = 1 / np.bincount(of, minlength=tiles * count)[of]
    chosen = torch.from_numpy(places_Tk.ravel()[order])
    return [Plan(*of_tile) for of_tile in zip(chosen, torch.from_numpy(weights).view(tiles, count, size), strict=True)]


def grouped(keys: Sequence[Hashable]) -> list[list[int]]:
    """Indices of those that are equal, in order: what is alike can be judged together."""
    found: dict[Hashable, list[int]] = defaultdict(list)
    for i, key in enumerate(keys):
        found[key].append(i)
    return list(found.values())


def together(views: Sequence[GridView], which: Sequence[int], kind: Evidence) -> Tensor:
    """Evidence of ``kind`` of those ``views``, all of one size: ``[T, n]`` or ``[T, n, C]``."""
    found = [views[i][kind] for i in which]
    return found[0][None] if len(found) == 1 else torch.stack(found)


def highest_of_each(scores_Tn: np.ndarray, count: int) -> np.ndarray:
    """``highest`` of each row of scores: int64 ``[T, count]``."""
    found = np.argsort(-scores_Tn, axis=1, kind="stable")[:, :count]
    found.sort(axis=1)
    return found
