"""What training minimises: LLaDA's masked loss for the diffusion model, next-token loss for its autoregressive twin."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from mmserve.reference.batch import NO_COLUMN, Batch
from mmserve.reference.copying import Guide
from mmserve.reference.data import COPIED, UNORDERED
from mmserve.reference.decisions import DECISIONS
from mmserve.reference.model import ReferenceModel

#: Share of questions whose every answer token is masked: then only the picture has the answer.
ALL_MASKED = 0.4
#: Share of questions whose answer is masked from a random token on, and how far from there the loss reaches in half of
#: them; in the others to the answer's end: what lies far ahead must be known to be unsure, or it is committed first.
FROM_A_TOKEN, AHEAD = 0.5, 8
#: Share of batches of a kind that are trained as ``piecewise`` does.
PIECEWISE = {"text": 0.4, "json": 0.4, "calls": 0.6, "dictated": 0.75, "copies": 0.75}
#: Mean tokens of a piece: fewer for copied text, where a token depends on the one on its left.
PIECE, COPIED_PIECE = 4, 2
#: Tokens of padding after an answer that is cut into pieces; other pieces do not attend to those of one.
PADDING = 4
#: Masking rates of answers in random order: the unmasked part must identify the shape.
UNORDERED_RATES = (0.3, 0.85)


def mask_answers(batch: Batch, mask_id: int, lowest_rate: float, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Masked ids ``[B, T]`` and the loss weight of each position ``[B, T]`` (0 where not masked).

    A question masks each token of its answer with its own rate, drawn uniformly, or all of them (``ALL_MASKED`` of
    questions). Of answers of more than one block, half are masked as block-wise decoding meets them: what is left
    of a random block is known, what is right of it is masked and carries no loss. Of answers in order, some
    are masked from a random token on (``FROM_A_TOKEN``), with the loss on the ``AHEAD`` tokens there or on all: what
    decoding meets most, for the surest token is mostly the next one. Whatever the masking, a token's weight is its
    share on average. Slots of typed questions are always masked, all of them: they are answered in one pass.
    """
    if batch.kind in DECISIONS:
        return torch.where(batch.share > 0, mask_id, batch.ids), batch.share
    shape = (len(batch.ids), int(batch.question.max()) + 1)

    def uniform(shape: tuple[int, ...]) -> Tensor:
        return torch.rand(shape, generator=generator).to(batch.ids.device)

    def spread(values: Tensor) -> Tensor:
        return values.gather(1, batch.question)

    if batch.kind in UNORDERED:
        rates = UNORDERED_RATES[0] + uniform(shape) * (UNORDERED_RATES[1] - UNORDERED_RATES[0])
    else:
        rates = torch.where(uniform(shape) < ALL_MASKED, 1.0, uniform(shape) * (1 - lowest_rate) + lowest_rate)
    rate = spread(rates)
    drawn = uniform(tuple(batch.ids.shape)) < rate
    none = torch.zeros(shape, dtype=torch.long, device=batch.ids.device)
    blocks = 1 + none.scatter_reduce(1, batch.question, batch.block, "amax")
    current = spread((uniform(shape) * blocks).long())
    blockwise = spread((uniform(shape) < 0.5) & (blocks > 1))
    inside, right = batch.block == current, batch.block > current
    answer = batch.share > 0
    masked = answer & torch.where(blockwise, (drawn & inside) | right, drawn)
    weight = masked * batch.share / rate
    weight = torch.where(blockwise, weight * inside * spread(blocks), weight)
    if batch.kind not in UNORDERED:
        suffix = spread(uniform(shape) < FROM_A_TOKEN)
        far = uniform(shape) < 0.5
        onward, onward_weight = _from_a_token(batch, uniform(shape), spread(far))
        masked, weight = torch.where(suffix, onward, masked), torch.where(suffix, onward_weight, weight)
    return torch.where(masked, mask_id, batch.ids), weight


def piecewise(
    batch: Batch, mask_id: int, generator: torch.Generator, guide: Guide | None = None
) -> tuple[Batch, Tensor, Tensor]:
    """The batch with every answer twice, and its masked ids and weights as ``mask_answers`` gives them.

    The second copy is all masks, cut into pieces of ``PIECE`` tokens on average, or ``COPIED_PIECE``, each of which
    attends to itself and, of the first copy, to what is left of it: every token of an answer is trained in one pass, in
    a state that occurs in decoding (the vectorised training of block diffusion, arXiv 2503.09573). Tokens of the first
    copy attend to none on their right, so no piece attends to its own tokens through them. Only for rows of one
    question, whose answer is in adjacent columns.
    ``guide``, where given, is extended by the pieces; a masked left neighbour is not guided to.
    """
    answer = batch.share > 0
    begins = answer.int().argmax(1, keepdim=True)
    columns = begins + torch.arange(int(answer.sum(1).max()), device=begins.device)
    copied = columns < begins + answer.sum(1, keepdim=True)
    columns = columns.clamp(max=batch.ids.shape[1] - 1)

    def copy(values: Tensor) -> Tensor:
        return values.gather(1, columns)

    def twice(values: Tensor, copy: Tensor) -> Tensor:
        return torch.cat([values, copy], 1)

    size = COPIED_PIECE if batch.kind in COPIED else PIECE
    starts = torch.rand(copied.shape, generator=generator).to(copied.device) < 1 / size
    starts[:, 0] = True
    place = copy(batch.positions)
    start = torch.where(starts, place, 0).cummax(1).values
    prompt = answer.long().cumsum(1).eq(0)
    first = torch.where(answer, batch.positions, batch.ids.shape[1]).amin(1, keepdim=True)
    doubled = replace(
        batch,
        ids=twice(batch.ids, copy(batch.ids)),
        visual_at=twice(batch.visual_at, torch.zeros_like(copied)),
        unpadded=twice(batch.unpadded, copied),
        packed=True,
        question=twice(torch.zeros_like(batch.question), starts.long().cumsum(1)),
        positions=twice(batch.positions, place),
        share=twice(torch.zeros_like(batch.share), copy(batch.share) * copied),
        block=twice(batch.block, copy(batch.block)),
        context_end=twice(torch.where(prompt, first, batch.positions + 1), start),
    )
    if guide is not None:
        first_of_piece = copied & starts
        guide.neighbour = twice(guide.neighbour, torch.where(first_of_piece, copy(guide.neighbour), NO_COLUMN))
        guide.source = twice(
            torch.full_like(guide.source, NO_COLUMN), torch.where(copied, copy(guide.source), NO_COLUMN)
        )
    ids = twice(batch.ids, torch.full_like(place, mask_id))
    return doubled, ids, doubled.share


def _from_a_token(batch: Batch, cut: Tensor, far: Tensor) -> tuple[Tensor, Tensor]:
    """Masked positions ``[B, T]`` from a token of each answer on, and their weights; ``cut [B, questions]`` in [0, 1).

    The loss reaches ``AHEAD`` tokens, or to the answer's end where ``far [B, T]`` is True. The cut is uniform over the
    answer's own tokens; the padding after them is always masked.
    """
    end = batch.share.shape[1]
    zeros = torch.zeros(cut.shape, dtype=torch.long, device=batch.share.device)
    largest = zeros.to(batch.share.dtype).scatter_reduce(1, batch.question, batch.share, "amax")
    own = (batch.share > 0) & (batch.share > 0.5 * largest.gather(1, batch.question))
    count = own.cumsum(1) - 1
    before = (zeros + end).scatter_reduce(1, batch.question, torch.where(own, count, end), "amin")
    lengths = zeros.scatter_add(1, batch.question, own.long())
    index = torch.where(own, count - before.gather(1, batch.question), end)
    length, start = lengths.gather(1, batch.question), (cut * lengths).long().gather(1, batch.question)
    masked = (batch.share > 0) & (index >= start)
    ahead = torch.where(far, end, AHEAD)
    reached = batch.share * length / torch.minimum(index + 1, ahead) * (masked & (index < start + ahead))
    return masked, torch.where(own, reached, batch.share * masked)


def diffusion_loss(
    model: ReferenceModel,
    visual: Tensor | None,
    batch: Batch,
    ids: Tensor,
    weight: Tensor,
    guide: Guide | None = None,
) -> tuple[Tensor, Tensor]:
    """Weighted cross-entropy of the masked answer tokens, averaged over questions; and the hidden states half-way.
    ``guide`` has its own losses afterwards."""
    chosen = weight > 0
    mask = batch.attention_mask(causal=False)
    logits, hidden = model(visual, ids, batch.visual_at, batch.positions, mask, guide.add_scores if guide else None)
    loss = F.cross_entropy(logits[chosen].float(), batch.ids[chosen], reduction="none")
    return (loss * weight[chosen]).sum() / batch.share.sum(), hidden


def causal_loss(
    model: ReferenceModel, visual: Tensor | None, batch: Batch, guide: Guide | None = None
) -> tuple[Tensor, Tensor]:
    """Cross-entropy of each answer token given all before it, averaged over questions; and the hidden states half-way.
    ``guide`` has its own losses afterwards."""
    weight = batch.share[:, 1:]
    chosen = weight > 0
    mask = batch.attention_mask(causal=True)
    added = guide.add_scores if guide else None
    logits, hidden = model(visual, batch.ids, batch.visual_at, batch.positions, mask, added)
    loss = F.cross_entropy(logits[:, :-1][chosen].float(), batch.ids[:, 1:][chosen], reduction="none")
    return (loss * weight[chosen]).sum() / batch.share.sum(), hidden
