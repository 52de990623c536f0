"""K/V eviction: after each step, selected K/V are dropped from the store and their pages are freed
(``kv/evictor.py``)."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from mmserve.core.canvas import Canvas
from mmserve.core.request import Request
from mmserve.decode.extensions.base import Extension, Opening, RequestExtension
from mmserve.decode.forward import Pass
from mmserve.decode.state import Decoding
from mmserve.kv.evictor import EvictionState, Evictor, Observation
from mmserve.kv.reduction import Reduction, reduction_of
from mmserve.kv.store import KVStore
from mmserve.models.base import LoadedModel


@dataclass(eq=False)
class Eviction(RequestExtension):
    """The eviction of one request's K/V by a policy."""

    evictor: Evictor
    policy: Reduction
    state: EvictionState

    @property
    def runs_ahead(self) -> bool:
        """False: the attention of drafted positions would be counted even if the draft is rejected."""
        return False

    @property
    def evicted(self) -> int:
        return self.state.evicted

    @property
    def rewrites_prompt(self) -> bool:
        return True

    def watch(self, p: Pass, *, first: bool) -> Pass:
        observation = self.evictor.watch(self.policy, self.state, p.rows, p.visible, p.pages)
        return replace(p, evicted=self.state.evicted, observation=observation)

    def after_forward(self, p: Pass, seconds: float) -> None:
        if isinstance(p.observation, Observation):
            self.state.absorb(p.observation)

    @torch.inference_mode()
    def committed(self, d: Decoding, reason: str | None) -> None:
        """Evict K/V, and shrink the request's page table to the pages that it still needs."""
        if reason is not None:
            return
        cached = d.prefilled
        next_place = int(d.canvas.rotary_positions(np.array([cached.held + self.evicted])).flat[0])
        cached.held = self.evictor.evict(self.policy, self.state, cached.pages, cached.held, next_place)
        left = d.canvas.size - cached.held - self.evicted
        cached.pages = cached.pages[: self.evictor.most_pages(self.policy, self.state, cached.held, left)]

    def snapshot(self) -> EvictionState:
        return self.state


class KVEviction(Extension):
    """Evicts K/V from one model's store, for requests with ``kv_reduction``."""

    def __init__(self, model: LoadedModel, store: KVStore) -> None:
        self._evictor = Evictor(model.decoder, store, model.dtype)

    def attach(self, opening: Opening) -> Eviction | None:
        policy = reduction_of(opening.request)
        if policy is None:
            return None
        canvas, visual = opening.canvas, opening.encoded.image_rows
        return Eviction(self._evictor, policy, self._evictor.begin(canvas.prompt_length, canvas.size, visual))

    def restore(self, request: Request, canvas: Canvas, snapshot: object) -> Eviction | None:
        policy = reduction_of(request)
        if policy is None or not isinstance(snapshot, EvictionState):
            return None
        return Eviction(self._evictor, policy, snapshot)
