"""A quick measurement of accuracy during training; figures to publish are those of ``mmserve bench quality``."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from mmserve.reference.batch import Batch
from mmserve.reference.data import Sample, collate, draw
from mmserve.reference.model import ReferenceModel, mixed_precision
from mmserve.reference.recipe import MIXES, Recipe
from mmserve.reference.tasks import SUBJECTS
from mmserve.reference.tokenizer import MASK, token_id

#: Forward passes that an answer of the diffusion model may take.
PASSES = 16
#: Kinds that are measured so: those whose batches need nothing but what is drawn.
MEASURED = (*SUBJECTS, "calls", "dictated", "copies")


@torch.no_grad()
def quick_accuracy(model: ReferenceModel, tokenizer: PreTrainedTokenizerFast, recipe: Recipe) -> dict[str, float]:
    """Share of rows of each kind whose every answer comes out right, from the averaged weights.

    Rows are drawn with another seed. The diffusion model starts from masked answers and commits by threshold, in
    ``PASSES`` passes at most; of the causal one every next token must be the most likely, which is what greedy
    decoding would give.
    """
    result, device = {}, model.decoder.embed.weight.device
    for kind, (samples, canvas) in _held_out(recipe).items():
        batch = collate(kind, samples, 0 if model.causal else canvas, tokenizer).to(device)
        with mixed_precision(device):
            visual = None
            if batch.pixels is not None:
                visual = model.visual(model.image_features(batch.pixels)[0], pooled=batch.pooled)
            wrong = answer_errors(model, tokenizer, visual, batch)
        result[kind] = round(1 - wrong.any(1).float().mean().item(), 3)
    return result


def answer_errors(
    model: ReferenceModel, tokenizer: PreTrainedTokenizerFast, visual: Tensor | None, batch: Batch
) -> Tensor:
    """True where an answer's token comes out wrong, bool ``[B, T]``."""
    if model.causal:
        return _greedy_errors(model, visual, batch)
    return _threshold_errors(model, token_id(tokenizer, MASK), visual, batch)


def _held_out(recipe: Recipe) -> dict[str, tuple[list[Sample], int]]:
    found: dict[str, tuple[list[Sample], int]] = {}
    step, mix = 2_000_000, recipe.mix if recipe.trained == "adapter" else "broad"
    kinds = {kind for kind in MIXES[mix] if kind in MEASURED}
    while len(found) < len(kinds):
        kind, samples, canvas = draw(step, recipe.seed + 1, scenes_only=False, scale=recipe.scale, mix=mix)
        if kind in kinds:
            found.setdefault(kind, (samples, canvas))
        step += 1
    return found


def _greedy_errors(model: ReferenceModel, visual: Tensor | None, batch: Batch) -> Tensor:
    logits, _ = model(visual, batch.ids, batch.visual_at, batch.positions, batch.attention_mask(causal=True))
    return F.pad((batch.share[:, 1:] > 0) & (logits[:, :-1].argmax(-1) != batch.ids[:, 1:]), (1, 0))


def _threshold_errors(model: ReferenceModel, mask_id: int, visual: Tensor | None, batch: Batch) -> Tensor:
    ids = torch.where(batch.share > 0, mask_id, batch.ids)
    least = -(-int((ids == mask_id).sum(1).max()) // PASSES)
    while (masked := ids == mask_id).any():
        logits, _ = model(visual, ids, batch.visual_at, batch.positions, batch.attention_mask(causal=False))
        logits[..., mask_id] = -torch.inf
        confidence, token = logits.float().softmax(-1).max(-1)
        confidence = confidence.masked_fill(~masked, -1.0)
        chosen = (confidence >= 0.9).scatter(1, confidence.topk(least, dim=1).indices, True)
        ids = torch.where(chosen & masked, token, ids)
    return ids != batch.ids
