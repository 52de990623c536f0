"""Classifier-free guidance of masked diffusion (LLaDA, arXiv 2502.09992; ML-GSAI/LLaDA, generate.py: ``cfg_scale``).

Each pass of a guided request runs its positions twice: once as they are, and once with masks for the whole prompt. The
logits of a position are ``without + (scale + 1) * (with - without)``. The second sequence is another row of the same
forward pass, with pages and embeddings of its own, so that any recompute policy stores and reads its keys and values as
it does those of the first.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from mmserve.core.canvas import Canvas
from mmserve.core.request import Diffusion, Request
from mmserve.core.values import wrong
from mmserve.decode.forward import Pass
from mmserve.decode.logits import Logits, RowLogits
from mmserve.decode.state import Guidance
from mmserve.errors import InvalidArgument, Unimplemented
from mmserve.models.base import LoadedModel, ModelSpec


class GuidedLogits:
    """The guided logits of some rows, as ``Logits``, in fp32."""

    def __init__(self, shown: Logits, without: Logits, scale: float) -> None:
        self._shown, self._without, self._scale = shown, without, scale

    def only(self, rows: np.ndarray) -> GuidedLogits:
        """The logits of some of the rows (int64, ascending)."""
        return GuidedLogits(self._shown.only(rows), self._without.only(rows), self._scale)

    def slices(self) -> Iterator[Tensor]:
        """Logits ``[rows, V]`` of the next rows, to be changed at will."""
        for shown, without in zip(self._shown.slices(), self._without.slices(), strict=True):
            base = without.float()
            yield (shown.float() - base).mul_(self._scale + 1).add_(base)

    def whole(self) -> Tensor:
        """Logits ``[rows, V]`` of all rows at once: for a few rows only."""
        made = list(self.slices())
        return torch.cat(made) if made else self._shown.whole()


def guidance_of(
    request: Request, model: LoadedModel, canvas: Canvas, embeddings: Tensor, pages: np.ndarray
) -> tuple[np.ndarray, Guidance | None]:
    """The pages of the request's own sequence, and its guidance if it asks for it, which has the other half of them.

    ``embeddings [N, D]``: those that the first pass of the request's own sequence reads.
    """
    scale = request.diffusion.cfg_scale
    if not scale:
        return pages, None
    half = len(pages) // 2
    without = embeddings.clone()
    without[: canvas.prompt_length] = model.decoder.embed(torch.tensor([model.spec.mask_id], device=model.device))
    return pages[:half], Guidance(scale, pages[half:], without)


def check_guidance(request: Request, spec: ModelSpec) -> None:
    """Refuse guidance that ``spec`` or the rest of the request leaves no room for.

    ``InvalidArgument`` for a scale out of range and beside ``image_reuse``, ``Unimplemented`` for models that are not
    of masked diffusion.
    """
    scale = request.diffusion.cfg_scale
    for name, rule in wrong(Diffusion, {"cfg_scale": scale}):
        raise InvalidArgument.of(f"diffusion.{name}", rule)
    if not scale:
        return
    if spec.causal or spec.renoising is not None:
        raise Unimplemented(
            f"model {spec.name!r} has no classifier-free guidance (diffusion.cfg_scale): it needs masked diffusion, "
            "where a prompt of masks has a meaning"
        )
    if request.image_reuse is not None:
        raise InvalidArgument.of("diffusion.cfg_scale", "must be 0 with image_reuse: masks have no image to reuse")


def spread(batch: list[tuple[Pass, Guidance | None]]) -> list[Pass]:
    """The passes of a batch, in which a guided request has a second one, of the same rows, right after its own."""
    return [each for p, g in batch for each in ((p,) if g is None else (p, _beside(p, g)))]


def combined(batch: list[tuple[Pass, Guidance | None]], logits: list[Logits]) -> list[RowLogits]:
    """The logits of each request from those of the passes that ``spread`` made."""
    made = iter(logits)
    return [next(made) if g is None else GuidedLogits(next(made), next(made), g.scale) for _p, g in batch]


def _beside(p: Pass, guidance: Guidance) -> Pass:
    return replace(p, pages=guidance.pages, embeddings=guidance.embeddings, deep=None, observation=None)
