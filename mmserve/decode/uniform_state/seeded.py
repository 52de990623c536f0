"""Canvases of random tokens that begin with tokens of the request. Shapes as of ``Step``."""

from __future__ import annotations

from dataclasses import replace

import torch

from mmserve.core.canvas import Canvas
from mmserve.core.request import Request, SeedCanvas
from mmserve.decode.uniform_state.samplers import Step


def seed_of(request: Request, canvas: Canvas) -> SeedCanvas | None:
    """The seed of the open canvas: only the answer's first has one."""
    return request.diffusion.seed_canvas if canvas.block_start == canvas.prompt_length else None


def pinned(step: Step, seed: SeedCanvas) -> Step:
    """``step`` with the pinned tokens of ``seed`` in place of what it drew, predicted and would end with."""
    if not seed.pinned:
        return step
    at = torch.tensor(seed.pinned, device=step.noise_L.device)
    tokens = torch.tensor(seed.tokens, device=step.noise_L.device)[at]
    kept = {name: getattr(step, name).index_copy(0, at, tokens) for name in ("noise_L", "predicted_L", "last_L")}
    return replace(step, sure_L=step.sure_L.index_fill(0, at, True), **kept)
