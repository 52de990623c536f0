"""The one decode loop: recompute → forward → candidates → commit, a step at a time for a ragged batch.

Prefill is its step 0: prompt and masked canvas run together, and the candidates go to decode with the pages.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mmserve.core.canvas import Canvas
from mmserve.core.events import Snapshot
from mmserve.core.request import Policy, Request
from mmserve.decode.commit import COMMIT, Commit
from mmserve.decode.forward import Pass, forward, row_floor
from mmserve.decode.recompute import RECOMPUTE, Recompute
from mmserve.decode.recompute.base import every_position
from mmserve.decode.sampler import candidates
from mmserve.decode.state import Decoding, Encoded, Prefilled
from mmserve.decode.text import TextStream, canvas_text
from mmserve.errors import FieldViolation, InvalidArgument
from mmserve.kv.store import KVStore
from mmserve.models.base import LoadedModel


@dataclass(frozen=True)
class Stepped:
    """What one step gave for one request: new final text, the canvas if asked for, and why it ended, if it did."""

    delta: str
    snapshot: Snapshot | None
    reason: str | None  # None = goes on; "end", "stop" or "length"


def recompute_policy(request: Request) -> Recompute:
    """The request's recompute policy; ``InvalidArgument`` for an unknown name or option."""
    return _policy("diffusion.recompute", RECOMPUTE, request.diffusion.recompute, {})


def commit_policy(request: Request) -> Commit:
    """The request's commit policy; ``InvalidArgument`` for an unknown name or option."""
    scheduled = {"steps": request.diffusion.steps} if request.diffusion.commit.name == "low_confidence" else {}
    return _policy("diffusion.commit", COMMIT, request.diffusion.commit, scheduled)


def _policy(field: str, known: dict[str, Callable[..., Any]], policy: Policy, extra: dict[str, Any]) -> Any:
    if policy.name not in known:
        raise InvalidArgument.of(field, f"there is no policy {policy.name!r}; known are {sorted(known)}")
    try:
        return known[policy.name](**policy.options, **extra)
    except (TypeError, ValueError) as error:
        raise InvalidArgument(FieldViolation(f"{field}.{policy.name}", str(error))) from error


class DiffusionDecoder:
    """Prefill and decode of one model over one K/V store; holds no state of any request."""

    def __init__(self, model: LoadedModel, store: KVStore) -> None:
        self.model, self.store = model, store
        self._floor = row_floor(model)

    @torch.inference_mode()
    def prefill(self, batch: list[tuple[Request, Encoded, np.ndarray]]) -> list[Prefilled]:
        """Step 0 of each request: ``(request, prompt, page ids)`` in, canvas with pages and candidates out."""
        passes = [self._first_pass(*item) for item in batch]
        logits = forward(self.model, self.store, passes, self._floor)
        results = []
        for (request, _encoded, pages), p, rows in zip(batch, passes, logits, strict=True):
            proposed = candidates(rows, p.targets, p.canvas, request.sampling, self.model.spec.banned_ids)
            p.canvas.count_forward()
            results.append(Prefilled(p.canvas, pages, p.embeddings, proposed, len(p.rows)))
        return results

    def open(self, request: Request, prefilled: Prefilled) -> Decoding:
        """The decode state of a request that prefill handed over."""
        text = TextStream(self.model.tokenizer, request.sampling.stop)
        return Decoding(
            request, prefilled, recompute_policy(request), commit_policy(request), text, prefilled.candidates
        )

    @torch.inference_mode()
    def propose(self, batch: list[Decoding]) -> list[None]:
        """Candidates for each request that has none yet, from one forward pass of the ragged batch.

        A request is changed only once its own candidates are there: after a failure the call can be repeated.
        """
        running = [d for d in batch if d.candidates is None]
        if running:
            passes = [self._next_pass(d) for d in running]
            logits = forward(self.model, self.store, passes, self._floor)
            banned = self.model.spec.banned_ids
            for d, p, rows in zip(running, passes, logits, strict=True):
                d.candidates = candidates(rows, p.targets, d.canvas, d.request.sampling, banned)
                d.canvas.count_forward()
                d.forwards += 1
                d.prefilled.recomputed += len(p.rows)
        return [None] * len(batch)

    @torch.inference_mode()
    def commit(self, d: Decoding) -> Stepped:
        """Make the chosen candidates final and tell what that gave."""
        proposed, d.candidates = d.candidates, None
        if proposed is None:
            raise ValueError("commit before propose")
        chosen = d.commit.choose(d.canvas, proposed)
        positions, tokens = proposed.positions[chosen], proposed.tokens[chosen]
        d.canvas.commit(positions, tokens)
        device = self.model.device
        fresh = self.model.decoder.embed(torch.from_numpy(tokens).to(device))
        d.prefilled.embeddings[torch.from_numpy(positions).to(device)] = fresh
        answer, complete = d.canvas.answer(self.model.spec.end_ids)
        delta = d.text.push(answer)
        reason = None
        if d.text.stopped:
            reason = "stop"
        elif complete:
            delta += d.text.finish()
            full = len(answer) == d.canvas.new_tokens
            reason = "stop" if d.text.stopped else "length" if full else "end"
        return Stepped(delta, self._snapshot(d) if d.request.streaming.snapshots else None, reason)

    def _first_pass(self, request: Request, encoded: Encoded, pages: np.ndarray) -> Pass:
        spec = self.model.spec
        canvas = Canvas.create(
            encoded.ids,
            new_tokens=request.sampling.max_new_tokens,
            block_length=spec.block_length(request.diffusion.block_length),
            mask_id=spec.mask_id,
        )
        ids = canvas.tokens.copy()
        ids[encoded.image_rows] = spec.mask_id  # a placeholder may have no embedding: features take its place
        embeddings = self.model.decoder.embed(torch.from_numpy(ids).to(self.model.device))
        if encoded.features is not None:
            embeddings[torch.from_numpy(encoded.image_rows).to(self.model.device)] = encoded.features
        return self._pass(canvas, pages, embeddings, every_position(canvas))

    def _next_pass(self, d: Decoding) -> Pass:
        return self._pass(d.canvas, d.prefilled.pages, d.prefilled.embeddings, d.recompute.rows(d.canvas))

    def _pass(self, canvas: Canvas, pages: np.ndarray, embeddings: Tensor, rows: np.ndarray) -> Pass:
        """What to run for the open positions of the block; a causal model has no use for what stands right of them."""
        spec = self.model.spec
        targets = canvas.block_masked()
        wanted = targets - spec.logit_shift
        if not spec.causal:
            return Pass(canvas, pages, embeddings, rows, targets, wanted, canvas.size)
        return Pass(canvas, pages, embeddings, rows[rows <= wanted[-1]], targets, wanted, int(wanted[-1]) + 1)

    def _snapshot(self, d: Decoding) -> Snapshot:
        text = canvas_text(d.canvas, self.model.tokenizer, self.model.spec.end_ids)
        committed = d.canvas.new_tokens - int(d.canvas.masked.sum())
        return Snapshot(text, committed, d.canvas.new_tokens, d.forwards)
