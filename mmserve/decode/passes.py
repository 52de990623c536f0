"""The next pass of a request: its rows, its drafted tokens, and the rows whose logits are wanted."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import lcm

import numpy as np
import torch
from torch import Tensor

from mmserve.core.branches import Branches
from mmserve.core.canvas import Canvas
from mmserve.decode.branched import branch_rows
from mmserve.decode.commit import Commit
from mmserve.decode.commit.base import is_partial
from mmserve.decode.forward import Pass
from mmserve.decode.recompute.base import every_position
from mmserve.decode.state import Decoding, Guidance, Prefilling
from mmserve.models.base import Attention, LoadedModel


@dataclass(frozen=True)
class Passes:
    """The passes of one model's requests, one request at a time.

    ``chunk``: maximum prompt rows of a prefill pass, if attention allows chunked prefill; 0 = unlimited.
    ``runs_ahead``: whether several tokens that a constraint forces may run in one pass.
    """

    model: LoadedModel
    page_size: int
    chunk: int = 0
    runs_ahead: bool = True

    def first(self, p: Prefilling) -> Pass:
        """The pass over all positions not run yet, or over the next chunk if attention is bounded by blocks.

        Chunks end at a page and block boundary: which rows of a page run together must not depend on where the first
        chunk began, and attention within a block is bidirectional. So a chunk of whole blocks may be longer than
        ``chunk``. If the first pages of a guided request come from the prefix cache, the masks of its second sequence
        at those positions run first, in a separate pass.
        """
        if p.guidance is not None and p.lacks_masks:
            return self._masks(p, p.guidance)
        if p.canvas.branches is not None:
            return self._branched(p, p.canvas.branches)
        observed = any(extension.observes for extension in p.extensions)
        drafted = p.canvas.tokens[:0] if observed else None
        whole = self._over(p.canvas, p.pages, p.embeddings, every_position(p.canvas), p.commit, drafted)
        whole = replace(whole, deep=p.deep, adapter=p.adapter)
        rows = whole.rows[p.run :]
        for extension in p.extensions:
            rows = extension.rows(rows, first=True)
        size = self._chunk_rows(guided=p.guidance is not None)
        if size and len(rows) > size:
            first = int(whole.wanted[0])
            end = self._past_images(p.canvas, self._chunk_end(min(int(rows[size]), first), size))
            chunk, none = rows[rows < end], rows[:0]
            if len(chunk) and end <= first:  # no logits of the chunk are wanted
                return replace(whole, rows=chunk, targets=none, wanted=none, visible=end)
        return replace(whole, rows=rows)

    def _branched(self, p: Prefilling, branches: Branches) -> Pass:
        """The pass over all branches and the rest of the prompt, or over a chunk of the prompt."""
        spec, size = self.model.spec, self._chunk_rows(guided=False)
        rows = np.concatenate([np.arange(p.run, branches.alike), branch_rows(branches, spec)])
        for extension in p.extensions:
            rows = extension.rows(rows, first=True)
        whole = Pass(
            p.canvas,
            p.pages,
            p.embeddings,
            rows,
            branches.last,
            branches.last - spec.logit_shift,
            p.canvas.size,
            deep=p.deep,
            adapter=p.adapter,
        )
        prompt = rows[rows < branches.prompt]
        if size and len(prompt) > size:
            end = self._chunk_end(int(prompt[size]), size)
            chunk, none = prompt[prompt < end], rows[:0]
            if len(chunk):
                return replace(whole, rows=chunk, targets=none, wanted=none, visible=end)
        return whole

    def _masks(self, p: Prefilling, guidance: Guidance) -> Pass:
        """The pass over the second sequence's masks at positions whose pages were shared, or over a chunk of these."""
        size, end = self._chunk_rows(guided=False), p.run
        if size:
            end = min(end, self._chunk_end(p.masks_run + size, size))
        rows = np.arange(p.masks_run, end)
        own = (p.canvas, guidance.pages, guidance.embeddings)
        return Pass(*own, rows, rows[:0], rows[:0], end, adapter=p.adapter)

    def _chunk_rows(self, *, guided: bool) -> int:
        """Maximum rows of a request's own sequence in a chunk; 0 = no chunks.

        Halved for a guided request, whose second sequence has as many rows.
        """
        if not self.chunk or not self.model.spec.chunked:
            return 0
        least = 1 if self.model.spec.causal else self._unit
        return max(self.chunk // 2 if guided else self.chunk, least)

    def _chunk_end(self, most: int, size: int) -> int:
        """The last page and block boundary up to ``most``; ``most`` itself if chunks are shorter than that unit."""
        unit = self._unit
        return most // unit * unit if unit <= size else most

    def _past_images(self, canvas: Canvas, end: int) -> int:
        """``end``, or with bidirectional attention within images the next page boundary that splits no image."""
        span = self.model.spec.attention_spans(canvas.tokens[: canvas.prompt_length])
        while span is not None and 0 < end < len(span) and span[end - 1] > end:
            end = -(-int(span[end - 1]) // self._unit) * self._unit
        return end

    @property
    def _unit(self) -> int:
        """The least common multiple of page size and block length, in positions."""
        return lcm(self.page_size, self.model.spec.attention_block or 1)

    def next(self, d: Decoding, rows: np.ndarray) -> Pass:
        """The pass over ``rows`` (int64 positions, ascending) and the draft of a request in decode.

        A draft's embeddings are written to the request's: it runs as if it were on the canvas. Extensions of the
        request may change both rows and draft.
        """
        p, drafted = d.prefilled, None
        if d.extensions:
            ahead = self.runs_ahead and self.model.spec.causal and all(e.runs_ahead for e in d.extensions)
            ahead = ahead and not d.request.sampling.penalises  # penalties do not include drafted tokens
            drafted = self._draft(d.canvas, d.commit) if self.model.spec.causal else d.canvas.tokens[:0]
            for extension in d.extensions:
                drafted = extension.draft(d.canvas, drafted, ahead=ahead)
                rows = extension.rows(rows, first=False)
        found = self._over(d.canvas, p.pages, p.embeddings, rows, d.commit, drafted)
        return found if p.deep is None and p.adapter is None else replace(found, deep=p.deep, adapter=p.adapter)

    def _over(
        self,
        canvas: Canvas,
        pages: np.ndarray,
        embeddings: Tensor,
        rows: np.ndarray,
        commit: Commit,
        drafted: np.ndarray | None = None,
    ) -> Pass:
        """The pass that computes candidates for the open positions of the block, or of the canvas
        (``commit.whole_canvas``).

        The rows that predict these positions are added to ``rows``. With causal or block-causal attention, rows to the
        right of them are left out. Policies with ``whole_block`` get all of a block, even if its first token is
        predicted by the block before. ``drafted``: the draft of this pass; None = the policy's draft.
        """
        spec = self.model.spec
        end = None
        if spec.attention is Attention.BLOCK_CAUSAL:
            end = canvas.attention_block_end if commit.whole_block else canvas.run_end
            rows = np.union1d(rows, np.arange(canvas.run_end, end))  # a partial block runs with its whole context
            rows = rows[rows < end]
        if drafted is None:
            drafted = self._draft(canvas, commit) if spec.causal else canvas.tokens[:0]
        if spec.causal and not len(drafted) and len(rows) == 1 and rows[0] == canvas.block_start - spec.logit_shift:
            # The usual pass of a next-token model, whose block is its first masked position.
            return Pass(canvas, pages, embeddings, rows, rows + spec.logit_shift, rows, int(rows[0]) + 1)
        targets = canvas.all_masked() if commit.whole_canvas or len(drafted) else canvas.block_masked()
        if commit.whole_block:
            targets = canvas.block()
            rows = np.union1d(rows, targets)  # the policy needs the whole block, whatever the recompute policy
        if len(drafted):
            places = torch.from_numpy(targets[: len(drafted)]).to(self.model.device)
            embeddings[places] = self.model.decoder.embed(torch.from_numpy(drafted).to(self.model.device))
            rows = np.union1d(rows, targets[: len(drafted)])
        if spec.causal:
            targets = targets[: len(drafted) + 1]
        targets = targets[_within(targets, rows) | _within(targets - spec.logit_shift, rows)]
        if is_partial(commit):
            also_scored = commit.also_scored(canvas)
            targets = np.union1d(targets, also_scored[_within(also_scored - spec.logit_shift, rows)])
        wanted = targets - spec.logit_shift
        visible = end or (int(wanted[-1]) + 1 if spec.causal else canvas.size)
        rows = rows[rows < visible]
        if not _within(wanted, rows).all():
            rows = np.union1d(rows, wanted)
        return Pass(canvas, pages, embeddings, rows, targets, wanted, visible)

    def _draft(self, canvas: Canvas, commit: Commit) -> np.ndarray:
        """The policy's draft up to the first token that the model cannot generate, such as an image placeholder."""
        drafted = commit.draft(canvas)
        if not len(drafted):
            return drafted
        impossible = np.isin(drafted, self.model.spec.banned_ids) | (drafted >= self.model.decoder.config.vocab_size)
        return drafted[: int(np.argmax(impossible))] if impossible.any() else drafted


def _within(positions: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Bool ``[n]``: which of ``positions`` are in ``rows`` (ascending)."""
    if not len(rows):
        return np.zeros(len(positions), dtype=bool)
    return rows[np.minimum(rows.searchsorted(positions), len(rows) - 1)] == positions
