"""Inputs and outputs of pruners, and the token counts that they share.

A pruner scores the grid of one image, or of each frame of a clip, by evidence from the vision tower. It does not
receive the decoder's tokens: it returns which of them are kept, and which are merged into one. This is applied after
projector and pooling, in the same way for each model.
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
    """What a model can provide about its patches, all in fp32: from its tower (the feature layer is the one that
    computes the features), or from its decoder over the whole prompt (``OF_DECODER``)."""

    CLS_ROW = auto()  # [n]: attention of the class token to each in the feature layer, mean over heads
    FIRST_CLS_ROW = auto()  # [n]: the same in the first layer
    LAST_CLS_ROW = auto()  # [n]: the same in the tower's last layer, which may come after the feature layer
    COLUMN_MEANS = auto()  # [n]: attention to each in the feature layer, mean over positions and heads
    KEYS = auto()  # [n, K]: keys of the feature layer without rotation, mean over heads
    FIRST_FEATURES = auto()  # [n, C]: output of the first layer
    LAST_ROW = auto()  # [n]: attention of the prompt's last token to each in the decoder's second layer
    MASK_ROWS = auto()  # [n]: attention of the masked answer to each in the decoder's middle layer


#: Evidence that requires the whole prompt. Means over heads, and over rows if there are several.
OF_DECODER = frozenset({Evidence.LAST_ROW, Evidence.MASK_ROWS})


@dataclass(frozen=True)
class Part:
    """A rectangle of a picture, in fractions of its height and width."""

    top: float
    bottom: float
    left: float
    right: float


@dataclass(frozen=True)
class GridView:
    """The grid of an image, tile or frame, row by row, with the requested evidence.

    ``part``: the part of the picture shown by a tile; None for the grid of the whole picture.
    """

    rows: int
    columns: int
    evidence: Mapping[Evidence, Tensor]
    part: Part | None = None

    @property
    def size(self) -> int:
        """Number of patches of the grid."""
        return self.rows * self.columns

    def __getitem__(self, kind: Evidence) -> Tensor:
        return self.evidence[kind]


@dataclass(frozen=True)
class Plan:
    """The pruning of a grid of n patches.

    ``places``: int64 ``[k]``, ascending: the patches that stay, or that are replaced by a merged token. ``weights``:
    fp32 ``[k, n]``, the weight of each patch in each token; None = the patches themselves. Both on the CPU.
    """

    places: Tensor
    weights: Tensor | None = None

    def apply(self, tokens: Tensor) -> Tensor:
        """The remaining tokens ``[k, D]`` of ``tokens [n, D]``, in their dtype."""
        if self.weights is None:
            return tokens[self.places.to(tokens.device)]
        return (self.weights.to(tokens.device) @ tokens.float()).to(tokens.dtype)


class Pruner(Protocol):
    """Selects patches; has no per-request state."""

    #: The evidence that it requires.
    needs: ClassVar[frozenset[Evidence]]
    #: Names of the supported amounts.
    amounts: ClassVar[frozenset[str]]

    def plans(self, views: Sequence[GridView], amount: Amount) -> list[Plan]:
        """A plan for each grid of one image or clip; the grids of a clip share the amount."""
        ...


def judged_by_decoder(pruner: Pruner | None) -> bool:
    """Whether ``pruner`` requires evidence from the decoder."""
    return pruner is not None and bool(pruner.needs & OF_DECODER)


#: Amounts that give a number of tokens.
COUNTED = frozenset({"keep_ratio", "token_budget"})
#: Also amounts whose number depends on the scores.
SCORED = COUNTED | {"attention_mass"}


def total_count(sizes: Sequence[int], amount: Amount) -> int:
    """Number of patches kept by a ``COUNTED`` amount from grids of these ``sizes`` together, at least one."""
    total = sum(sizes)
    wanted = amount.value if amount.name == "token_budget" else total * amount.value + 0.5
    return min(total, max(1, int(wanted)))


def counts(sizes: Sequence[int], amount: Amount) -> list[int]:
    """Number of patches kept by a ``COUNTED`` amount from each grid: the total, distributed in proportion to the sizes.

    With fewer tokens than frames, some frames have none.
    """
    keep, total = total_count(sizes, amount), sum(sizes)
    ends = [sum(sizes[: i + 1]) * keep // total for i in range(len(sizes))]
    return [end - start for start, end in zip([0, *ends], ends, strict=False)]


def on_cpu(scores: Sequence[Tensor]) -> list[np.ndarray]:
    """Scores (fp32 ``[n]``) of each grid, copied to the CPU together, for sorting."""
    if all(s.device.type == "cpu" for s in scores):
        return [s.numpy() for s in scores]
    ends = np.cumsum([len(s) for s in scores])
    return np.split(torch.cat(list(scores)).cpu().numpy(), ends[:-1])


def mass_count(scores: np.ndarray, mass: float) -> int:
    """The minimum number of ``scores [n]`` (non-negative) with a sum of at least ``mass`` of the total.

    ZipVL (arXiv 2410.08584) determines the number of important tokens of each decoder layer like this.
    """
    summed = np.cumsum(np.sort(scores.astype(np.float64))[::-1])
    return min(len(scores), int(np.count_nonzero(summed < mass * summed[-1])) + 1)


def highest(scores: np.ndarray, count: int) -> np.ndarray:
    """The ``count`` patches with the highest ``scores [n]``, ascending; ties are broken by order."""
    found = np.argsort(-scores, kind="stable")[:count]
    found.sort()
    return found


def best(scores: np.ndarray, count: int) -> Plan:
    """The plan that keeps the ``highest`` patches."""
    return Plan(torch.from_numpy(highest(scores, count)))


def by_scores(scores: Sequence[Tensor], amount: Amount) -> list[Plan]:
    """Plans that keep the best patches of each grid, as many as given by ``amount``."""
    found = on_cpu(scores)
    if amount.name == "attention_mass":
        kept = [mass_count(s, amount.value) for s in found]
    else:
        kept = counts([len(s) for s in found], amount)
    return [best(s, k) for s, k in zip(found, kept, strict=True)]


def best_together(scores: Sequence[Tensor], amount: Amount) -> list[Plan]:
    """Plans that keep the best patches over all grids, as many as given by a ``SCORED`` amount; frames may become
    empty."""
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
    """Plans that average each group of patches into one token, in T grids of one size.

    ``groups_Tn``: int64, the group of each patch in its grid, -1 = dropped; ``places_Tk``: int64, the place of each
    group's average, which is 0 for an empty group.
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
    """Lists of the indices of equal ``keys``, in order, for batched processing."""
    found: dict[Hashable, list[int]] = defaultdict(list)
    for i, key in enumerate(keys):
        found[key].append(i)
    return list(found.values())


def together(views: Sequence[GridView], which: Sequence[int], kind: Evidence) -> Tensor:
    """Stacked evidence of ``kind`` of the views ``which``, all of one size: ``[T, n]`` or ``[T, n, C]``."""
    found = [views[i][kind] for i in which]
    return found[0][None] if len(found) == 1 else torch.stack(found)


def highest_of_each(scores_Tn: np.ndarray, count: int) -> np.ndarray:
    """``highest`` for each row of scores: int64 ``[T, count]``."""
    found = np.argsort(-scores_Tn, axis=1, kind="stable")[:, :count]
    found.sort(axis=1)
    return found
