"""From logits to one candidate a position: greedy, or drawn with temperature, top-k, top-p and a seed."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from mmserve.core.canvas import Canvas
from mmserve.core.request import Sampling
from mmserve.decode.commit import Candidates

#: Temperatures below this are greedy: dividing by them would leave the range of fp32.
GREEDY_BELOW = 1e-4
#: Odd constants that spread (seed, step) over the generator's 64-bit seeds.
_SEED_MIX, _STEP_MIX = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9


def candidates(
    logits_nV: Tensor, positions: np.ndarray, canvas: Canvas, sampling: Sampling, banned: tuple[int, ...]
) -> Candidates:
    """One token for each of ``positions`` of the current block, from the logits of those positions.

    The confidence is the chosen token's probability before temperature and filters, as in LLaDA. A drawn token
    depends on logits, seed, step and position only: not on the batch, nor on which positions were recomputed.
    """
    logits = logits_nV.float()
    logits[:, list(banned)] = -torch.inf
    if sampling.temperature < GREEDY_BELOW:
        tokens = logits.argmax(-1)
    else:
        offsets = torch.from_numpy(positions - canvas.block_start).to(logits.device)
        tokens = _draw(logits, offsets, canvas, sampling)
    log_z = torch.logsumexp(logits, -1)
    confidence = (logits.gather(-1, tokens[:, None])[:, 0] - log_z).exp()
    return Candidates(positions, tokens.cpu().numpy(), confidence.cpu().numpy())


def _draw(logits: Tensor, offsets: Tensor, canvas: Canvas, sampling: Sampling) -> Tensor:
    """Gumbel-max over the filtered, tempered logits; the noise covers the block, whatever of it is still masked."""
    seed = (sampling.seed * _SEED_MIX + (canvas.step + 1) * _STEP_MIX) % (1 << 63)
    generator = torch.Generator().manual_seed(seed)
    length = canvas.block_end - canvas.block_start
    noise = torch.empty(length, logits.shape[-1]).exponential_(generator=generator).clamp_min_(1e-30)
    scaled = _filter(logits / sampling.temperature, sampling)
    return (scaled - noise.log().to(logits.device)[offsets]).argmax(-1)


def _filter(logits: Tensor, sampling: Sampling) -> Tensor:
    """Tokens outside the top k, or outside the smallest set with probability ``top_p``, become impossible."""
    if sampling.top_k:
        kept = min(sampling.top_k, logits.shape[-1])
        lowest = logits.topk(kept, -1).values[:, -1:]
        logits = logits.masked_fill(logits < lowest, -torch.inf)
    if sampling.top_p < 1:
        ordered, order = logits.sort(stable=True, dim=-1, descending=True)
        probabilities = ordered.softmax(-1)
        outside = probabilities.cumsum(-1) - probabilities >= sampling.top_p
        logits = logits.masked_fill(torch.zeros_like(outside).scatter(-1, order, outside), -torch.inf)
    return logits
