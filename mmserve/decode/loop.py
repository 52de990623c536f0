"""The one decode loop: recompute → forward → candidates → commit, a step at a time for a ragged batch.

Prefill is its step 0: prompt and masked canvas run together, and the candidates go to decode with the pages.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mmserve.core.canvas import MASKED, Canvas
from mmserve.core.events import CommittedToken, Snapshot
from mmserve.core.request import Policy, Request
from mmserve.decode.commit import COMMIT, UNPENALISED, Commit
from mmserve.decode.forward import Pass, Watch, forward, row_floor, value_changes
from mmserve.decode.recompute import RECOMPUTE, Recompute
from mmserve.decode.recompute.base import Watching, every_position
from mmserve.decode.sampler import candidates
from mmserve.decode.state import Decoding, Encoded, Prefilled, Prefilling
from mmserve.decode.text import TextStream, canvas_text
from mmserve.errors import FieldViolation, InvalidArgument
from mmserve.kv.store import KVStore
from mmserve.models.base import Attention, LoadedModel


@dataclass(frozen=True)
class Stepped:
    """What one step gave for one request: new final text, the canvas if asked for, and why it ended, if it did."""

    delta: str
    snapshot: Snapshot | None
    reason: str | None  # None = goes on; "end", "stop" or "length"


def recompute_policy(request: Request) -> Recompute:
    """The request's recompute policy; ``InvalidArgument`` for an unknown name or option."""
    made: Recompute = _policy("diffusion", "recompute", RECOMPUTE, request.diffusion.recompute, request)
    return made


def commit_policy(request: Request) -> Commit:
    """The request's commit policy; ``InvalidArgument`` for an unknown name or option."""
    made: Commit = _policy("diffusion", "commit", COMMIT, request.diffusion.commit, request)
    if request.diffusion.commit.name in UNPENALISED and request.sampling.repetition_penalty != 1:
        why = f"must be 1 with the commit policy {request.diffusion.commit.name!r}"
        raise InvalidArgument.of("sampling.repetition_penalty", why)
    return made


def _policy(path: str, kind: str, known: dict[str, Callable[..., Any]], policy: Policy, request: Request) -> Any:
    """The policy with its own numbers, those of the request that it asks for, and the policy it builds on."""
    if policy.name not in known:
        raise InvalidArgument.of(f"{path}.{kind}", f"there is no policy {policy.name!r}; known are {sorted(known)}")
    path = f"{path}.{policy.name}"
    taken = set(inspect.signature(known[policy.name]).parameters)
    shared: dict[str, Any] = {"steps": request.diffusion.steps, "seed": request.sampling.seed}
    if "base" in taken:
        shared["base"] = _policy(path, "base", known, policy.base or Policy(name="low_confidence"), request)
    try:
        return known[policy.name](**{name: value for name, value in shared.items() if name in taken}, **policy.options)
    except (TypeError, ValueError) as error:
        raise InvalidArgument(FieldViolation(path, str(error))) from error


class DiffusionDecoder:
    """Prefill and decode of one model over one K/V store; holds no state of any request.

    ``chunk``: most positions of a next-token model's prompt that one pass of prefill runs; 0 = all.
    """

    def __init__(self, model: LoadedModel, store: KVStore, *, chunk: int = 0) -> None:
        self.model, self.store, self._chunk = model, store, chunk
        self._floor = row_floor(model)
        model.decoder.set_row_floor(self._floor)

    @torch.inference_mode()
    def prefill(self, batch: list[tuple[Request, Prefilling]]) -> list[Prefilled | None]:
        """Step 0 of each request: canvas with pages and candidates out, None where some of the prompt is left to run.

        Requests are changed only when nothing can fail any more: after a failure the call can be repeated.
        """
        passes = [self._first_pass(p) for _request, p in batch]
        logits = forward(self.model, self.store, passes, self._floor)
        banned = self.model.spec.banned_ids
        proposed = [
            candidates(rows, p.targets, p.canvas, request.sampling, banned) if len(p.targets) else None
            for (request, _begun), p, rows in zip(batch, passes, logits, strict=True)
        ]
        results: list[Prefilled | None] = []
        for (_request, begun), p, found in zip(batch, passes, proposed, strict=True):
            begun.run += len(p.rows)
            if found is None:
                results.append(None)
                continue
            p.canvas.count_forward()
            results.append(Prefilled(p.canvas, p.pages, p.embeddings, found, begun.run))
        return results

    def open(self, request: Request, prefilled: Prefilled) -> Decoding:
        """The decode state of a request that prefill handed over."""
        text = TextStream(self.model.tokenizer, request.sampling.stop)
        return Decoding(
            request,
            prefilled,
            recompute_policy(request),
            commit_policy(request),
            text,
            prefilled.candidates,
            np.zeros(prefilled.canvas.size, np.float32),
        )

    @torch.inference_mode()
    def propose(self, batch: list[Decoding]) -> list[None]:
        """Candidates for each request that has none yet, from one forward pass of the ragged batch.

        A request is changed only once its own candidates are there: after a failure the call can be repeated.
        """
        running = [d for d in batch if d.candidates is None]
        if running:
            passes = [self._next_pass(d, rows) for d, rows in zip(running, self._rows(running), strict=True)]
            logits = forward(self.model, self.store, passes, self._floor)
            banned = self.model.spec.banned_ids
            for d, p, mine in zip(running, passes, logits, strict=True):
                d.candidates = candidates(mine, p.targets, d.canvas, d.request.sampling, banned)
                d.rows = None
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
        edited = self._commit(d, positions, tokens)
        d.log_probabilities[positions] = np.log(np.maximum(proposed.confidence[chosen], np.finfo(np.float32).tiny))
        device = self.model.device
        fresh = self.model.decoder.embed(torch.from_numpy(tokens).to(device))
        d.prefilled.embeddings[torch.from_numpy(positions).to(device)] = fresh
        answer, complete = d.canvas.answer(self.model.spec.end_ids, revised=d.commit.revises)
        delta = d.text.push(answer)
        reason = None
        if d.text.stopped:
            reason = "stop"
        elif complete:
            delta += d.text.finish()
            full = len(answer) == d.canvas.new_tokens
            reason = "stop" if d.text.stopped else "length" if full else "end"
        return Stepped(delta, self._snapshot(d, edited) if d.request.streaming.snapshots else None, reason)

    def _commit(self, d: Decoding, positions: np.ndarray, tokens: np.ndarray) -> int:
        """Fill masked positions, replace committed ones, and go on to the next block if this one is final.

        Returns how many tokens were replaced.
        """
        old = d.canvas.committed_at[positions] != MASKED
        edited = int(old.sum())
        d.canvas.commit(positions[~old], tokens[~old], hold=True)
        d.canvas.edit(positions[old], tokens[old])
        d.edits += edited
        if d.commit.settled(d.canvas, edited):
            d.canvas.advance()
        return edited

    @torch.inference_mode()
    def begin(self, request: Request, encoded: Encoded, pages: np.ndarray) -> Prefilling:
        """The prefill state of a request: ``encoded`` its prompt, ``pages`` (int64) its page ids."""
        spec = self.model.spec
        canvas = Canvas.create(
            encoded.ids,
            new_tokens=request.sampling.max_new_tokens,
            block_length=spec.block_length(request.diffusion.block_length),
            mask_id=spec.mask_id,
            aligned=spec.attention is Attention.BLOCK_CAUSAL,
        )
        ids = canvas.tokens.copy()
        ids[encoded.image_rows] = spec.mask_id  # a placeholder may have no embedding: features take its place
        embeddings = self.model.decoder.embed(torch.from_numpy(ids).to(self.model.device))
        if encoded.features is not None:
            embeddings[torch.from_numpy(encoded.image_rows).to(self.model.device)] = encoded.features
        return Prefilling(canvas, pages, embeddings, commit_policy(request))

    def _first_pass(self, p: Prefilling) -> Pass:
        """The pass over what has not been run yet; of a next-token model's prompt, over its next chunk."""
        whole = self._pass(p.canvas, p.pages, p.embeddings, every_position(p.canvas), p.commit)
        rows = whole.rows[p.run :]
        before = int(whole.wanted[0]) - p.run  # rows left in front of the first whose logits are wanted
        if self._chunk and self.model.spec.causal and len(rows) > self._chunk and before:
            chunk, none = rows[: min(self._chunk, before)], rows[:0]
            return replace(whole, rows=chunk, targets=none, wanted=none, visible=p.run + len(chunk))
        return replace(whole, rows=rows)

    def _rows(self, running: list[Decoding]) -> list[np.ndarray]:
        """Positions to run of each request; for policies that ask how far positions have moved, that is found first.

        They are kept until the request has its candidates: a pass that fails may have moved them already.
        """
        undecided = [d for d in running if d.rows is None]
        watching = [
            (d, Watch(d.canvas, d.prefilled.pages, d.prefilled.embeddings, positions))
            for d in undecided
            if isinstance(d.recompute, Watching) and len(positions := d.recompute.watched(d.canvas))
        ]
        if watching:
            changes = value_changes(self.model, self.store, [watch for _d, watch in watching], self._floor)
            for (d, _watch), moved in zip(watching, changes, strict=True):
                assert isinstance(d.recompute, Watching)
                d.rows = d.recompute.rows(d.canvas, moved)
        for d in undecided:
            if d.rows is None:
                d.rows = d.recompute.rows(d.canvas)
        return [d.rows for d in running if d.rows is not None]

    def _next_pass(self, d: Decoding, rows: np.ndarray) -> Pass:
        return self._pass(d.canvas, d.prefilled.pages, d.prefilled.embeddings, rows, d.commit)

    def _pass(self, canvas: Canvas, pages: np.ndarray, embeddings: Tensor, rows: np.ndarray, commit: Commit) -> Pass:
        """What to run for the open positions of the block, or of the canvas if ``commit`` looks at all of it.

        The rows that tell of them are run too. Where attention ends at a row, or at its block, what stands right of
        that is of no use yet.
        """
        spec = self.model.spec
        if spec.attention is Attention.BLOCK_CAUSAL:
            rows = rows[rows < canvas.block_end]
        targets = canvas.all_masked() if commit.whole_canvas else canvas.block_masked()
        if commit.revises:
            targets = canvas.block()
            rows = np.union1d(rows, targets)  # all of the block is judged, whatever the cache policy
        drafted = self._draft(canvas, commit) if spec.causal else canvas.tokens[:0]
        if len(drafted):
            places = torch.from_numpy(targets[: len(drafted)]).to(self.model.device)
            embeddings[places] = self.model.decoder.embed(torch.from_numpy(drafted).to(self.model.device))
            rows = np.union1d(rows, targets[: len(drafted)])
        if spec.causal:
            targets = targets[: len(drafted) + 1]
        targets = targets[np.isin(targets, rows) | np.isin(targets - spec.logit_shift, rows)]
        wanted = targets - spec.logit_shift
        visible = int(wanted[-1]) + 1 if spec.causal else canvas.size
        if spec.attention is Attention.BLOCK_CAUSAL:
            visible = canvas.block_end
        return Pass(canvas, pages, embeddings, np.union1d(rows[rows < visible], wanted), targets, wanted, visible)

    def _draft(self, canvas: Canvas, commit: Commit) -> np.ndarray:
        """The policy's draft up to the first token that the model cannot generate, such as an image's placeholder."""
        drafted = commit.draft(canvas)
        impossible = np.isin(drafted, self.model.spec.banned_ids) | (drafted >= self.model.decoder.config.vocab_size)
        return drafted[: int(np.argmax(impossible))] if impossible.any() else drafted

    def tokens(self, d: Decoding) -> tuple[CommittedToken, ...]:
        """The answer's tokens as they were committed, as far as its text goes."""
        at = range(d.canvas.prompt_length, d.canvas.prompt_length + d.text.tokens)
        ids = d.canvas.tokens[at.start : at.stop].tolist()
        return tuple(
            CommittedToken(
                token,
                self.model.tokenizer.decode([token]),
                float(d.log_probabilities[i]),
                int(d.canvas.committed_at[i]),
            )
            for i, token in zip(at, ids, strict=True)
        )

    def _snapshot(self, d: Decoding, edited: int) -> Snapshot:
        text = canvas_text(d.canvas, self.model.tokenizer, self.model.spec.end_ids)
        committed = d.canvas.new_tokens - int(d.canvas.masked.sum())
        return Snapshot(text, committed, d.canvas.new_tokens, d.forwards, edited)
