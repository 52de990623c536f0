"""A draft or verifier model: a causal model with the served model's tokenizer and its own K/V, run over the same
canvases.

It verifies the drafts of a diffusion model, or drafts for a next-token model (``commit/guided.py``,
``commit/draft_model.py``). Its K/V store has as many pages, of the same size, as the served model's, so that a
request's page ids are valid in both. The token that each position's K/V was computed from is recorded; from the first
position at which the canvas differs, K/V is recomputed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from mmserve.core.canvas import Canvas
from mmserve.core.encoded import DeepStack
from mmserve.core.request import Request
from mmserve.core.tuning import ACCOMPANIED
from mmserve.decode.commit import Candidates, Commit
from mmserve.decode.commit.base import Drafted, Verdict, Verified, leading
from mmserve.decode.extensions.base import Extension, Opening, RequestExtension, extension_of
from mmserve.decode.forward import Pass, forward, row_floor
from mmserve.decode.sampler import candidates
from mmserve.decode.scores import scores_for
from mmserve.decode.state import Answer, DecodeState, Decoding, Prefilling
from mmserve.encode.embedding import place_features
from mmserve.kv.store import KVStore
from mmserve.models.base import LoadedModel


@dataclass
class DraftState:
    """The state of a draft or verifier model for one request, with its results for the current pass; plain data."""

    embeddings: Tensor  # [N, D] of this model, current at the prompt's positions and at those it has run
    seen: np.ndarray  # int64 [N], token whose K/V each position holds; -1 = none, or computed after another prefix
    drafted: np.ndarray | None = None  # int64, from drafting until the candidates are verified
    verdict: Verdict | None = None  # on the candidates, until one of them is chosen
    forwards: int = 0  # passes made
    deep: DeepStack | None = None  # of this model, for the prompt's visual tokens


@dataclass(eq=False)
class Speculation(RequestExtension):
    """A request with a draft or verifier model."""

    state: DraftState

    def draft(self, canvas: Canvas, drafted: np.ndarray, *, ahead: bool) -> np.ndarray:
        return drafted if self.state.drafted is None else self.state.drafted

    def verify(self, canvas: Canvas, proposed: Candidates, commit: Commit) -> Candidates:
        """The candidates after the policy's verification by the draft or the verdict, which are then cleared."""
        verdict, drafted = self.state.verdict, self.state.drafted
        self.state.verdict = self.state.drafted = None
        if isinstance(commit, Verified) and verdict is not None:
            return commit.verified(canvas, proposed, verdict)
        if isinstance(commit, Drafted) and drafted is not None:
            return commit.agreed(canvas, proposed, drafted)
        return proposed

    def report(self, answer: Answer, d: DecodeState) -> Answer:
        return replace(answer, companion_forwards=self.state.forwards)

    def snapshot(self) -> DraftState:
        return self.state


@dataclass(frozen=True)
class _Part:
    """One request's part of a pass: its known and drafted tokens, and the positions to predict."""

    canvas: Canvas
    pages: np.ndarray  # int64 page ids of the whole canvas
    state: DraftState
    tokens: np.ndarray  # int64 [n], of the positions 0 … n-1
    asked: np.ndarray  # int64, ascending and consecutive, the last at most n: positions to predict


class DraftModel(Extension):
    """``model`` drafts for the ``served`` model, or verifies its drafts, if the request's commit policy uses it.

    Every call can be repeated after a failure: state is changed only by results that are complete.
    """

    def __init__(self, model: LoadedModel, store: KVStore, served: LoadedModel) -> None:
        self.model, self.store, self._served = model, store, served
        self._scores = scores_for(model, store)
        self._floor = row_floor(model)
        self._banned = tuple(sorted({*served.spec.banned_ids, *model.spec.banned_ids}))
        model.decoder.set_row_floor(self._floor)

    def attach(self, opening: Opening) -> Speculation | None:
        if opening.request.diffusion.commit.name not in ACCOMPANIED:
            return None
        tokens, encoded = opening.canvas.tokens.copy(), opening.encoded
        tokens[encoded.image_rows] = self.model.spec.mask_id  # replaced by visual features
        embeddings = self._embed(tokens)
        deep = None
        if encoded.companion_features is not None:
            deep = place_features(self.model, embeddings, encoded.image_rows, encoded.companion_features)
        return Speculation(DraftState(embeddings, np.full(len(tokens), -1, np.int64), deep=deep))

    def restore(self, request: Request, canvas: Canvas, snapshot: object) -> Speculation | None:
        """The K/V in this model's store is transferred with that of the served model."""
        return Speculation(snapshot) if isinstance(snapshot, DraftState) else None

    @torch.inference_mode()
    def after_prefill(self, batch: Sequence[tuple[Prefilling, np.ndarray]]) -> None:
        """Run the prompt of each request up to the last position that prefill has just run."""
        parts = []
        for begun, rows in batch:
            state = _state_of(begun)
            if state is not None:
                known = begun.canvas.tokens[: min(int(rows[-1]) + 1, begun.canvas.prompt_length)]
                parts.append(_Part(begun.canvas, begun.pages, state, known, known[:0]))
        self._forward([part for part in parts if _valid(part) < len(part.tokens)])

    @torch.inference_mode()
    def before_rows(self, batch: Sequence[Decoding]) -> None:
        """Draft for each request whose policy uses a draft and that has none, one token of every request in each pass.

        A draft ends after an end of text. Tokens are greedy, or sampled with the same noise as the served model's
        tokens will be, which maximises agreement.
        """
        drafts = [
            (d, state, d.commit.wanted(d.canvas), list[int]())
            for d in batch
            if (state := _state_of(d)) is not None and isinstance(d.commit, Drafted) and state.drafted is None
        ]
        ends = self._served.spec.end_ids
        while unfinished := [
            (d, state, made)
            for d, state, wanted, made in drafts
            if len(made) < wanted and not (made and made[-1] in ends)
        ]:
            places = [np.array([d.canvas.known() + len(made)]) for d, _state, made in unfinished]
            parts = [
                _after_known(d, state, np.asarray(made, np.int64), place)
                for (d, state, made), place in zip(unfinished, places, strict=True)
            ]
            for (d, _state, made), place, logits in zip(unfinished, places, self._forward(parts), strict=True):
                made.append(int(self._candidates(logits, place, d.canvas, d).tokens[0]))
        for _d, state, _wanted, made in drafts:
            state.drafted = np.asarray(made, np.int64)

    @torch.inference_mode()
    def after_candidates(self, batch: Sequence[Decoding]) -> None:
        """Verify the candidates of each request whose policy uses a verdict and that has none.

        Only candidates at consecutive positions from the first masked one on are verified. The verifier's own tokens
        are greedy, or sampled with the same noise as the candidates were.
        """
        waiting = [
            (d, state, _leading_tokens(d.candidates, d.canvas))
            for d in batch
            if (state := _state_of(d)) is not None and isinstance(d.commit, Verified) and d.candidates is not None
            if state.verdict is None
        ]
        parts = []
        for d, state, drafted in waiting:
            first = d.canvas.known()
            asked = first + np.arange(len(drafted) + 1)
            asked = asked[asked < d.canvas.block_end]
            asked = asked[d.canvas.masked[asked]]  # the position after the draft may be given
            parts.append(_after_known(d, state, drafted, asked))
        for (d, state, drafted), part, logits in zip(waiting, parts, self._forward(parts), strict=True):
            rank, relative = self._rank_and_ratio(logits, drafted)
            before = replace(d.canvas, step=d.canvas.step - 1)  # its state when the candidates were drawn
            state.verdict = Verdict(self._candidates(logits, part.asked, before, d), rank, relative)

    def _candidates(self, logits: Tensor, positions: np.ndarray, canvas: Canvas, d: Decoding) -> Candidates:
        sampling, reads, ends = d.request.sampling, d.commit.reads, self._served.spec.end_ids
        return candidates(logits, positions, canvas, sampling, self._banned, None, self._scores, reads, end_ids=ends)

    def _rank_and_ratio(self, logits: Tensor, drafted: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """For each drafted token: the number of more probable tokens, and its probability relative to the most probable
        one."""
        scores = logits[: len(drafted)].clone()
        scores[:, list(self._banned)] = -torch.inf
        drafted_scores = scores.gather(-1, torch.from_numpy(drafted).to(scores.device)[:, None])
        rank = (scores > drafted_scores).sum(-1)
        relative = (drafted_scores[:, 0] - scores.amax(-1)).exp()
        return rank.cpu().numpy(), relative.cpu().numpy()

    def _forward(self, parts: list[_Part]) -> list[Tensor]:
        """Logits (fp32, with the served model's vocabulary size) of the ``asked`` positions, from one pass over
        ``parts``."""
        if not parts:
            return []
        passes = [self._pass(part) for part in parts]
        for part, p in zip(parts, passes, strict=True):
            part.state.seen[p.rows[0] :] = -1  # invalid until the pass succeeds; right of it, outdated
            written = p.rows[p.rows >= part.canvas.prompt_length]
            places = torch.from_numpy(written).to(self.model.device)
            part.state.embeddings[places] = self._embed(part.tokens[written])
        logits = forward(self.model, self.store, passes, self._floor)
        for part, p in zip(parts, passes, strict=True):
            part.state.seen[p.rows] = part.tokens[p.rows]
            part.state.forwards += 1
        width = self._served.decoder.config.vocab_size
        cut = [rows.whole()[:, :width] for rows in logits]
        return [F.pad(rows, (0, width - rows.shape[-1]), value=-torch.inf) for rows in cut]

    def _pass(self, part: _Part) -> Pass:
        wanted = part.asked - 1
        end = int(wanted[-1]) + 1 if len(wanted) else len(part.tokens)
        rows = np.arange(min([_valid(part), *wanted[:1]]), end)
        state = part.state
        return Pass(part.canvas, part.pages, state.embeddings, rows, part.asked, wanted, end, state.deep)

    def _embed(self, tokens: np.ndarray) -> Tensor:
        """Embeddings ``[n, D]``; a token that this model's vocabulary lacks is replaced by the mask token."""
        known = np.where(tokens < self.model.decoder.config.vocab_size, tokens, self.model.spec.mask_id)
        return self.model.decoder.embed(torch.from_numpy(known).to(self.model.device))


def _valid(part: _Part) -> int:
    """Length of the longest prefix whose K/V was computed from the current tokens."""
    return leading(part.state.seen[: len(part.tokens)] == part.tokens)


def _leading_tokens(candidates: Candidates, canvas: Canvas) -> np.ndarray:
    """Tokens (int64) of the candidates at consecutive positions from the first masked one on."""
    positions = candidates.positions
    return candidates.tokens[: leading(positions == canvas.known() + np.arange(len(positions)))]


def _after_known(d: Decoding, state: DraftState, drafted: np.ndarray, asked: np.ndarray) -> _Part:
    """A request's part of a pass over its known tokens, followed by ``drafted``; ``asked``: positions to predict."""
    tokens = np.concatenate([d.canvas.tokens[: d.canvas.known()], drafted])
    return _Part(d.canvas, d.prefilled.pages, state, tokens, asked)


def _state_of(d: Prefilling | Decoding) -> DraftState | None:
    found = extension_of(d.extensions, Speculation)
    return None if found is None else found.state
