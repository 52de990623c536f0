"""The one decode loop: recompute → forward → candidates → commit, a step at a time for a ragged batch.

Prefill is its step 0: prompt and masked canvas run together, and the candidates go to decode with the pages.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch

from mmserve.core.canvas import MASKED, Canvas
from mmserve.core.encoded import Encoded
from mmserve.core.events import CommittedToken, Snapshot
from mmserve.core.payloads import CanvasPayload, PrefilledPayload
from mmserve.core.request import Request
from mmserve.decode.blending import Blender, take_on
from mmserve.decode.commit import ACCOMPANIED, Candidates, Commit
from mmserve.decode.commit.base import Partial, is_partial, is_proposing
from mmserve.decode.companion import Companion
from mmserve.decode.constrained.admission import Admitted
from mmserve.decode.constrained.best import Best, Ranked
from mmserve.decode.constrained.draws import Draws
from mmserve.decode.constrained.state import Constrained
from mmserve.decode.constrained.step import settle
from mmserve.decode.final import final_tokens
from mmserve.decode.forward import Pass, Watch, forward, row_floor, value_changes
from mmserve.decode.fresh import embed_fresh
from mmserve.decode.graphs import Graphs
from mmserve.decode.guidance import combined, guidance_of, spread
from mmserve.decode.handover import Handover, live_canvas
from mmserve.decode.logits import RowLogits
from mmserve.decode.passes import Passes
from mmserve.decode.policies import Offered, commit_policy, recompute_policy
from mmserve.decode.recompute.base import is_watching
from mmserve.decode.repairing import AskingRows, Repairer
from mmserve.decode.sampler import Shared, candidates, judged_mask
from mmserve.decode.scores import scores_for
from mmserve.decode.state import Decoding, Guidance, Prefilled, Prefilling, Stepped, Taken
from mmserve.decode.text import TextStream, canvas_text, committed_tokens
from mmserve.decode.together import share
from mmserve.encode.embedding import embedded
from mmserve.errors import Unimplemented
from mmserve.kv.reducer import Observation, Reducer, Reducing
from mmserve.kv.reduction import reduction_of
from mmserve.kv.reuse import reuse_of
from mmserve.kv.sparse import Selection, Sparse
from mmserve.kv.store import KVStore
from mmserve.kv.table import PageTable
from mmserve.models.base import Attention, LoadedModel


class DiffusionDecoder:
    """Prefill and decode of one model over one K/V store; holds no state of any request.

    ``chunk``: most positions of a next-token model's prompt that one pass of prefill runs; 0 = all. ``companion``
    drafts or judges for the requests whose commit policy asks for it. ``offered``: what their policies may ask for;
    None = what the model offers by itself. ``sparse`` chooses what passes look at; None = everything. ``graphs`` run
    passes of decode where they can; None = none do. ``blender`` takes K/V of images for the requests that ask for it.
    ``runs_ahead``: what a constraint forces may be run in one pass.
    """

    def __init__(
        self,
        model: LoadedModel,
        store: KVStore,
        *,
        chunk: int = 0,
        companion: Companion | None = None,
        offered: Offered | None = None,
        sparse: Sparse | None = None,
        graphs: Graphs | None = None,
        blender: Blender | None = None,
        runs_ahead: bool = True,
    ) -> None:
        self.model, self.store, self._companion = model, store, companion
        self._sparse, self._graphs, self.blender = sparse, graphs, blender
        self.passes = Passes(model, store.page_size, chunk, runs_ahead)
        self._offered = offered or Offered.by(model)
        self._reducer = Reducer(model.decoder, store, model.dtype)
        self._repairer = Repairer(store, model.dtype)
        self._scores = scores_for(model, store)
        self._handover = Handover(store, companion, sparse)
        self._floor = row_floor(model)
        model.decoder.set_row_floor(self._floor)
        self._ways: dict[str, Callable[[], None]] = {}

    def give_way(self, prefill: Callable[[], None], decode: Callable[[], None]) -> None:
        """Have passes of prefill and of decode call these in each layer: others may use the thread meanwhile."""
        self._ways = {"prefill": prefill, "decode": decode}

    @property
    def floor(self) -> int:
        """The number of rows, a multiple of which a pass runs (see ``row_floor``)."""
        return self._floor

    @torch.inference_mode()
    def ready(self, begun: Prefilling) -> bool:
        """Go on with what comes before a request's first pass, by as much as a chunk; whether that pass is due."""
        return take_on(begun, self.passes.chunk * len(self.model.decoder.layers))

    @torch.inference_mode()
    def prefill(self, batch: list[tuple[Request, Prefilling]]) -> list[Prefilled | None]:
        """Step 0 of each request: canvas with pages and candidates out, None where some of the prompt is left to run.

        Requests are changed only when nothing can fail any more: after a failure the call can be repeated.
        """
        passes = [self._watched(self.passes.first(p), p.reducing, None) for _request, p in batch]
        guided = [(p, begun.guidance) for p, (_request, begun) in zip(passes, batch, strict=True)]
        selection = self._sparse.prefill if self._sparse is not None else None
        logits = self._forward("prefill", guided, [begun.constrained for _request, begun in batch], selection)
        proposed = [
            self._candidates(request, begun.commit, p, rows, begun.constrained) if len(p.targets) else None
            for (request, begun), p, rows in zip(batch, passes, logits, strict=True)
        ]
        if self._companion is not None:
            self._companion.read([(begun, p.rows) for (_request, begun), p in zip(batch, passes, strict=True)])
        results: list[Prefilled | None] = []
        for (_request, begun), p, found in zip(batch, passes, proposed, strict=True):
            begun.run = p.visible
            _absorb(p, begun.reducing, None)
            if found is None:
                results.append(None)
                continue
            p.canvas.count_forward()
            run = begun.run - begun.reused + (p.visible if begun.guidance is not None else 0)
            beside = (begun.companion, begun.constrained, begun.deep, begun.reducing, begun.taken, begun.guidance)
            results.append(Prefilled(p.canvas, p.pages, p.embeddings, found, run, p.visible, *beside))
        return results

    def open(self, request: Request, prefilled: Prefilled) -> Decoding:
        """The decode state of a request that prefill handed over."""
        text = TextStream(self.model.tokenizer, request.sampling.stop)
        return Decoding(
            request,
            prefilled,
            recompute_policy(request),
            commit_policy(request, self._offered),
            text,
            prefilled.candidates,
            np.zeros(prefilled.canvas.size, np.float32),
        )

    def payload(self, state: Prefilled | Decoding) -> PrefilledPayload | CanvasPayload:
        """A copy of a canvas that goes on over another store, as plain data."""
        if isinstance(state, Decoding):
            return live_canvas(self._handover, state)
        return self._handover.prefilled(state, state.candidates)

    @torch.inference_mode()
    def restored(
        self,
        request: Request,
        payload: PrefilledPayload | CanvasPayload,
        pages: PageTable,
        constrained: Constrained | None,
    ) -> Decoding:
        """A request that goes on here, over ``pages`` of this store; ``constrained``: its constraint, if it has one.

        Raises ``TransferError`` where what came does not fit this store, or this server.
        """
        live = isinstance(payload, CanvasPayload)
        prefilled = self._handover.restored(request, payload.prefilled if live else payload, pages, constrained)
        d = self.open(request, prefilled)
        if live:
            d.text = TextStream.restored(self.model.tokenizer, request.sampling.stop, payload.text)
            d.log_probabilities, d.rows, d.fresh = payload.log_probabilities, payload.rows, payload.fresh
            d.forwards, d.edits = payload.forwards, payload.edits
        return d

    @torch.inference_mode()
    def propose(self, batch: list[Decoding]) -> list[None]:
        """Candidates for each request that has none yet, from one forward pass of the ragged batch.

        A companion drafts before it what is to be run, or judges behind it what came of it.

        A request is changed only once its own candidates are there: after a failure the call can be repeated.
        """
        running = [d for d in batch if d.candidates is None]
        embed_fresh(self.model, running)
        if self._companion is not None:
            self._companion.draft(running)
        if running:
            passes = [
                self._watched(self.passes.next(d, rows), d.prefilled.reducing, d.prefilled.taken)
                for d, rows in zip(running, self._rows(running), strict=True)
            ]
            selection = self._sparse.decode if self._sparse is not None else None
            guided = [(p, d.prefilled.guidance) for p, d in zip(passes, running, strict=True)]
            logits = self._forward("decode", guided, [d.constrained for d in running], selection, self._graphs)
            rows = share(list(zip(running, passes, logits, strict=True)), self.model.spec, self._scores)
            for d, p, mine in zip(running, passes, rows, strict=True):
                d.candidates = self._candidates(d.request, d.commit, p, mine, d.constrained)
                d.rows = None
                d.canvas.count_forward()
                d.forwards += 1
                d.prefilled.recomputed += len(p.rows) * d.request.sequences
                d.prefilled.held = p.visible - p.evicted
                _absorb(p, d.prefilled.reducing, d.prefilled.taken)
        if self._companion is not None:
            self._companion.judge(batch)
        return [None] * len(batch)

    def commit(self, d: Decoding) -> Stepped:
        """Make the chosen candidates final and tell what that gave."""
        proposed, d.candidates = d.candidates, None
        if proposed is None:
            raise ValueError("commit before propose")
        final = final_tokens(d, proposed, self.model.spec)
        positions, tokens = final.positions, final.tokens
        d.log_probabilities[positions] = final.log_probabilities
        edited = self._commit(d, positions, tokens)
        if d.constrained is not None:
            settle(d.constrained, d.canvas, d.commit)
            d.constrained.meter.end_step()
        if d.fresh is not None:  # of a step before that no pass followed
            embed_fresh(self.model, (d,))
        d.fresh = positions, tokens
        answer, complete = d.canvas.answer(self.model.spec.end_ids, revised=d.commit.revises)
        delta, reason = d.text.advance(answer, complete, d.canvas.new_tokens)
        if reason == "length" and d.constrained is not None:
            reason = "end"  # a constrained answer is whole
        snapshot = self._snapshot(d, edited) if d.request.streaming.snapshots else None
        if reason is not None:
            return Stepped(delta, snapshot, reason)
        pages = None if d.prefilled.reducing is None else self._reduced(d, d.prefilled.reducing)
        return Stepped(delta, snapshot, reason, pages, self._next_rows(d))

    def _next_rows(self, d: Decoding) -> int | None:
        """How many positions the next pass runs, drafts not counted; None = that depends on how far they have moved."""
        if is_watching(d.recompute):
            return None
        d.rows = d.recompute.rows(d.canvas)
        return len(d.rows) * d.request.sequences

    def _watched(self, p: Pass, reducing: Reducing | None, taken: Taken | None) -> Pass:
        """``p`` of a request whose K/V are reduced, or repaired (none has both): what it shows is noted, and rows lie
        where there is room now."""
        if taken is not None and taken.repairing is not None:
            seen = np.full(len(p.wanted), p.visible)
            if self.model.spec.attention is Attention.PREFIX:
                seen[p.wanted < p.canvas.prompt_length] = p.canvas.prompt_length
            return replace(p, observation=self._repairer.watch(taken.repairing, p.rows, p.wanted, seen, p.pages))
        if reducing is None:
            return p
        noted = self._reducer.watch(reducing, p.rows, p.visible, p.pages)
        return replace(p, evicted=reducing.evicted, observation=noted)

    @torch.inference_mode()
    def _reduced(self, d: Decoding, reducing: Reducing) -> int | None:
        """Drop what the request's reduction says; how many pages it needs from now on, if fewer than it has."""
        state = d.prefilled
        next_place = int(d.canvas.rotary_positions(np.array([state.held + reducing.evicted])).flat[0])
        state.held = self._reducer.reduce(reducing, state.pages, state.held, next_place)
        left = d.canvas.size - state.held - reducing.evicted
        pages = self._reducer.most_pages(reducing, state.held, left)
        if pages >= len(state.pages):
            return None
        state.pages = state.pages[:pages]
        return pages

    def _forward(
        self,
        stage: str,
        guided: list[tuple[Pass, Guidance | None]],
        constrained: list[Constrained | None],
        selection: Selection | None,
        graphs: Graphs | None = None,
    ) -> list[RowLogits]:
        """One forward pass of the ragged batch, each request with its guidance; constrained requests note its processor
        time."""
        begun, given, way = time.thread_time(), 0.0, self._ways.get(stage)

        def between() -> None:
            nonlocal given
            if way is not None:
                since = time.thread_time()
                way()
                given += time.thread_time() - since

        model, store, floor, sparse = self.model, self.store, self._floor, self._sparse
        passes = spread(guided, first=stage == "prefill")
        logits = forward(
            model, store, passes, floor, sparse=sparse, selection=selection, graphs=graphs, between=between
        )
        for state in constrained:
            if state is not None:
                state.meter.forward_seconds += time.thread_time() - begun - given
        return combined(guided, logits)

    def _candidates(
        self, request: Request, commit: Commit, p: Pass, logits: RowLogits | Shared, constrained: Constrained | None
    ) -> Candidates:
        """The candidates of a pass; what a constrained request asks of the logits besides is put into its state."""
        spec, sampling, reads = self.model.spec, request.sampling, commit.reads
        if isinstance(logits, Shared):
            return candidates(logits, p.targets, p.canvas, sampling, spec.banned_ids)
        if is_partial(commit) and (constrained is None or constrained.sampled is None):
            return self._in_part(commit, reads, request, p, logits, constrained)
        best = constrained.asks(p.canvas, p.targets, causal=spec.causal) if constrained is not None else None
        if is_proposing(commit):
            found = commit.propose(logits.whole(), p.canvas, sampling, spec.mask_id, spec.banned_ids, best)
        else:
            found = self._judged(request, p.canvas, p.targets, logits, best, reads)
        if constrained is not None and best is not None:
            constrained.ranked = best.ranked()
        return found

    def _judged(
        self,
        request: Request,
        canvas: Canvas,
        positions: np.ndarray,
        logits: RowLogits | Shared,
        best: Best | Draws | None,
        reads: frozenset[str],
    ) -> Candidates:
        """The sampler's candidates for ``positions``, from their logits."""
        spec = self.model.spec
        sampling, banned, scores = request.sampling, spec.banned_ids, self._scores
        return candidates(logits, positions, canvas, sampling, banned, best, scores, reads, judged_mask(spec))

    def _in_part(
        self,
        commit: Partial,
        reads: frozenset[str],
        request: Request,
        p: Pass,
        logits: RowLogits,
        constrained: Constrained | None,
    ) -> Candidates:
        """The candidates that the policy looks at, and the others only where it would choose of them."""
        spec, first = self.model.spec, p.canvas.prompt_length
        needed, counted = commit.needed(p.canvas, p.targets), replace(p.canvas, step=p.canvas.step + 1)
        parts: list[Best] = []

        def of(which: np.ndarray) -> Candidates:
            targets, rows = p.targets[which], logits.only(np.flatnonzero(which))
            best = None if constrained is None else constrained.best_of(targets - first, causal=spec.causal)
            parts.extend([] if best is None else [best])
            return self._judged(request, p.canvas, targets, rows, best, reads)

        found = of(needed)
        if not needed.all() and not commit.enough(counted, found):
            found = found.and_then(of(~needed))
        if constrained is not None:
            constrained.ranked = Ranked.joined([part.ranked() for part in parts])
        return found.where(np.argsort(found.positions))

    def _commit(self, d: Decoding, positions: np.ndarray, tokens: np.ndarray) -> int:
        """Fill masked positions, replace committed ones, and go on to the next block if this one is final.

        Returns how many tokens were replaced.
        """
        old = d.canvas.committed_at[positions] != MASKED
        edited = int(old.sum())
        if edited:
            d.canvas.edit(positions[old], tokens[old])
            positions, tokens = positions[~old], tokens[~old]
        d.canvas.commit(positions, tokens, hold=True)
        d.edits += edited
        if d.commit.settled(d.canvas, edited):
            d.canvas.advance()
        return edited

    @torch.inference_mode()
    def begin(
        self, request: Request, encoded: Encoded, pages: PageTable, admitted: Admitted | None = None
    ) -> Prefilling:
        """The prefill state of a request: ``encoded`` its prompt, ``pages`` its pages, of which the first may be
        filled already: it begins behind those. ``admitted``: its constraint, if it has one."""
        spec = self.model.spec
        canvas = Canvas.create(
            encoded.ids,
            new_tokens=request.sampling.max_new_tokens,
            block_length=spec.block_length(request.diffusion.block_length),
            mask_id=spec.mask_id,
            aligned=spec.attention is Attention.BLOCK_CAUSAL,
            places=encoded.places,
            logit_shift=spec.logit_shift,
        )
        constrained = admitted.begun(request) if admitted is not None else None
        read = canvas.tokens
        if constrained is not None:
            constrained.prepare(canvas)
            answer = constrained.shown(canvas.tokens[canvas.prompt_length :], spec.mask_id)
            read = np.concatenate([canvas.tokens[: canvas.prompt_length], answer])
        embeddings, deep = embedded(self.model, read, encoded)
        reused = pages.shared * self.store.page_size
        ids_of_pages = np.asarray(pages.ids, dtype=np.int64)
        ids_of_pages, guidance = guidance_of(request, self.model, canvas, embeddings, ids_of_pages)
        if guidance is not None and encoded.past is not None:
            raise Unimplemented("diffusion.cfg_scale is not available in video sessions: leave it out")
        commit = commit_policy(request, self._offered)
        begun = Prefilling(canvas, ids_of_pages, embeddings, commit, run=reused, reused=reused, deep=deep)
        begun.constrained, begun.guidance = constrained, guidance
        reduction = reduction_of(request)
        if reduction is not None:
            begun.reducing = self._reducer.begin(reduction, canvas.prompt_length, canvas.size, encoded.image_rows)
        reuse = reuse_of(request)
        if encoded.past is not None and self.blender is not None:
            begun.taken = self.blender.place(encoded.past, canvas, ids_of_pages)
            begun.reused += len(encoded.past.rows)
        elif reuse is not None and self.blender is not None:
            begun.taking = self.blender.take(reuse, encoded, canvas, embeddings, deep, ids_of_pages)
        if self._companion is not None and request.diffusion.commit.name in ACCOMPANIED:
            begun.companion = self._companion.begin(canvas, encoded)
        return begun

    def _rows(self, running: list[Decoding]) -> list[np.ndarray]:
        """Positions to run of each request; for policies that ask how far positions have moved, that is found first.

        They are kept until the request has its candidates: a pass that fails may have moved them already.
        """
        undecided = [d for d in running if d.rows is None]
        watching = [
            (d, Watch(d.canvas, d.prefilled.pages, d.prefilled.embeddings, positions))
            for d in undecided
            if is_watching(d.recompute) and len(positions := d.recompute.watched(d.canvas))
        ]
        if watching:
            changes = value_changes(
                self.model, self.store, [watch for _d, watch in watching], self._floor, sparse=self._sparse
            )
            for (d, _watch), moved in zip(watching, changes, strict=True):
                assert is_watching(d.recompute)
                d.rows = d.recompute.rows(d.canvas, moved)
        for d in undecided:
            if d.rows is None:
                d.rows = d.recompute.rows(d.canvas)
        return [d.rows for d in running if d.rows is not None]

    def tokens(self, d: Decoding) -> tuple[CommittedToken, ...]:
        """The answer's tokens as they were committed, as far as its text goes."""
        ends = self.model.spec.end_ids
        return committed_tokens(d.canvas, d.text.tokens, d.log_probabilities, self.model.tokenizer, ends)

    def _snapshot(self, d: Decoding, edited: int) -> Snapshot:
        text = canvas_text(d.canvas, self.model.tokenizer, self.model.spec.end_ids)
        committed = d.canvas.new_tokens - int(d.canvas.masked.sum())
        return Snapshot(text, committed, d.canvas.new_tokens, d.forwards, edited)


def _absorb(p: Pass, reducing: Reducing | None, taken: Taken | None) -> None:
    """Take over what the pass showed of a request, now that it is done."""
    if reducing is not None and isinstance(p.observation, Observation):
        reducing.absorb(p.observation)
    if taken is not None and isinstance(p.observation, AskingRows):
        taken.absorb(p.observation)
