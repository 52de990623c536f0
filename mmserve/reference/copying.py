"""Guided attention: a loss on the attention weights of tokens that are copied from the prompt.

Copying takes two steps, those of induction heads (arXiv 2209.11895): a head finds each position's left neighbour, and a
later one the position whose left neighbour is the same. From answers alone a small model learned this not at all or
only as a fixed distance; with a loss on the weights of two heads for each (guided attention, arXiv 1710.08969), the
first step takes it some 60 training steps.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from mmserve.reference.batch import NO_COLUMN, Batch

#: Layers, from 0, whose first ``HEADS`` heads are guided to the left neighbour, and to the token that is copied.
NEIGHBOUR_LAYER, SOURCE_LAYER, HEADS = 1, 4, 2


def source_columns(batch: Batch) -> Tensor:
    """The column of the prompt that each answer token is a copy of, int64 ``[B, T]``, or ``NO_COLUMN``.

    It has the same token, and of all such columns most tokens to its left are the same too. Where two are equally good
    there is none, and none for tokens of prompts. Only for rows of one question.
    """
    answer = batch.share > 0
    prompt = (answer.long().cumsum(1) == 0) & batch.unpadded
    equal = (batch.ids[:, :, None] == batch.ids[:, None, :]) & prompt[:, None, :]
    matched = torch.zeros(equal.shape, dtype=torch.int32, device=equal.device)  # equal tokens that end at both columns
    for column in range(1, equal.shape[1]):
        matched[:, column, 1:] = torch.where(equal[:, column, 1:], matched[:, column - 1, :-1] + 1, 0)
    most, at = matched.max(2)
    alone = (matched == most[:, :, None]).sum(2) == 1
    return torch.where(answer & (most > 0) & alone, at, NO_COLUMN)


@dataclass
class Guide:
    """The columns that the guided heads should attend to, int64 ``[B, T]`` each, ``NO_COLUMN`` where there is none; and
    the losses in one forward pass."""

    neighbour: Tensor
    source: Tensor
    losses: list[Tensor] = field(default_factory=list)

    @classmethod
    def of(cls, batch: Batch) -> Guide:
        """The guide of typed questions, or of rows with one question each; none at padding.

        Of a choice, labels are guided to the option after them, and the slot to the label of the right option.
        """
        columns = torch.arange(batch.ids.shape[1], device=batch.ids.device) - 1
        if batch.option_labels is not None and batch.sources is not None:
            return cls(torch.where(batch.option_labels, columns + 2, NO_COLUMN), batch.sources)
        sources = source_columns(batch)
        if batch.sources is not None:  # of the question: descriptions of tools list the same values
            sources = torch.where(batch.sources != NO_COLUMN, batch.sources, sources)
        return cls(torch.where(batch.unpadded, columns, NO_COLUMN), sources)

    @classmethod
    def causal(cls, batch: Batch) -> Guide | None:
        """The guide of typed questions for a causal model, None for other rows.

        Of a choice, the last token of an option is guided to its label, and the token before the slot, which predicts
        it, to the last token of the right option.
        """
        if batch.option_labels is None or batch.option_ends is None or batch.sources is None:
            return None
        rows, labels = batch.option_labels.nonzero(as_tuple=True)
        _rows, ends = batch.option_ends.nonzero(as_tuple=True)
        neighbour, source = torch.full_like(batch.sources, NO_COLUMN), torch.full_like(batch.sources, NO_COLUMN)
        neighbour[rows, ends] = labels
        end_of = torch.full_like(batch.sources, NO_COLUMN)
        end_of[rows, labels] = ends
        asked, slots = (batch.sources != NO_COLUMN).nonzero(as_tuple=True)
        source[asked, slots - 1] = end_of[asked, batch.sources[asked, slots]]
        return cls(neighbour, source)

    def add_scores(self, layer: int, scores: Tensor) -> None:
        """Add the loss of a layer; ``scores [B, H, T, T]`` of its heads are those before the softmax."""
        wanted = {NEIGHBOUR_LAYER: self.neighbour, SOURCE_LAYER: self.source}.get(layer)
        if wanted is None or not bool((guided := wanted != NO_COLUMN).any()):
            return
        logits = scores[:, :HEADS].transpose(1, 2)[guided].float()
        target = wanted[guided][:, None].expand(-1, HEADS)
        self.losses.append(F.cross_entropy(logits.flatten(0, 1), target.flatten()))

    def loss(self) -> Tensor:
        """The mean over the guided heads; zero if no position was guided."""
        return torch.stack(self.losses).mean() if self.losses else torch.zeros((), device=self.source.device)
