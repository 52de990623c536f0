"""Uniform-state diffusion: decoding of models that denoise canvases of random tokens (DiffusionGemma,
huggingface/transformers).

A canvas has no masks: until it is final, all of it may change in each step. Then it is prefilled like the prompt, and
the next one begins. Each request is prefilled separately and draws from its own seed; the network denoises the canvases
of all requests in one pass, without dependence between them. Shapes in names: L positions of a canvas, V tokens of the
vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from mmserve.constraint.session.session import Session
from mmserve.core.candidates import Alternatives, Candidates
from mmserve.core.canvas import Canvas
from mmserve.core.encoded import Encoded
from mmserve.core.payloads import CanvasPayload, PrefilledPayload
from mmserve.core.request import Request
from mmserve.decode.alternatives import alternatives
from mmserve.decode.commit.scheduled import Scheduled
from mmserve.decode.drafts import draft_of, record_for
from mmserve.decode.emit import advanced, answer_of, snapshot_of, step_of
from mmserve.decode.forward import floor_of
from mmserve.decode.policies import Offered, commit_policy
from mmserve.decode.sampler import candidates_of, step_generator
from mmserve.decode.state import Answer, Stepped
from mmserve.decode.text import TextStream
from mmserve.decode.uniform_state.constraint import CanvasConstraint
from mmserve.decode.uniform_state.samplers import (
    CanvasSampler,
    EntropyBoundSampler,
    ScheduledSampler,
    Step,
    pinned,
    seed_of,
)
from mmserve.decode.uniform_state.state import CanvasDecoding, CanvasPrefilled, payload_of, prefilled_of, resumed
from mmserve.kv.table import PageTable
from mmserve.models.base import CanvasModel, OpenCanvas


class UniformStateDecoder:
    """Prefill and decode of one model; holds no state of any request."""

    def __init__(self, model: CanvasModel, offered: Offered | None = None) -> None:
        assert model.spec.renoising is not None
        self.model, self._renoising = model, model.spec.renoising
        self._offered = offered or Offered.by(model)
        model.network.set_row_floor(floor_of(model.network.products(), model.dtype, model.device))

    def begin(
        self, request: Request, encoded: Encoded, pages: PageTable, session: Session | None = None
    ) -> CanvasPrefilled:
        """The prefill state of a request. Its pages only account for memory; the network has its own K/V cache."""
        length = self.model.spec.block_length()
        canvases = -(-request.sampling.max_new_tokens // length)
        canvas = Canvas.create(
            encoded.ids, new_tokens=canvases * length, block_length=length, mask_id=self.model.spec.mask_id
        )
        constraint = None if session is None else CanvasConstraint(session)
        if constraint is not None:
            canvas.padded = constraint.session.answer.padded
        return CanvasPrefilled(canvas, encoded.features, constraint)

    def set_yield_callbacks(self, prefill: Callable[[], None], decode: Callable[[], None]) -> None:
        """Does nothing: the model's own network runs each pass as a whole."""

    def ready(self, _begun: CanvasPrefilled) -> bool:
        """True: no work precedes the pass over a prompt."""
        return True

    @torch.inference_mode()
    def prefill(self, batch: list[tuple[Request, CanvasPrefilled]]) -> list[CanvasPrefilled | None]:
        """Run each prompt in one pass; after a failure the call can be repeated."""
        return [self._prefilled(begun) for _request, begun in batch]

    def _prefilled(self, begun: CanvasPrefilled) -> CanvasPrefilled:
        size = begun.canvas.prompt_length
        past = self.model.network.read(self._tensor(begun.canvas.tokens[:size]), None, begun.features)
        return replace(begun, past=past, run=size)

    def open(self, request: Request, prefilled: CanvasPrefilled) -> CanvasDecoding:
        """The decode state of a request after prefill; its first canvas is noise."""
        d = self._opened(request, prefilled)
        self._begin_canvas(d)
        return d

    def _opened(self, request: Request, prefilled: CanvasPrefilled) -> CanvasDecoding:
        return CanvasDecoding(
            request,
            prefilled.canvas,
            prefilled.features,
            prefilled.past,
            prefilled.run,
            TextStream(self.model.tokenizer, request.sampling.stop, within=request.keeps_space),
            self._renoising,
            self._sampler(request),
            np.zeros(prefilled.canvas.size, np.float32),
            prefilled.run,
            prefilled.constraint,
            record=record_for(request.streaming, request.sampling.max_new_tokens),
        )

    def payload(self, state: CanvasPrefilled | CanvasDecoding) -> PrefilledPayload | CanvasPayload:
        return payload_of(self.model, state)

    @torch.inference_mode()
    def restored(
        self,
        request: Request,
        payload: PrefilledPayload | CanvasPayload,
        pages: PageTable,
        session: Session | None = None,
    ) -> CanvasDecoding:
        begun = prefilled_of(self.model, payload.prefilled, session)
        if isinstance(payload, CanvasPayload):
            return resumed(self._opened(request, begun), payload)
        return self.open(request, begun)

    @torch.inference_mode()
    def propose(self, batch: list[CanvasDecoding]) -> list[None]:
        """rows → forward, for each request without logits: the whole open canvas, after the positions that became final
        since the last pass. A request's state is changed only when its logits are complete, or by prefill of final
        canvases."""
        waiting = [d for d in batch if d.logits_LV is None]
        for d in waiting:
            self._read(d)
        for d, logits in zip(waiting, self.model.network.predict([self._open_canvas(d) for d in waiting]), strict=True):
            d.logits_LV = logits
            d.canvas.count_forward()
            d.forwards += 1
            d.recomputed += len(d.noise)
        return [None] * len(batch)

    @torch.inference_mode()
    def commit(self, d: CanvasDecoding) -> Stepped:
        """candidates → choose → commit → emit: accept and redraw tokens of the canvas, or make it final."""
        logits, d.logits_LV = d.logits_LV, None
        if logits is None:
            raise ValueError("commit before propose")
        generator = step_generator(d.request.sampling.seed, d.canvas.step, logits.device)
        step = d.sampler.step(logits, d.noise.to(logits.device), d.canvas.block_step - 1, generator)
        if d.constraint is not None:
            step = d.constraint.project(d.canvas, logits, step)
        if (seed := seed_of(d.request, d.canvas)) is not None:
            step = pinned(step, seed)
        # in the dtype of the next pass: bf16 halves a request's largest tensor
        step = replace(step, shaped_LV=step.shaped_LV.to(self.model.dtype))
        ended, begun = d.converged(step), d.canvas.block_start
        proposed = None if d.record is None else self._candidates(d, logits, step)
        if ended or d.canvas.block_step >= d.sampler.steps:
            self._finish_canvas(d, logits, step.predicted_L if ended else step.last_L)
        else:
            d.canvas.tokens[d.canvas.block()] = step.noise_L.cpu().numpy()
        new = d.request.sampling.max_new_tokens
        answer, complete = d.canvas.answer(self.model.spec.end_ids)
        delta, reason = advanced(d, answer[:new], complete or len(answer) >= new, new)
        if d.constraint is not None:
            d.constraint.check(d, reason)
        snapshot = snapshot_of(d, self.model, d.predicted_canvas()) if d.request.streaming.snapshots else None
        draft = None if proposed is None else draft_of(d, self.model, d.canvas, proposed)
        committed = d.canvas.block_start - begun
        report = step_of(d, begun, committed)
        return Stepped(delta, snapshot, reason, None, self.model.spec.block_length(), committed, report, draft)

    def answer(self, d: CanvasDecoding) -> Answer:
        return answer_of(d, self.model)

    def _candidates(self, d: CanvasDecoding, logits_LV: Tensor, step: Step) -> Candidates:
        """The candidates if the open canvas were made final now, with alternatives."""
        logits = logits_LV.float()
        found = candidates_of(logits, d.canvas.block(), step.predicted_L)
        count = d.request.streaming.alternatives
        return replace(found, alternatives=Alternatives(*alternatives(logits, count, (), None))) if count else found

    def _sampler(self, request: Request) -> CanvasSampler:
        """The sampler of the request's steps: the scheduler that it names, or the model's own rule, with the model's
        bound."""
        commit = commit_policy(request, self._offered)
        if isinstance(commit, Scheduled):
            steps = self._steps(request, commit.scheduler.steps)
            return ScheduledSampler(commit.scheduler, steps, request.sampling)
        bound = request.diffusion.commit.options.get("bound", self._renoising.bound)
        steps = self._steps(request, self._renoising.steps)
        return EntropyBoundSampler(replace(self._renoising, bound=float(bound), steps=steps))

    def _steps(self, request: Request, own: int) -> int:
        """Maximum steps of a canvas: ``own``, the request's limit if lower, or its share of the request's steps."""
        if request.diffusion.max_steps:
            return min(own, request.diffusion.max_steps)
        canvases = -(-request.sampling.max_new_tokens // self.model.spec.block_length())
        asked = request.diffusion.steps
        return max(1, asked // canvases) if asked else own

    def _begin_canvas(self, d: CanvasDecoding) -> None:
        while self._begin_next(d):
            self._close_canvas(d, d.canvas.tokens[d.canvas.block()])

    def _begin_next(self, d: CanvasDecoding) -> bool:
        """Begin a canvas with noise or the request's seed, and write the fixed tokens of a template. Returns whether
        nothing is left to decode."""
        block = d.canvas.block()
        if len(block):
            # Steps are numbered from 1, canvases by negative positions, so that their random seeds never collide.
            generator = step_generator(d.request.sampling.seed, -int(block[0]), self.model.device)
            size, vocabulary = (len(block),), self.model.network.vocab_size
            noise = torch.randint(vocabulary, size, generator=generator, device=self.model.device)
            d.canvas.tokens[block] = noise.cpu().numpy()
            if (seed := seed_of(d.request, d.canvas)) is not None:
                d.canvas.tokens[block] = seed.tokens
        d.step, d.stable_steps = None, 0
        return bool(len(block)) and d.constraint is not None and d.constraint.begin_canvas(d.canvas)

    def _finish_canvas(self, d: CanvasDecoding, logits_LV: Tensor, final: Tensor) -> None:
        block = d.canvas.block()
        chosen = logits_LV.float().log_softmax(-1).gather(-1, final[:, None])[:, 0]
        d.log_probabilities[block] = chosen.cpu().numpy()
        self._close_canvas(d, final.cpu().numpy())
        self._begin_canvas(d)

    def _close_canvas(self, d: CanvasDecoding, final: np.ndarray) -> None:
        d.canvas.commit(d.canvas.block(), final)
        if d.constraint is not None:
            d.constraint.sync(d.canvas)

    def _open_canvas(self, d: CanvasDecoding) -> OpenCanvas:
        before = None if d.step is None else d.step.shaped_LV
        return OpenCanvas(d.noise.to(self.model.device), d.past, before)

    def _read(self, d: CanvasDecoding) -> None:
        """Prefill the canvases that became final since the last call; after a failure, everything is prefilled again.

        In the same pieces as before (the prompt, then each canvas): other pieces would change last bits.
        """
        past, d.past = d.past, None
        start = 0 if past is None else d.read
        while start < d.canvas.block_start:
            prompt = start < d.canvas.prompt_length
            end = d.canvas.prompt_length if prompt else start + d.canvas.block_length
            ids = self._tensor(d.canvas.tokens[start:end])
            past = self.model.network.read(ids, past, d.features if prompt else None)
            d.recomputed += end - start
            start = end
        d.past, d.read = past, start

    def _tensor(self, ids: np.ndarray) -> Tensor:
        return torch.from_numpy(ids).to(self.model.device)
