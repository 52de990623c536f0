"""A request's candidates from a pass's logits: by the sampler, or by a commit policy that makes its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from mmserve.core.canvas import Canvas
from mmserve.core.request import Request
from mmserve.decode.alternatives import RecordingLogits
from mmserve.decode.commit import Candidates, Commit
from mmserve.decode.commit.base import LogitsObserver, Partial, is_partial, is_proposing
from mmserve.decode.extensions.base import RequestExtension
from mmserve.decode.forward import Pass
from mmserve.decode.logits import RowLogits
from mmserve.decode.sampler import Shared, candidates, verified_mask
from mmserve.decode.scores import Scores
from mmserve.decode.together import Member, share
from mmserve.models.base import ModelSpec

Extensions = tuple[RequestExtension, ...]


class Proposer:
    """Makes the candidates of one model's requests; ``scores``: a kernel that does so in one pass over the logits."""

    def __init__(self, spec: ModelSpec, scores: Scores | None) -> None:
        self._spec, self.scores = spec, scores

    def share(self, members: Sequence[Member]) -> list[RowLogits | Shared]:
        """The logits of a batch; some requests share one call of the sampler (``decode/together.py``)."""
        return share(members, self._spec, self.scores)

    def propose(
        self, request: Request, commit: Commit, extensions: Extensions, p: Pass, logits: RowLogits | Shared
    ) -> Candidates:
        """The candidates of a pass, with alternatives if requested; calls the observer of its logits."""
        spec, sampling = self._spec, request.sampling
        if isinstance(logits, Shared):
            return candidates(logits, p.targets, p.canvas, sampling, spec.banned_ids, end_ids=spec.end_ids)
        if not (request.streaming.records and request.streaming.alternatives):
            return self._proposed(request, commit, extensions, p, logits)
        count, mask_id = request.streaming.alternatives, verified_mask(spec)
        recording = RecordingLogits(
            logits, p.targets, p.canvas, sampling, count, spec.banned_ids, mask_id, end_ids=spec.end_ids
        )
        found = self._proposed(request, commit, extensions, p, recording)
        return replace(found, alternatives=recording.of(found.positions))

    def _proposed(
        self, request: Request, commit: Commit, extensions: Extensions, p: Pass, logits: RowLogits
    ) -> Candidates:
        spec, sampling = self._spec, request.sampling
        reads = commit.reads
        if is_partial(commit):
            return self._partial(commit, reads, request, extensions, p, logits)
        observer = _observer(extensions, p.canvas, p.targets)
        if is_proposing(commit):
            return commit.propose(logits.whole(), p.canvas, sampling, spec.mask_id, spec.banned_ids, observer)
        return self._sampled(request, p.canvas, p.targets, logits, observer, reads)

    def _sampled(
        self,
        request: Request,
        canvas: Canvas,
        positions: np.ndarray,
        logits: RowLogits,
        observer: LogitsObserver | None,
        reads: frozenset[str],
    ) -> Candidates:
        """The sampler's candidates for ``positions``, from their logits."""
        spec, sampling = self._spec, request.sampling
        mask_id = verified_mask(spec)
        return candidates(
            logits,
            positions,
            canvas,
            sampling,
            spec.banned_ids,
            observer,
            self.scores,
            reads,
            mask_id,
            end_ids=spec.end_ids,
        )

    def _partial(
        self,
        commit: Partial,
        reads: frozenset[str],
        request: Request,
        extensions: Extensions,
        p: Pass,
        logits: RowLogits,
    ) -> Candidates:
        """The candidates that a ``Partial`` policy needs; the others are made only if it could choose one of them."""
        needed, counted = commit.needed(p.canvas, p.targets), replace(p.canvas, step=p.canvas.step + 1)

        def of(which: np.ndarray, *, more: bool = False) -> Candidates:
            targets, rows = p.targets[which], logits.only(np.flatnonzero(which))
            observer = _observer(extensions, p.canvas, targets, more=more)
            return self._sampled(request, p.canvas, targets, rows, observer, reads)

        found = of(needed)
        if not needed.all() and not commit.enough(counted, found):
            found = found.and_then(of(~needed, more=True))
        return found.where(np.argsort(found.positions))


def _observer(
    extensions: Extensions, canvas: Canvas, positions: np.ndarray, *, more: bool = False
) -> LogitsObserver | None:
    """The observer of the logits of ``positions``: at most one extension has one."""
    return next((e.observe(canvas, positions, more=more) for e in extensions if e.observes), None)
