"""Block decoding of a next-token model: blocks of masks are filled by diffusion, then a causal pass computes their K/V.

The diffusion mode of Nemotron-Labs-Diffusion (arXiv 2607.05722; ``generate`` with ``causal_context`` of its
``modeling_nemotron_labs_diffusion.py``). A block is the newest token, followed by masks, with bidirectional attention
within it; it is run once in each step until the commit policy has filled it. Then one causal pass computes its K/V and
the next token, with which the next block begins. Fast-dVLM (arXiv 2604.06832) does the same, with masks that are
predicted by the row before them, and fills the parts of a block one after another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from mmserve.core.candidates import Chosen
from mmserve.core.canvas import MASKED, Canvas, among
from mmserve.core.request import Request
from mmserve.decode.commit import Candidates, Commit
from mmserve.decode.extensions.base import Extension, Opening, RequestExtension, extension_of
from mmserve.decode.forward import Pass, forward, row_floor
from mmserve.decode.sampler import candidates
from mmserve.decode.scores import scores_for
from mmserve.decode.state import Answer, DecodeState, Decoding
from mmserve.kv.store import KVStore
from mmserve.models.base import LoadedModel
from mmserve.models.lora import Stacks

#: The commit policy that fills the blocks.
FILLING = "threshold"


@dataclass
class FilledBlock:
    """A request's state in its current block; plain data."""

    filled: Candidates | None = None  # its tokens, from when the block is full until they are committed
    forwards: int = 0  # passes that filled blocks


@dataclass(eq=False)
class BlockByBlock(RequestExtension):
    """A request that decodes in blocks."""

    state: FilledBlock
    penalised: bool  # whether penalties make its logits depend on the answer's tokens
    filling: _Filling | None = None  # the block in progress; restarted if the request moves to another process

    @property
    def pending_rows(self) -> int:
        return 0 if self.filling is None else len(self.filling.rows)

    def draft(self, canvas: Canvas, drafted: np.ndarray, *, ahead: bool) -> np.ndarray:
        return drafted if self.state.filled is None else self.state.filled.tokens

    def choose(self, canvas: Canvas, proposed: Candidates, commit: Commit) -> Chosen | None:
        """The tokens of the filled block and, without penalties, the next token.

        With penalties the next token is left out: its logits do not include the block's tokens, which become final only
        now.
        """
        filled, self.state.filled = self.state.filled, None
        if filled is None or not len(filled.tokens):
            return None
        final = filled if self.penalised else filled.and_then(proposed.where(slice(len(filled.tokens), None)))
        sure = np.log(np.maximum(final.confidence, np.finfo(np.float32).tiny))
        return Chosen(final.positions, final.tokens, sure)

    def report(self, answer: Answer, d: DecodeState) -> Answer:
        return replace(answer, companion_forwards=self.state.forwards)

    def snapshot(self) -> FilledBlock:
        return self.state


@dataclass
class _Filling:
    """A block that is being filled: a copy of the request's canvas, whose blocks are the parts to be filled in order,
    and the confidence of each filled position."""

    d: Decoding
    canvas: Canvas
    first: int  # position of its first mask
    confidence: np.ndarray  # fp32, of each of its masks
    passes: int = 0
    tokens: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))

    @classmethod
    def of(cls, d: Decoding, state: FilledBlock, count: int, part: int) -> _Filling:
        """The next ``count`` masks of ``d``, in parts of ``part`` positions, including the newest token; 0 = one
        part."""
        c, first = d.canvas, d.canvas.known()
        own = replace(
            c,
            tokens=c.tokens.copy(),
            committed_at=c.committed_at.copy(),
            block_length=part or count + 1,
            block_start=first,
            step=c.step + state.forwards,  # all passes of a request draw with different noise
            block_step=0,
            origin=first - 1,
            logit_shift=0,
        )
        return cls(d, own, first, np.ones(count, np.float32))

    @property
    def rows(self) -> np.ndarray:
        """The newest token and the masks after it."""
        return np.arange(self.first - 1, self.first + len(self.confidence))

    def full(self, ends: frozenset[int]) -> bool:
        """Whether no mask is left, at least before an end of text; ``tokens`` are then the block's tokens."""
        own = self.rows[1:]
        left = np.flatnonzero(self.canvas.committed_at[own] == MASKED)
        known = self.canvas.tokens[own][: left[0]] if len(left) else self.canvas.tokens[own]
        ended = np.flatnonzero(among(known, ends))
        self.tokens = known[: ended[0] + 1] if len(ended) else known
        return bool(len(ended)) or not len(left)


class OwnBlocks(Extension):
    """``model`` fills blocks with its own pages and weights, including a request's adapter, for requests whose commit
    policy is ``FILLING``; ``stacks``: see ``Runner``.

    Constrained requests, typed questions and requests with K/V eviction decode token by token.
    """

    def __init__(self, model: LoadedModel, store: KVStore, stacks: Stacks) -> None:
        assert model.spec.draft_mask is not None
        self._model, self._store, self._mask, self._stacks = model, store, model.spec.draft_mask, stacks
        self._scores, self._floor = scores_for(model, store), row_floor(model)
        self._banned = tuple(sorted({*model.spec.banned_ids, self._mask}))

    def attach(self, opening: Opening) -> BlockByBlock | None:
        r = opening.request
        plain = r.constraint is None and not r.decisions and r.kv_reduction is None
        if not plain or r.diffusion.commit.name != FILLING:
            return None
        return BlockByBlock(FilledBlock(), r.sampling.penalises)

    def restore(self, request: Request, canvas: Canvas, snapshot: object) -> BlockByBlock | None:
        return BlockByBlock(snapshot, request.sampling.penalises) if isinstance(snapshot, FilledBlock) else None

    @torch.inference_mode()
    def before_rows(self, batch: Sequence[Decoding]) -> None:
        """Run one pass over the unfinished block of each request. Requests whose block it does not complete wait."""
        asked = [(d, own) for d in batch if (own := extension_of(d.extensions, BlockByBlock))]
        found = [(own, each) for d, own in asked if (each := self._block(d, own))]
        if not found:
            return
        passes = [self._pass(each) for _own, each in found]
        logits = forward(self._model, self._store, passes, self._floor, stacks=self._stacks)
        for (own, each), rows in zip(found, logits, strict=True):
            self._fill(each, rows.whole())
            if each.full(self._model.spec.end_ids):
                kept = slice(len(each.tokens))
                own.state.filled = Candidates(each.rows[1:][kept], each.tokens, each.confidence[kept], None, None)
                own.state.forwards += each.passes
                own.filling = None

    def _block(self, d: Decoding, own: BlockByBlock) -> _Filling | None:
        """The block of ``d`` to be filled; None if it is full, or if no mask is left."""
        count = min(self._model.spec.draft_block - 1, d.canvas.size - d.canvas.known())
        if own.filling is None and own.state.filled is None and count:
            own.filling = _Filling.of(d, own.state, count, self._model.spec.sub_block)
        return own.filling

    def _fill(self, each: _Filling, logits: torch.Tensor) -> None:
        d, canvas = each.d, each.canvas
        found = candidates(
            logits,
            canvas.block_masked(),
            canvas,
            d.request.sampling,
            self._banned,
            None,
            self._scores,
            d.commit.reads,
            end_ids=self._model.spec.end_ids,
        )
        canvas.count_forward()
        chosen = found.where(d.commit.choose(canvas, found))
        canvas.commit(chosen.positions, chosen.tokens)
        each.confidence[chosen.positions - each.first] = chosen.confidence
        each.passes += 1

    def _pass(self, each: _Filling) -> Pass:
        prefilled, rows, canvas = each.d.prefilled, each.rows, each.canvas
        own, masked = rows[1:], canvas.block_masked()
        tokens = np.where(canvas.committed_at[own] == MASKED, self._mask, canvas.tokens[own])
        made = self._model.decoder.embed(torch.from_numpy(tokens).to(self._model.device))
        prefilled.embeddings[own[0] : own[-1] + 1] = made
        end = int(rows[-1]) + 1
        where = each.d.canvas, prefilled.pages, prefilled.embeddings
        wanted = masked - self._model.spec.draft_shift
        return Pass(*where, rows, masked, wanted, end, adapter=prefilled.adapter, span=end)
