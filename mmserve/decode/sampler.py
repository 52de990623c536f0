"""From logits to one candidate a position: greedy, or drawn with temperature, top-k, top-p and a seed."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from mmserve.core.canvas import Canvas
from mmserve.core.request import Sampling
from mmserve.decode.commit import Candidates
from mmserve.decode.commit.base import ENTROPY, EVERY_FIGURE, GAP, LogitsObserver
from mmserve.decode.logits import RowLogits, slices
from mmserve.decode.penalties import Penalties
from mmserve.decode.scores import CountedNoise, Scores, scored
from mmserve.models.base import ModelSpec

#: Temperatures below this are greedy: dividing by them would leave the range of fp32.
GREEDY_BELOW = 1e-4
#: Temperatures above this count as this, at which every token is as probable as any other: they may be past fp32.
HOTTEST = 1e30
#: Odd constants that spread (seed, step) over the generator's 64-bit seeds.
_SEED_MIX, _STEP_MIX = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9


@dataclass(frozen=True)
class Shared:
    """Rows whose candidates are made together with those of other requests (``decode/together.py``)."""

    candidates: Callable[[], Candidates]


def candidates(
    logits_nV: Tensor | RowLogits | Shared,
    positions: np.ndarray,
    canvas: Canvas,
    sampling: Sampling,
    banned: tuple[int, ...],
    best: LogitsObserver | None = None,
    scores: Scores | None = None,
    reads: frozenset[str] = EVERY_FIGURE,
    mask_id: int | None = None,
    *,
    confident: bool = True,
    end_ids: Collection[int] = (),
) -> Candidates:
    """One token for each of ``positions`` (ascending), from the logits of those positions.

    The confidence is the chosen token's probability before temperature and filters; gap and entropy are of the same
    distribution, and are made only if ``reads`` names them. ``mask_id``: a token of ``banned`` that is never chosen
    and has its part in that distribution, as the mask has in the softmax of LLaDA's ``generate.py``; where it has the
    highest logit, the gap is negative. With ``best`` the confidence leaves it out, and the probabilities that ``best``
    notes do not. A drawn token depends on logits, seed, step and
    position only: not on the batch, nor on which positions were recomputed or asked for. The rows are judged slice by
    slice (``decode/logits.py``): no temporary is larger than one. ``best`` notes more of each row than its candidate,
    and may rule tokens out.

    The confidence is 1 where it is not asked for (``confident``). ``end_ids``: the model's, which penalties do not
    count.

    With ``scores``, rows that nothing is noted of, greedy or drawn without filters, are judged by it in one pass. All
    noise is then counted, so that a seed draws from the same one with filters and without.
    """
    if isinstance(logits_nV, Shared):
        return logits_nV.candidates()
    penalised = sampling.changes_logits
    penalties: Penalties | None = None
    greedy = sampling.temperature < GREEDY_BELOW
    counted = None if greedy or scores is None else CountedNoise(canvas, sampling.seed)
    noise = None if greedy else counted or _Noise(canvas, sampling.seed)
    temperature = min(sampling.temperature, HOTTEST)
    fused = scores if best is None and (noise is None or not _filters(sampling)) else None
    judged: list[tuple[Tensor | None, ...]] = []
    done = 0
    for part in slices(logits_nV):
        offsets = positions[done : done + len(part)] - canvas.block_start
        done += len(part)
        logits = part if fused is not None and not penalised else part.float()
        if penalised:
            penalties = penalties or Penalties.of(canvas, sampling, logits.shape[-1], logits.device, end_ids)
            assert penalties is not None
            penalties.apply(logits)
        if fused is not None:
            draw = None if counted is None else counted.draw(offsets, temperature, logits.device)
            judged.append(scored(fused, logits, banned, draw, reads, mask_id))
            continue
        masks = None if mask_id is None else logits[:, mask_id].clone()
        if banned:
            logits.index_fill_(1, torch.tensor(banned, device=logits.device), -torch.inf)
        if best is not None:
            best.restrict(logits)
        if noise is None:
            tempered = drawn = None
            tokens = _largest(logits)
        else:
            tempered = _filter(logits / temperature, sampling)
            gumbel = noise.rows(offsets, logits.shape[-1], logits.device)
            drawn = tempered.add_(gumbel) if best is None else tempered + gumbel  # Gumbel-max
            tokens = _largest(drawn)
        log_z = torch.logsumexp(logits, -1) if best is not None else None
        if best is not None and log_z is not None:
            best.take(logits, log_z, tempered, drawn, masks)
        if masks is not None:
            logits[:, mask_id] = masks
        if not confident and not reads:
            judged.append((tokens, torch.ones(len(tokens)), None, None))
            continue
        judged.append((tokens, *_figures(logits, tokens, log_z, reads, masks)))
    tokens_n, confidence_n, gap_n, entropy_n = (_whole(parts) for parts in zip(*judged, strict=True))
    assert tokens_n is not None
    assert confidence_n is not None
    return Candidates(positions, tokens_n, confidence_n, gap_n, entropy_n)


def judged_mask(spec: ModelSpec) -> int | None:
    """The ``mask_id`` of ``candidates``: a next-token model has no mask in its softmax."""
    return None if spec.causal else spec.mask_id


def described(logits: Tensor, positions: np.ndarray, tokens: Tensor) -> Candidates:
    """Candidates of ``tokens`` (int64 ``[n]``) for ``positions``, with their scores by ``logits`` (fp32 ``[n, V]``)."""
    confidence, _gap, _entropy = _figures(logits, tokens, None, frozenset())
    assert confidence is not None
    return Candidates(positions, tokens.cpu().numpy(), confidence.cpu().numpy(), None, None)


def step_generator(seed: int, step: int, device: torch.device) -> torch.Generator:
    """The random numbers of one step (counted from 1) of one request, whatever else is served."""
    return torch.Generator(device).manual_seed((seed * _SEED_MIX + step * _STEP_MIX) % (1 << 63))


def _largest(scores: Tensor) -> Tensor:
    """The token (int64 ``[n]``) with the largest of ``scores [n, V]``, of equals the first.

    NumPy finds it ten times as fast on a CPU: one row of 32,000 in 3 us, not 28.
    """
    if scores.device.type == "cpu":
        return torch.from_numpy(scores.numpy().argmax(-1))
    return scores.argmax(-1)


def _whole(parts: Sequence[Tensor | None]) -> np.ndarray | None:
    """One figure of all slices; None where it was not made."""
    made = [part for part in parts if part is not None]
    if len(made) < len(parts) or not made:
        return None
    whole: np.ndarray = (made[0] if len(made) == 1 else torch.cat(made)).cpu().numpy()
    return whole


def _figures(
    logits: Tensor, tokens: Tensor, log_z: Tensor | None, reads: frozenset[str], masks: Tensor | None = None
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Confidence, gap and entropy ``[n]`` of ``tokens [n]`` under ``logits [n, V]``, whose exponentials sum to that of
    ``log_z [n]`` where that is known. Gap and entropy are None unless ``reads`` names them.

    ``masks [n]``: the mask token's logits among those, which ``log_z`` is without."""
    logs = logits.log_softmax(-1) if log_z is None else None
    chosen = (logits if logs is None else logs).gather(-1, tokens[:, None])[:, 0]
    confidence = (chosen if log_z is None else chosen - log_z).exp()
    gap = entropy = None
    if GAP in reads:
        top = logits.topk(2, -1).values
        gap = top[:, 0] - top[:, 1]
        gap = gap if masks is None else torch.where(masks >= top[:, 0], -gap, gap)
    if ENTROPY in reads:
        if log_z is not None:
            whole = log_z if masks is None else torch.logaddexp(log_z, masks)
            logs = logits - whole[:, None]
        assert logs is not None
        entropy = torch.special.entr(logs.exp()).sum(-1)
    return confidence, gap, entropy


class _Noise:
    """The Gumbel noise of one step, a row for each position from the block's first on.

    Rows not asked for are drawn all the same, so that a position's noise does not depend on them; they are drawn
    one after another, so that none of it depends on how many are wanted at once.
    """

    def __init__(self, canvas: Canvas, seed: int) -> None:
        self._generator = step_generator(seed, canvas.step + 1, torch.device("cpu"))
        self._drawn = 0

    def rows(self, offsets: np.ndarray, vocabulary: int, device: torch.device) -> Tensor:
        """Noise ``[n, vocabulary]``, on ``device``, of positions so far right of the block's first; larger than any
        asked for before."""
        exponential = torch.ones(len(offsets), vocabulary)  # none is drawn left of the block: nothing is chosen there
        for row, offset in zip(exponential, offsets.tolist(), strict=True):
            while self._drawn <= offset:
                row.exponential_(generator=self._generator)
                self._drawn += 1
        return exponential.clamp_min_(1e-30).log_().neg_().to(device)


def _filters(sampling: Sampling) -> bool:
    return bool(sampling.top_k) or sampling.top_p < 1 or sampling.min_p > 0


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
        outside[:, 0] = False  # also where ``top_p`` is 0 in fp32
        logits = logits.masked_fill(torch.zeros_like(outside).scatter(-1, order, outside), -torch.inf)
    if sampling.min_p > 0:
        lowest = logits.amax(-1, keepdim=True) + math.log(sampling.min_p)
        logits = logits.masked_fill(logits < lowest, -torch.inf)
    return logits
