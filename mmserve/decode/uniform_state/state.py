"""State of a request to a uniform-state diffusion model in prefill and in decode."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from mmserve.constraint.restored import session_state
from mmserve.constraint.session.session import Session
from mmserve.core.canvas import Canvas
from mmserve.core.canvas_record import CanvasRecord
from mmserve.core.payloads import CanvasPayload, KVState, PrefilledPayload
from mmserve.core.request import Request
from mmserve.decode.extensions.base import RequestExtension
from mmserve.decode.text import TextStream
from mmserve.decode.uniform_state.constraint import CanvasConstraint
from mmserve.decode.uniform_state.samplers import CanvasSampler, Step, is_entropy_low
from mmserve.models.base import CanvasModel, Renoising


@dataclass
class CanvasPrefilled:
    """A request in prefill, with the network's K/V cache of the positions run so far."""

    canvas: Canvas
    features: Tensor | None  # visual tokens [n, D] of the prompt's images
    constraint: CanvasConstraint | None = None
    past: object | None = None
    run: int = 0  # positions that the network has run

    @property
    def embeddings(self) -> None:
        """None: the network embeds tokens itself."""


@dataclass
class CanvasDecoding:
    """A request in decode: its canvases, the noise of the open one, and the result of its last step."""

    request: Request
    canvas: Canvas
    features: Tensor | None  # visual tokens [n, D] of the prompt's images
    past: object | None
    read: int  # positions that ``past`` holds
    text: TextStream
    renoising: Renoising
    sampler: CanvasSampler
    log_probabilities: np.ndarray  # float32 [N], of the final tokens of the answer
    recomputed: int
    constraint: CanvasConstraint | None = None
    logits_LV: Tensor | None = None  # of the latest pass, until they are used
    step: Step | None = None  # latest step on the open canvas; None = it is still all noise
    stable_steps: int = 0  # consecutive steps with the same predictions
    forwards: int = 0
    edits: int = 0  # always 0: final tokens do not change
    record: CanvasRecord | None = None  # see ``Decoding``

    @property
    def extensions(self) -> tuple[RequestExtension, ...]:
        """Its constraint, if any: other extensions need K/V pages or masks."""
        return () if self.constraint is None else (self.constraint,)

    @property
    def held(self) -> int:
        """Number of positions with K/V, which the network keeps itself."""
        return self.read

    @property
    def noise(self) -> Tensor:
        """The tokens of the open canvas, int64 ``[L]``."""
        return torch.from_numpy(self.canvas.tokens[self.canvas.block()])

    def converged(self, step: Step) -> bool:
        """Record the latest ``step``. Returns whether it makes the canvas final: enough consecutive steps predicted the
        same, and its entropy is low enough."""
        same = self.step is not None and bool(torch.equal(step.predicted_L, self.step.predicted_L))
        self.stable_steps = self.stable_steps + 1 if same else 0
        self.step = step
        return self.stable_steps >= self.renoising.stable and is_entropy_low(step, self.renoising)

    def predicted_canvas(self) -> Canvas:
        """The canvas as it would be if it were made final now; positions right of it are masked."""
        size = self.canvas.prompt_length + self.request.sampling.max_new_tokens
        tokens, final = self.canvas.tokens.copy(), self.canvas.committed_at.copy()
        if self.step is not None:
            tokens[self.canvas.block()] = self.step.predicted_L.cpu().numpy()
            final[self.canvas.block()] = self.canvas.step
        return replace(self.canvas, tokens=tokens[:size], committed_at=final[:size])


def payload_of(model: CanvasModel, state: CanvasPrefilled | CanvasDecoding) -> PrefilledPayload | CanvasPayload:
    """The payload of a request that continues in another process; the network's K/V are not in pages (``page_size``
    0)."""
    if isinstance(state, CanvasPrefilled):
        return _prefilled(model, state, state.run, state.run)
    return CanvasPayload(
        _prefilled(model, state, state.read, state.recomputed),
        state.text.state(),
        state.log_probabilities,
        state.forwards,
        step=None if state.step is None else vars(state.step),
        stable_steps=state.stable_steps,
        record=state.record,
    )


def _prefilled(
    model: CanvasModel, state: CanvasPrefilled | CanvasDecoding, read: int, recomputed: int
) -> PrefilledPayload:
    past = {} if state.past is None else model.network.held(state.past)
    constraint = None if state.constraint is None else session_state(state.constraint.session)
    kv = KVState(read, 0, past)
    return PrefilledPayload(state.canvas, kv, recomputed, constraint=constraint, features=state.features)


def prefilled_of(model: CanvasModel, payload: PrefilledPayload, session: Session | None) -> CanvasPrefilled:
    """The prefill state of a received request. Raises ``TransferError`` if its K/V do not match ``model``."""
    kv = payload.kv
    past = model.network.past_of(kv.tensors, kv.positions) if kv.tensors else None
    constraint = None if session is None else CanvasConstraint(session)
    return CanvasPrefilled(payload.canvas, payload.features, constraint, past, kv.positions)


def resumed(d: CanvasDecoding, payload: CanvasPayload) -> CanvasDecoding:
    """``d``, after prefill, with the decode state of ``payload``."""
    d.text = TextStream.restored(d.text.tokenizer, d.request.sampling.stop, payload.text, within=d.request.keeps_space)
    d.log_probabilities, d.forwards, d.stable_steps = payload.log_probabilities, payload.forwards, payload.stable_steps
    d.recomputed, d.record = payload.prefilled.recomputed, payload.record
    d.step = None if payload.step is None else Step(**payload.step)
    return d
