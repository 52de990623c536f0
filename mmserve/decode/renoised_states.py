"""What is kept of a request whose canvases hold random tokens, and the same as plain data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mmserve.core.canvas import Canvas
from mmserve.core.payloads import CanvasPayload, KVState, PrefilledPayload
from mmserve.core.request import Request
from mmserve.decode.constrained.restored import constraint_state
from mmserve.decode.constrained.state import Constrained
from mmserve.decode.renoising import CanvasSampler, Step
from mmserve.decode.text import TextStream
from mmserve.models.base import CanvasNetwork, Renoising


@dataclass
class CanvasPrefilled:
    """A request whose prompt is read, and what the network keeps of it."""

    canvas: Canvas
    features: Tensor | None  # visual tokens [n, D] of the prompt's images
    past: Any = None
    run: int = 0  # positions read
    constrained: Constrained | None = None


@dataclass
class CanvasDecoding:
    """A request in decode: its canvases, the noise that the open one holds, and what the last step said of it."""

    request: Request
    canvas: Canvas
    features: Tensor | None  # visual tokens [n, D] of the prompt's images
    past: Any
    read: int  # positions that ``past`` holds
    text: TextStream
    renoising: Renoising
    sampler: CanvasSampler
    log_probabilities: np.ndarray  # float32 [N], of the final tokens of the answer
    recomputed: int
    constrained: Constrained | None = None
    logits_LV: Tensor | None = None  # of the latest pass, until they are used
    step: Step | None = None  # the latest of the open canvas; None = it is still all noise
    still: int = 0  # steps in a row that predicted what the one before did
    forwards: int = 0
    edits: int = 0  # never: what is final stays

    @property
    def companion(self) -> None:
        """None: see ``CanvasModel``."""

    @property
    def held(self) -> int:
        """Positions with K/V, which the network keeps itself."""
        return self.read

    @property
    def noise(self) -> Tensor:
        """Int64 ``[L]``: the tokens of the open canvas."""
        return torch.from_numpy(self.canvas.tokens[self.canvas.block()])


def state_of(network: CanvasNetwork, state: CanvasPrefilled | CanvasDecoding) -> PrefilledPayload | CanvasPayload:
    """``state`` as plain data. Shapes as of ``Step``; a layer of ``network`` is a page of its own length."""
    decoding = isinstance(state, CanvasDecoding)
    positions = state.read if decoding else state.run
    past = {} if state.past is None else network.held(state.past)
    prefilled = PrefilledPayload(
        canvas=state.canvas,
        kv=KVState(positions, 0, past),
        recomputed=state.recomputed if decoding else state.run,
        constraint=None if state.constrained is None else constraint_state(state.constrained),
        features=state.features,
    )
    if not decoding:
        return prefilled
    return CanvasPayload(
        prefilled,
        state.text.state(),
        state.log_probabilities,
        state.forwards,
        step=None if state.step is None else vars(state.step),
        still=state.still,
    )


def prefilled_of(network: CanvasNetwork, payload: PrefilledPayload, constrained: Constrained | None) -> CanvasPrefilled:
    """The state of a request whose prompt is read."""
    kv = payload.kv
    past = network.past_of(kv.tensors, kv.positions) if kv.tensors else None
    return CanvasPrefilled(payload.canvas, payload.features, past, kv.positions, constrained)


def canvas_of(d: CanvasDecoding, payload: CanvasPayload) -> CanvasDecoding:
    """``d``, opened anew, as ``payload`` has it."""
    d.text = TextStream.restored(d.text.tokenizer, d.request.sampling.stop, payload.text)
    d.log_probabilities, d.forwards, d.still = payload.log_probabilities, payload.forwards, payload.still
    d.recomputed = payload.prefilled.recomputed
    d.step = None if payload.step is None else Step(**payload.step)
    return d
