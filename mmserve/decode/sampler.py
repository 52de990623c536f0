"""From logits to one candidate for each position: greedy, or sampled with temperature, top-k, top-p and a seed."""

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
from mmserve.decode.scores import CounterNoise, Scores, scored
from mmserve.models.base import ModelSpec

#: Temperatures below this are greedy: dividing by them would overflow fp32.
GREEDY_BELOW = 1e-4
#: Higher temperatures are clamped to this, at which the distribution is uniform: they may overflow fp32.
MAX_TEMPERATURE = 1e30
#: Odd multipliers that map (seed, step) to the generator's 64-bit seeds.
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
    observer: LogitsObserver | None = None,
    scores: Scores | None = None,
    reads: frozenset[str] = EVERY_FIGURE,
    mask_id: int | None = None,
    *,
    with_confidence: bool = True,
    end_ids: Collection[int] = (),
) -> Candidates:
    """One token for each of ``positions`` (ascending), from the logits of those positions.

    The confidence is the chosen token's probability before temperature and filters; gap and entropy are of the same
    distribution, and are computed only if ``reads`` names them. ``mask_id``: a token of ``banned`` that is never chosen
    but counts in that distribution, like the mask in the softmax of LLaDA's ``generate.py``; where it has the highest
    logit, the gap is negative. With ``observer``, the confidence excludes it, and the probabilities that ``observer``
    records include it. The confidence is 1 unless ``with_confidence``.

    A drawn token depends only on logits, seed, step and position: not on the batch, nor on which other positions run or
    have candidates. Rows are processed slice by slice (``decode/logits.py``), so that temporaries are bounded.
    ``observer`` restricts and observes the logits of each row. ``end_ids``: the model's end tokens, which penalties do
    not count.

    ``scores``: a kernel for rows that are not observed and are greedy or sampled without filters, in one pass. All
    noise then comes from its counter-based generator, so that a seed gives the same noise with and without filters.
    """
    if isinstance(logits_nV, Shared):
        return logits_nV.candidates()
    penalised = sampling.changes_logits
    penalties: Penalties | None = None
    greedy = sampling.temperature < GREEDY_BELOW
    counter = None if greedy or scores is None else CounterNoise(canvas, sampling.seed)
    noise = None if greedy else counter or _Noise(canvas, sampling.seed)
    temperature = min(sampling.temperature, MAX_TEMPERATURE)
    fused = scores if observer is None and (noise is None or not _filters(sampling)) else None
    unfused = _UnfusedSampler(sampling, temperature, noise, banned, observer, reads, mask_id, with_confidence)
    results: list[tuple[Tensor | None, ...]] = []
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
            draw = None if counter is None else counter.draw(offsets, temperature, logits.device)
            results.append(scored(fused, logits, banned, draw, reads, mask_id))
        else:
            results.append(unfused.candidates(logits, offsets))
    tokens_n, confidence_n, gap_n, entropy_n = (_whole(parts) for parts in zip(*results, strict=True))
    assert tokens_n is not None
    assert confidence_n is not None
    return Candidates(positions, tokens_n, confidence_n, gap_n, entropy_n)


@dataclass(frozen=True)
class _UnfusedSampler:
    """Samples slices of rows without the kernel; see ``candidates``."""

    sampling: Sampling
    temperature: float
    noise: CounterNoise | _Noise | None  # None for greedy
    banned: tuple[int, ...]
    observer: LogitsObserver | None
    reads: frozenset[str]
    mask_id: int | None
    with_confidence: bool

    def candidates(self, logits: Tensor, offsets: np.ndarray) -> tuple[Tensor | None, ...]:
        """Tokens, confidence, gap and entropy of the rows ``logits [n, V]`` (fp32; changed in place), whose positions
        are at ``offsets`` from the block's first."""
        observer = self.observer
        masks = None if self.mask_id is None else logits[:, self.mask_id].clone()
        if self.banned:
            logits.index_fill_(1, torch.tensor(self.banned, device=logits.device), -torch.inf)
        if observer is not None:
            observer.restrict(logits)
        tokens, tempered, noised = self._draw(logits, offsets)
        log_z = None
        if observer is not None:
            log_z = torch.logsumexp(logits, -1)
            observer.take(logits, log_z, tempered, noised, masks)
        if masks is not None:
            logits[:, self.mask_id] = masks
        if not self.with_confidence and not self.reads:
            return tokens, torch.ones(len(tokens)), None, None
        return tokens, *_figures(logits, tokens, log_z, self.reads, masks)

    def _draw(self, logits: Tensor, offsets: np.ndarray) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """A token for each row; and, if it is drawn, the filtered and tempered logits, and these plus noise: the same
        tensor if they are not observed."""
        if self.noise is None:
            return _largest(logits), None, None
        tempered = _filter(logits / self.temperature, self.sampling)
        gumbel = self.noise.rows(offsets, logits.shape[-1], logits.device)
        noised = tempered.add_(gumbel) if self.observer is None else tempered + gumbel
        return _largest(noised), tempered, noised


def verified_mask(spec: ModelSpec) -> int | None:
    """The ``mask_id`` of ``candidates``; None for a next-token model, whose softmax has no mask."""
    return None if spec.causal else spec.mask_id


def candidates_of(logits: Tensor, positions: np.ndarray, tokens: Tensor) -> Candidates:
    """Candidates of ``tokens`` (int64 ``[n]``) for ``positions``, scored by ``logits`` (fp32 ``[n, V]``)."""
    confidence, _gap, _entropy = _figures(logits, tokens, None, frozenset())
    assert confidence is not None
    return Candidates(positions, tokens.cpu().numpy(), confidence.cpu().numpy(), None, None)


def step_generator(seed: int, step: int, device: torch.device) -> torch.Generator:
    """The random generator of one step (from 1) of one request, independent of other requests."""
    return torch.Generator(device).manual_seed((seed * _SEED_MIX + step * _STEP_MIX) % (1 << 63))


def _largest(scores: Tensor) -> Tensor:
    """The token (int64 ``[n]``) with the largest of ``scores [n, V]``, the first one of ties.

    On a CPU, NumPy's argmax is ten times as fast: 3 us instead of 28 for a row of 32,000.
    """
    if scores.device.type == "cpu":
        return torch.from_numpy(scores.numpy().argmax(-1))
    return scores.argmax(-1)


def _whole(parts: Sequence[Tensor | None]) -> np.ndarray | None:
    """One field of all slices, concatenated; None if it was not computed."""
    made = [part for part in parts if part is not None]
    if len(made) < len(parts) or not made:
        return None
    whole: np.ndarray = (made[0] if len(made) == 1 else torch.cat(made)).cpu().numpy()
    return whole


def _figures(
    logits: Tensor, tokens: Tensor, log_z: Tensor | None, reads: frozenset[str], masks: Tensor | None = None
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Confidence, gap and entropy ``[n]`` of ``tokens [n]`` under ``logits [n, V]``; the last two None unless in
    ``reads``.

    ``log_z [n]``: logsumexp of the logits, if known. ``masks [n]``: the mask token's logits, which ``log_z``
    excludes.
    """
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
    """The Gumbel noise of one step, one row for each position from the block's first on.

    Rows that are not needed are drawn too, one after another, so that a position's noise does not depend on which rows
    are needed.
    """

    def __init__(self, canvas: Canvas, seed: int) -> None:
        self._generator = step_generator(seed, canvas.step + 1, torch.device("cpu"))
        self._drawn = 0

    def rows(self, offsets: np.ndarray, vocabulary: int, device: torch.device) -> Tensor:
        """Noise ``[n, vocabulary]`` on ``device``, for positions at ``offsets`` from the block's first; each larger
        than those of earlier calls."""
        exponential = torch.ones(len(offsets), vocabulary)
        for row, offset in zip(exponential, offsets.tolist(), strict=True):
            while self._drawn <= offset:
                row.exponential_(generator=self._generator)
                self._drawn += 1
        return exponential.clamp_min_(1e-30).log_().neg_().to(device)


def _filters(sampling: Sampling) -> bool:
    return bool(sampling.top_k) or sampling.top_p < 1 or sampling.min_p > 0


def _filter(logits: Tensor, sampling: Sampling) -> Tensor:
    """Set to -inf the logits of tokens outside the top k, outside the smallest set with probability ``top_p``, or with
    less than ``min_p`` times the highest probability."""
    if sampling.top_k:
        kept = min(sampling.top_k, logits.shape[-1])
        lowest = logits.topk(kept, -1).values[:, -1:]
        logits = logits.masked_fill(logits < lowest, -torch.inf)
    if sampling.top_p < 1:
        ordered, order = logits.sort(stable=True, dim=-1, descending=True)
        probabilities = ordered.softmax(-1)
        outside = probabilities.cumsum(-1) - probabilities >= sampling.top_p
        outside[:, 0] = False  # even if ``top_p`` underflows to 0 in fp32
        logits = logits.masked_fill(torch.zeros_like(outside).scatter(-1, order, outside), -torch.inf)
    if sampling.min_p > 0:
        lowest = logits.amax(-1, keepdim=True) + math.log(sampling.min_p)
        logits = logits.masked_fill(logits < lowest, -torch.inf)
    return logits
