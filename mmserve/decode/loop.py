"""The decoder of masked diffusion and next-token models: positions of canvases, run against a K/V store.

Prefill is its step 0 (``decode/prefill.py``), whose candidates are passed to decode with the pages.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from mmserve.constraint.session.session import Session
from mmserve.core.payloads import CanvasPayload, PrefilledPayload
from mmserve.core.request import Request
from mmserve.decode.drafts import draft_of
from mmserve.decode.emit import advanced, answer_of, snapshot_of, step_of
from mmserve.decode.extensions.base import watched
from mmserve.decode.final import final_tokens
from mmserve.decode.fresh import embed_fresh
from mmserve.decode.handover import opened, payload_of, restored
from mmserve.decode.parts import Parts
from mmserve.decode.prefill import Prefill
from mmserve.decode.rows import count_next_rows, rows_of
from mmserve.decode.state import Answer, Decoding, Prefilled, Stepped
from mmserve.kv.table import PageTable


class DiffusionDecoder:
    """Prefill and decode of one model over one K/V store; holds no state of any request."""

    def __init__(self, parts: Parts) -> None:
        self.parts, prefill = parts, Prefill(parts)
        self.begin, self.ready, self.prefill = prefill.begin, prefill.ready, prefill.run

    def set_yield_callbacks(self, prefill: Callable[[], None], decode: Callable[[], None]) -> None:
        self.parts.runner.set_yield_callbacks(prefill, decode)

    def open(self, request: Request, prefilled: Prefilled) -> Decoding:
        """The decode state of a request after prefill."""
        return opened(self.parts, request, prefilled)

    def payload(self, state: Prefilled | Decoding) -> PrefilledPayload | CanvasPayload:
        return payload_of(self.parts, state)

    @torch.inference_mode()
    def restored(
        self,
        request: Request,
        payload: PrefilledPayload | CanvasPayload,
        pages: PageTable,
        session: Session | None = None,
    ) -> Decoding:
        return restored(self.parts, request, payload, pages, session)

    @torch.inference_mode()
    def propose(self, batch: list[Decoding]) -> list[None]:
        """draft → rows → forward → candidates, for each request without candidates and without ``pending_rows``.

        A request's state is changed only when its candidates are complete: after a failure the call can be repeated.
        """
        parts, running = self.parts, [d for d in batch if d.candidates is None]
        embed_fresh(parts.model, running)
        for extension in parts.extensions:
            extension.before_rows(running)
        running = [d for d in running if not d.pending_rows]
        if running:
            rows = rows_of(running, parts.runner)
            passes = [watched(parts.passes.next(d, r), d.extensions) for d, r in zip(running, rows, strict=True)]
            guided = [(p, d.prefilled.guidance) for p, d in zip(passes, running, strict=True)]
            logits, seconds = parts.runner.run("decode", guided)
            shared = parts.proposer.share(list(zip(running, passes, logits, strict=True)))
            for d, p, own_logits in zip(running, passes, shared, strict=True):
                d.candidates = parts.proposer.propose(d.request, d.commit, d.extensions, p, own_logits)
                d.count_pass(len(p.rows), p.visible - p.evicted)
                for each in d.extensions:
                    each.after_forward(p, seconds)
        for extension in parts.extensions:
            extension.after_candidates(batch)
        return [None] * len(batch)

    def commit(self, d: Decoding) -> Stepped:
        """choose → commit → emit; does nothing for a request with ``pending_rows``."""
        proposed, d.candidates = d.candidates, None
        if proposed is None and d.pending_rows:
            return Stepped("", None, None, rows=d.pending_rows)
        if proposed is None:
            raise ValueError("commit before propose")
        spec = self.parts.model.spec
        final, begun = final_tokens(d, proposed, spec), d.canvas.block_start
        edited = d.fill(final.positions, final.tokens, final.log_probabilities)
        if d.fresh is not None:  # of an earlier step that no pass followed
            embed_fresh(self.parts.model, (d,))
        d.fresh = final.positions, final.tokens
        answer, complete = d.canvas.answer(spec.end_ids, revised=d.commit.revises)
        delta, reason = advanced(d, answer, complete, d.canvas.new_tokens)
        pages = len(d.prefilled.pages)
        for each in d.extensions:
            each.committed(d, reason)
        snapshot = snapshot_of(d, self.parts.model, d.canvas, edited) if d.request.streaming.snapshots else None
        draft = draft_of(d, self.parts.model, d.canvas, proposed)
        committed = len(final.positions) - edited
        step = step_of(d, begun, committed, edited)
        if reason is not None:
            return Stepped(delta, snapshot, reason, committed=committed, step=step, draft=draft)
        left = len(d.prefilled.pages)
        return Stepped(
            delta, snapshot, None, left if left < pages else None, count_next_rows(d), committed, step, draft
        )

    def answer(self, d: Decoding) -> Answer:
        return answer_of(d, self.parts.model)
