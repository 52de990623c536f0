"""Self-speculation: a next-token model drafts with a pass over masks, with bidirectional attention in the block.

The linear self-speculation of Nemotron-Labs-Diffusion (arXiv 2607.05722; ``linear_spec_generate`` of its
``modeling_nemotron_labs_diffusion.py``, with its default threshold of 0): the newest token and the masks after it run
together, each attending to everything up to the last mask; a mask's row predicts its own position, or the row before it
does (Fast-dVLM, arXiv 2604.06832). The pass that verifies the draft runs the same positions again, and so overwrites
the draft's K/V.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from mmserve.core.canvas import Canvas, among
from mmserve.core.request import Request
from mmserve.decode.commit import Candidates, Commit
from mmserve.decode.commit.base import Drafted
from mmserve.decode.extensions.base import Extension, Opening, RequestExtension, extension_of
from mmserve.decode.forward import Pass, forward, row_floor
from mmserve.decode.sampler import candidates
from mmserve.decode.scores import scores_for
from mmserve.decode.state import Answer, DecodeState, Decoding
from mmserve.kv.store import KVStore
from mmserve.models.base import LoadedModel
from mmserve.models.lora import Stacks


@dataclass
class OwnDraft:
    """A request's state of drafting by its own model; plain data."""

    drafted: np.ndarray | None = None  # int64, from drafting until the candidates are verified
    forwards: int = 0  # passes that made drafts


@dataclass(eq=False)
class SelfSpeculation(RequestExtension):
    """A request whose model drafts for itself."""

    state: OwnDraft

    def draft(self, canvas: Canvas, drafted: np.ndarray, *, ahead: bool) -> np.ndarray:
        return drafted if self.state.drafted is None else self.state.drafted

    def verify(self, canvas: Canvas, proposed: Candidates, commit: Commit) -> Candidates:
        """The candidates after the policy's verification by the draft, which is then cleared."""
        drafted, self.state.drafted = self.state.drafted, None
        return (
            commit.agreed(canvas, proposed, drafted)
            if isinstance(commit, Drafted) and drafted is not None
            else proposed
        )

    def report(self, answer: Answer, d: DecodeState) -> Answer:
        return replace(answer, companion_forwards=self.state.forwards)

    def snapshot(self) -> OwnDraft:
        return self.state


class SelfDraft(Extension):
    """``model`` drafts with its own pages and weights, including a request's adapter, for requests whose commit policy
    is ``draft_model``; ``stacks``: see ``Runner``."""

    def __init__(self, model: LoadedModel, store: KVStore, stacks: Stacks) -> None:
        assert model.spec.draft_mask is not None
        self._model, self._store, self._mask, self._stacks = model, store, model.spec.draft_mask, stacks
        self._scores, self._floor = scores_for(model, store), row_floor(model)
        self._banned = tuple(sorted({*model.spec.banned_ids, self._mask}))

    def attach(self, opening: Opening) -> SelfSpeculation | None:
        return SelfSpeculation(OwnDraft()) if opening.request.diffusion.commit.name == "draft_model" else None

    def restore(self, request: Request, canvas: Canvas, snapshot: object) -> SelfSpeculation | None:
        return SelfSpeculation(snapshot) if isinstance(snapshot, OwnDraft) else None

    @torch.inference_mode()
    def before_rows(self, batch: Sequence[Decoding]) -> None:
        """Draft for each request whose policy uses a draft and that has none, in one pass over all of them.

        A draft ends after an end of text. Tokens are greedy, or sampled with the same noise as the model's tokens will
        be.
        """
        waiting: list[tuple[Decoding, OwnDraft, Pass]] = []
        for d in batch:
            found = extension_of(d.extensions, SelfSpeculation)
            if found is None or found.state.drafted is not None or not isinstance(d.commit, Drafted):
                continue
            count = d.commit.wanted(d.canvas)
            if count:
                waiting.append((d, found.state, self._pass(d, count)))
            else:
                found.state.drafted = np.zeros(0, np.int64)
        if not waiting:
            return
        passes = [p for _d, _state, p in waiting]
        logits = forward(self._model, self._store, passes, self._floor, stacks=self._stacks)
        for (d, state, p), rows in zip(waiting, logits, strict=True):
            end_ids = self._model.spec.end_ids
            made = candidates(
                rows.whole(),
                p.targets,
                d.canvas,
                d.request.sampling,
                self._banned,
                None,
                self._scores,
                d.commit.reads,
                end_ids=end_ids,
            ).tokens
            ends = np.flatnonzero(among(made, end_ids))
            state.drafted = made[: ends[0] + 1] if len(ends) else made
            state.forwards += 1

    def _pass(self, d: Decoding, count: int) -> Pass:
        """The pass over the newest token and ``count`` masks after it."""
        first, prefilled = d.canvas.known(), d.prefilled
        rows = np.arange(first - 1, first + count)
        masks = torch.full((count,), self._mask, device=self._model.device)
        prefilled.embeddings[first : first + count] = self._model.decoder.embed(masks)
        end = first + count
        own = d.canvas, prefilled.pages, prefilled.embeddings
        wanted = rows[1:] - self._model.spec.draft_shift
        return Pass(*own, rows, rows[1:], wanted, end, adapter=prefilled.adapter, span=end)
