"""Auxiliary losses of training: the tower predicts the shapes of a picture, the decoder what changed between pictures.

From answers alone a model of this size learns to use its pictures, to compare them and to find the moment of an event
slowly or not at all; linear heads on labels of the drawing program give every visual token a loss from the start. The
heads are used in training only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmserve.reference.model import GRID
from mmserve.reference.scenes import COLORS, KINDS, SIZES, Shape

#: Names of shapes, as a number from 1; 0 is an empty cell.
NAMES = len(KINDS) * len(COLORS)
#: A label without a loss (``ignore_index``).
IGNORED = -100


def name_of(kind: str, color: str) -> int:
    """The number of a shape's name, from 1."""
    return 1 + tuple(COLORS).index(color) * len(KINDS) + KINDS.index(kind)


def _patches(cells: Tensor) -> Tensor:
    """Labels of the nine cells ``[M, 3, 3, n]`` as labels of patches ``[M, VISUAL_TOKENS, n]``."""
    side = GRID // 3
    return cells.repeat_interleave(side, 1).repeat_interleave(side, 2).flatten(1, 2)


@dataclass(frozen=True)
class SceneLabels:
    """Labels of the tower's auxiliary loss: per patch (the shape in whose cell it is) and for the whole picture."""

    patches: Tensor  # [M, VISUAL_TOKENS, 7]: kind, colour, size, rank in reading order (0 = empty), row, column, name
    presence: Tensor  # [M, 18]: one bit for each colour × kind
    count: Tensor  # [M]

    @classmethod
    def of(cls, scenes: list[tuple[Shape, ...]]) -> SceneLabels:
        """Labels of pictures that show these shapes, in reading order."""
        colors = tuple(COLORS)
        cells = torch.zeros(len(scenes), 3, 3, 7, dtype=torch.long)
        cells[..., 4], cells[..., 5] = torch.arange(3)[:, None], torch.arange(3)
        presence = torch.zeros(len(scenes), len(colors) * len(KINDS))
        for m, shapes in enumerate(scenes):
            for rank, s in enumerate(shapes, start=1):
                kind, color = KINDS.index(s.kind), colors.index(s.color)
                name = name_of(s.kind, s.color)
                cells[m, s.row, s.column, :4] = torch.tensor([1 + kind, 1 + color, 1 + SIZES.index(s.size), rank])
                cells[m, s.row, s.column, 6] = name
                presence[m, name - 1] = 1.0
        return cls(_patches(cells), presence, torch.tensor([len(shapes) for shapes in scenes]))

    def to(self, device: torch.device) -> SceneLabels:
        """The same labels on ``device``."""
        return SceneLabels(self.patches.to(device), self.presence.to(device), self.count.to(device))


class TowerHeads(nn.Module):
    """Linear heads on the tower's features and CLS."""

    PATCH_CLASSES = (1 + len(KINDS), 1 + len(COLORS), 1 + len(SIZES), 5, 3, 3, 1 + NAMES)

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.patch = nn.Linear(hidden, sum(self.PATCH_CLASSES))
        self.presence = nn.Linear(hidden, NAMES)
        self.count = nn.Linear(hidden, 5)

    def forward(self, features: Tensor, pooled: Tensor, labels: SceneLabels) -> tuple[Tensor, Tensor]:
        """The auxiliary loss, and the share of pictures of which every patch label is predicted correctly."""
        loss = F.binary_cross_entropy_with_logits(self.presence(pooled).float(), labels.presence)
        loss = loss + F.cross_entropy(self.count(pooled).float(), labels.count)
        right = torch.ones(labels.patches.shape[:2], dtype=torch.bool, device=features.device)
        for index, logits in enumerate(self.patch(features).float().split(self.PATCH_CLASSES, dim=-1)):
            target = labels.patches[..., index]
            loss = loss + F.cross_entropy(logits.flatten(0, 1), target.flatten())
            right &= logits.argmax(-1) == target
        return loss, right.all(1).float().mean()


#: What may become of a cell from one picture to the next.
SAME, APPEARED, GONE, RECOLORED, OTHER = range(5)


def change_labels(
    held: Sequence[Mapping[tuple[int, int], tuple[str, str]]], times: Sequence[int] | None, *, pooled: bool
) -> Tensor:
    """Labels ``[visual tokens of all pictures, 4]`` for the decoder's auxiliary loss, of one prompt.

    ``held``: what each picture shows, as (row, column) → (kind, colour); ``times`` are the seconds written before
    of frames. The four: the name now, the name in the picture before, what became of the cell, and the time.
    """
    names = torch.zeros(len(held), 3, 3, dtype=torch.long)
    for m, cells in enumerate(held):
        for (row, column), (kind, color) in cells.items():
            names[m, row, column] = name_of(kind, color)
    labels = torch.full((len(held), 3, 3, 4), IGNORED)
    labels[..., 0] = names
    now, before = names[1:], names[:-1]
    labels[1:, ..., 1] = before
    same_kind = (now - 1) % len(KINDS) == (before - 1) % len(KINDS)
    became = torch.where(same_kind, RECOLORED, OTHER)
    became = torch.where(now == 0, GONE, torch.where(before == 0, APPEARED, became))
    labels[1:, ..., 2] = torch.where(now == before, SAME, became)
    if times is not None:
        labels[..., 3] = torch.tensor(times)[:, None, None]
    return (labels.flatten(1, 2) if pooled else _patches(labels)).flatten(0, 1)


def window_labels(
    clips: Sequence[Sequence[Mapping[tuple[int, int], tuple[str, str]]]],
    times: Sequence[Sequence[int]],
    ages: Sequence[int | None],
    carriers: int,
) -> Tensor:
    """Labels ``[carriers + visual tokens of all frames, 5]`` of a window of a stream; carriers have ``IGNORED``.

    Four are those of ``change_labels`` for each clip by itself: ``clips`` and ``times`` are what its frames show and
    the seconds written before them. The fifth is how many frames of its clip are in front of the token's: ``ages``
    is that of each clip's first frame here, None where the window does not show it.
    """
    labels = [torch.full((carriers, 5), IGNORED)]
    for held, written, age in zip(clips, times, ages, strict=True):
        of_clip = change_labels(held, written, pooled=True)
        in_front = torch.full((len(held),), IGNORED) if age is None else age + torch.arange(len(held))
        labels.append(torch.cat([of_clip, in_front.repeat_interleave(len(of_clip) // len(held))[:, None]], 1))
    return torch.cat(labels)


class ChangeHead(nn.Module):
    """Linear head for ``change_labels``, and of ``window_labels``, from the decoder's visual tokens."""

    CLASSES = (1 + NAMES, 1 + NAMES, 5, 8, 8)

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(hidden)
        self.read = nn.Linear(hidden, sum(self.CLASSES))

    def forward(self, hidden: Tensor, labels: Tensor) -> Tensor:
        """The auxiliary loss of hidden states ``[visual tokens, D]``; events count as much as cells that stay."""
        loss = torch.zeros((), device=hidden.device)
        read = self.read(self.norm(hidden.float())).float().split(self.CLASSES, dim=-1)
        for target, logits in zip(labels.unbind(1), read, strict=False):
            if bool((target == IGNORED).all()):
                continue
            each = F.cross_entropy(logits, target, ignore_index=IGNORED, reduction="none")
            loss = loss + _balanced(each, labels[:, 2], target != IGNORED)
        return loss


def _balanced(each: Tensor, became: Tensor, labelled: Tensor) -> Tensor:
    """Mean loss over tokens at which something happens plus the mean over the others, halved."""
    event = labelled & (became > SAME)
    quiet = labelled & (became <= SAME)
    means = [each[which].mean() for which in (event, quiet) if bool(which.any())]
    return torch.stack(means).mean()


class AuxiliaryHeads(nn.Module):
    """All heads: of the tower's features and of the decoder's visual tokens."""

    def __init__(self, tower_size: int, decoder_size: int) -> None:
        super().__init__()
        self.tower = TowerHeads(tower_size)
        self.changes = ChangeHead(decoder_size)
