"""A training batch: rows of chats as tensors, and what the loss takes of each position."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from mmserve.reference.auxiliary import SceneLabels

#: No column.
NO_COLUMN = -1


@dataclass(frozen=True)
class Batch:
    """Rows ``[B, T]`` of chats, padded on the right, and what the loss takes of each position.

    ``pixels [M, 3, PIXELS, PIXELS]`` are all pictures of all rows in order (None for text), whose tokens are where
    ``visual_at`` is True; ``pooled``: they are frames of videos. A ``packed`` row asks several questions of
    the same media, each as if alone: ``question`` numbers them from 1 (0 = the media before them), and ``positions``
    count on from the media in each. ``share`` sums to 1 over the answer tokens of a question and is 0 elsewhere;
    ``block`` is a position's answer block (0 outside of answers); ``unpadded`` is False at padding. ``labels`` are for
    the tower's auxiliary loss, None where the pictures are frames; ``changes [visual tokens, n]`` for the decoder's
    (``change_labels``).
    ``visual``, where given, are the visual tokens themselves, in order, in place of pictures.
    ``sources [B, T]``: of answer tokens that are characters of the question, their column there; of the slot of a
    choice, the column of the right option's label; else ``NO_COLUMN``. ``option_labels [B, T]`` and
    ``option_ends [B, T]``, of typed questions: the labels of options, and the last token of each option.
    ``context_end [B, T]``, where given, limits what a position attends to of question 0: to the positions before it.
    """

    kind: str
    pixels: Tensor | None
    pooled: bool
    ids: Tensor
    visual_at: Tensor
    unpadded: Tensor
    packed: bool
    question: Tensor
    positions: Tensor
    share: Tensor
    block: Tensor
    labels: SceneLabels | None
    changes: Tensor | None
    sources: Tensor | None = None
    option_labels: Tensor | None = None
    option_ends: Tensor | None = None
    context_end: Tensor | None = None
    visual: Tensor | None = None

    def to(self, device: torch.device) -> Batch:
        """The same batch on ``device``."""
        values: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(self)}
        moved: dict[str, Any] = {n: v.to(device) for n, v in values.items() if isinstance(v, Tensor | SceneLabels)}
        return replace(self, **moved)

    def with_padding(self, most: int) -> Batch:
        """The same batch with at most ``most`` tokens of padding after each answer, and no longer than that takes.

        Only for rows of one question.
        """
        largest = self.share.amax(1, keepdim=True)
        end = (self.share > 0.5 * largest).cumsum(1).argmax(1, keepdim=True) + 1 + most
        columns = torch.arange(self.share.shape[1], device=self.share.device)
        shape, length = self.ids.shape, min(int(end.max()), self.share.shape[1])
        values: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(self)}
        values["share"] = torch.where(columns < end, self.share, 0.0)
        values["unpadded"] = self.unpadded & (columns < end)
        cut: dict[str, Any] = {
            n: v[:, :length] for n, v in values.items() if isinstance(v, Tensor) and v.shape == shape
        }
        return replace(self, **cut)

    def attention_mask(self, *, causal: bool) -> Tensor:
        """Attention mask, bool ``[B, 1, T or 1, T]``: True where a position attends to another.

        In packed rows a question attends to the media and itself. For a causal model that is the same as in a row of
        its own; in a bidirectional one the media do not attend to the question, so its training ends with single ones.
        """
        mask = self.unpadded[:, None, None, :]
        if self.packed:
            to, by = self.question[:, None, None, :], self.question[:, None, :, None]
            shared = to == 0
            if self.context_end is not None:
                shared = shared & (self.positions[:, None, None, :] < self.context_end[:, None, :, None])
            mask = mask & (shared | ((to == by) & (to > 0)))
        if causal:
            length = self.ids.shape[1]
            mask = mask & torch.ones(length, length, dtype=torch.bool, device=self.ids.device).tril()
        return mask
