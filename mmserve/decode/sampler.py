"""From logits to one candidate a position: greedy, or drawn with temperature, top-k, top-p and a seed."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from mmserve.core.canvas import Canvas
from mmserve.core.request import Sampling
from mmserve.decode.commit import Candidates

#: Temperatures below this are greedy: dividing by them would leave the range of fp32.
GREEDY_BELOW = 1e-4
#: Penalised logits stay within this: far more than any model says, and far from the end of fp32.
_LARGEST = 1e30
#: Odd constants that spread (seed, step) over the generator's 64-bit seeds.
_SEED_MIX, _STEP_MIX = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9


def candidates(
    logits_nV: Tensor, positions: np.ndarray, canvas: Canvas, sampling: Sampling, banned: tuple[int, ...]
) -> Candidates:
    """One token for each of ``positions``, from the logits of those positions.

    The confidence is the chosen token's probability before temperature and filters, as in LLaDA; gap and entropy are
    of the same distribution. A drawn token depends on logits, seed, step and position only: not on the batch, nor on
    which positions were recomputed or asked for.
    """
    logits = logits_nV.float()
    if sampling.repetition_penalty != 1:
        logits = _penalise(logits, canvas, sampling.repetition_penalty)
    logits[:, list(banned)] = -torch.inf
    if sampling.temperature < GREEDY_BELOW:
        tokens = logits.argmax(-1)
    else:
        offsets = torch.from_numpy(positions - canvas.block_start).to(logits.device)
        tokens = _draw(logits, offsets, canvas, sampling)
    log_z = torch.logsumexp(logits, -1)
    confidence = (logits.gather(-1, tokens[:, None])[:, 0] - log_z).exp()
    top = logits.topk(2, -1).values
    entropy = torch.special.entr((logits - log_z[:, None]).exp()).sum(-1)
    figures = (x.cpu().numpy() for x in (tokens, confidence, top[:, 0] - top[:, 1], entropy))
    return Candidates(positions, *figures)


def _penalise(logits: Tensor, canvas: Canvas, penalty: float) -> Tensor:
    """Logits of tokens that the prompt or the answer holds, divided by ``penalty`` where positive, else multiplied
    (CTRL, arXiv 1909.05858)."""
    held = np.unique(canvas.tokens[~canvas.masked])
    tokens = torch.from_numpy(held[held < logits.shape[-1]]).to(logits.device)
    scores = logits[:, tokens]
    penalised = torch.where(scores > 0, scores / penalty, scores * penalty)
    logits[:, tokens] = penalised.clamp(-_LARGEST, _LARGEST)
    return logits


def _draw(logits: Tensor, offsets: Tensor, canvas: Canvas, sampling: Sampling) -> Tensor:
    """Gumbel-max over the filtered, tempered logits.

    The noise covers the block, whatever of it is still masked, and then, if asked for, what stands right of the block.
    """
    seed = (sampling.seed * _SEED_MIX + (canvas.step + 1) * _STEP_MIX) % (1 << 63)
    generator = torch.Generator().manual_seed(seed)
    block, farther = canvas.block_end - canvas.block_start, canvas.size - canvas.block_end
    lengths = [block, farther] if bool((offsets >= block).any()) else [block]
    drawn = [torch.empty(length, logits.shape[-1]).exponential_(generator=generator) for length in lengths]
    noise = torch.cat(drawn).clamp_min_(1e-30)
    scaled = _filter(logits / sampling.temperature, sampling)
    return (scaled - noise.log().to(logits.device)[offsets]).argmax(-1)


def _filter(logits: Tensor, sampling: Sampling) -> Tensor:
    """Tokens outside the top k, outside the smallest set with probability ``top_p``, or less probable than ``min_p``
    of the most probable one become impossible."""
    if sampling.top_k:
        kept = min(sampling.top_k, logits.shape[-1])
        lowest = logits.topk(kept, -1).values[:, -1:]
        logits = logits.masked_fill(logits < lowest, -torch.inf)
    if sampling.top_p < 1:
        ordered, order = logits.sort(stable=True, dim=-1, descending=True)
        probabilities = ordered.softmax(-1)
        outside = probabilities.cumsum(-1) - probabilities >= sampling.top_p
        logits = logits.masked_fill(torch.zeros_like(outside).scatter(-1, order, outside), -torch.inf)
    if sampling.min_p > 0:
        lowest = logits.amax(-1, keepdim=True) + math.log(sampling.min_p)
        logits = logits.masked_fill(logits < lowest, -torch.inf)
    return logits
