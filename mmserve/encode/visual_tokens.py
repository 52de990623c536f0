"""The cached visual tokens of one image or clip: their fields, validation, and pruning.

Shapes in names: K visual tokens after pruning, R rows of the prompt (visual tokens and text between them), D hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from mmserve.encode.clip_encoder import VISUAL
from mmserve.models.picture import Picture
from mmserve.prune.base import Plan
from mmserve.tiers.memory import Entry


@dataclass(frozen=True)
class Visual:
    """The visual tokens of one image or clip; shared through the cache, so read-only."""

    tokens_KD: Tensor
    ids_R: np.ndarray  # int64: the rows before pruning, ``VISUAL`` for each visual token
    places: np.ndarray  # int64, ascending: the rows left after pruning, including all text
    grid_K: np.ndarray  # int64: index of the grid of each token; -1 = none, such as a class token or a separator
    companion_KD: Tensor | None  # the companion's tokens, in the same places
    where: np.ndarray | None  # int64 [axes, R + 1], see ``axis_places``; None with one position axis


def fitting(entry: Entry, kinds: Sequence[tuple[torch.dtype, int]], *, axes: int = 1) -> bool:
    """Whether ``entry`` has all fields of a ``Visual``, each with the right dtype and size and in range.

    ``kinds``: dtype and width of the tokens of each model that encoded the item; ``axes``: of a position.
    """
    token_names = ("tokens", "beside")[: len(kinds)]
    if set(entry) != {"ids", "places", "grid", *token_names, *(["where"] if axes > 1 else [])}:
        return False
    ids, places, grid = entry["ids"], entry["places"], entry["grid"]
    if any(t.dtype != torch.int64 or t.dim() != 1 for t in (ids, places, grid)) or bool((ids < VISUAL).any()):
        return False
    if axes > 1 and not _are_places(entry["where"], axes, len(ids)):
        return False
    if bool(((places < 0) | (places >= len(ids))).any()) or bool((places.diff() <= 0).any()):
        return False
    rows = ids[places]
    count = int((rows == VISUAL).sum())
    if len(rows) - count != int((ids != VISUAL).sum()):
        return False
    if grid.shape != (count,) or bool((grid < -1).any()):
        return False
    tokens = [entry[name] for name in token_names]
    return all(t.dtype == dtype and t.shape == (count, width) for t, (dtype, width) in zip(tokens, kinds, strict=True))


def _are_places(where: Tensor, axes: int, rows: int) -> bool:
    return where.dtype == torch.int64 and where.shape == (axes, rows + 1) and not bool((where < 0).any())


def are_pixels(_i: int, entry: Entry) -> bool:
    """Whether ``entry`` has the pixels of a prepared item."""
    pixels = entry.get("pixels")
    return pixels is not None and pixels.dtype == torch.float32


def grid_of(picture: Picture) -> Tensor:
    """The grid index of each token of a picture (int64 ``[n]``); -1 = none."""
    of = torch.full((len(picture.tokens),), -1)
    for i, grid in enumerate(picture.grids):
        of[grid.patches] = i
    return of


def pruned(picture: Picture, plans: Sequence[Plan] | None) -> tuple[Tensor, Tensor]:
    """The tokens ``[k, D]`` of a picture after pruning, and their indices before it (int64 ``[k]``, on the CPU)."""
    tokens = picture.tokens
    if plans is None:
        return tokens, torch.arange(len(tokens))
    rest = torch.ones(len(tokens), dtype=torch.bool)
    left: list[Tensor] = []
    chosen: list[Tensor] = []
    for grid, plan in zip(picture.grids, plans, strict=True):
        rest[grid.patches] = False
        left.append(plan.apply(tokens[grid.patches.to(tokens.device)]))
        chosen.append(grid.patches[plan.places.cpu()])
    others = rest.nonzero().flatten()
    places = torch.cat([*chosen, others])
    order = places.argsort()
    return torch.cat([*left, tokens[others.to(tokens.device)]])[order.to(tokens.device)], places[order]
