"""Classifier-free guidance of masked diffusion (LLaDA, arXiv 2502.09992; ML-GSAI/LLaDA, generate.py: ``cfg_scale``).

Each pass of a guided request runs its positions twice: with the prompt, and with masks in place of the whole prompt.
The logits of a position are ``unconditional + (scale + 1) * (conditional - unconditional)``. The unconditional sequence
is a separate sequence of the same forward pass, with its own pages and embeddings, so that recompute policies apply to
its K/V in the same way.
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
    """The guided logits of some rows (see ``RowLogits``), fp32, from those with the prompt (``conditional``) and with
    masks in its place."""

    def __init__(self, conditional: Logits, unconditional: Logits, scale: float) -> None:
        self._conditional, self._unconditional, self._scale = conditional, unconditional, scale

    def only(self, rows: np.ndarray) -> GuidedLogits:
        """The logits of some of the rows (int64, ascending)."""
        return GuidedLogits(self._conditional.only(rows), self._unconditional.only(rows), self._scale)

    def slices(self) -> Iterator[Tensor]:
        """Yields logits ``[rows, V]`` of the next rows; the caller may modify them."""
        for conditional, unconditional in zip(self._conditional.slices(), self._unconditional.slices(), strict=True):
            base = unconditional.float()
            yield (conditional.float() - base).mul_(self._scale + 1).add_(base)

    def whole(self) -> Tensor:
        """Logits ``[rows, V]`` of all rows at once; use for few rows only."""
        made = list(self.slices())
        return torch.cat(made) if made else self._conditional.whole()


def guidance_of(
    request: Request, model: LoadedModel, canvas: Canvas, embeddings: Tensor, pages: np.ndarray
) -> tuple[np.ndarray, Guidance | None]:
    """The pages of the request's own sequence, and its guidance (None if not requested), which has the other half of
    ``pages``.

    ``embeddings [N, D]``: those of the request's own sequence in its first pass.
    """
    scale = request.diffusion.cfg_scale
    if not scale:
        return pages, None
    half = len(pages) // 2
    unconditional = embeddings.clone()
    unconditional[: canvas.prompt_length] = model.decoder.embed(torch.tensor([model.spec.mask_id], device=model.device))
    return pages[:half], Guidance(scale, pages[half:], unconditional)


def check_guidance(request: Request, spec: ModelSpec) -> None:
    """Check that ``spec`` and the request's other options allow guidance.

    Raises ``InvalidArgument`` for a scale out of range or together with ``image_reuse``, ``Unimplemented`` for models
    other than masked diffusion.
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


def with_unconditional(batch: list[tuple[Pass, Guidance | None]]) -> list[Pass]:
    """The passes of a batch; each guided request's pass is followed by one over the same rows of its second
    sequence."""
    return [each for p, g in batch for each in ((p,) if g is None else (p, _unconditional_pass(p, g)))]


def combined(batch: list[tuple[Pass, Guidance | None]], logits: list[Logits]) -> list[RowLogits]:
    """The logits of each request, from those of the passes that ``with_unconditional`` returned."""
    made = iter(logits)
    return [next(made) if g is None else GuidedLogits(next(made), next(made), g.scale) for _p, g in batch]


def _unconditional_pass(p: Pass, guidance: Guidance) -> Pass:
    return replace(p, pages=guidance.pages, embeddings=guidance.embeddings, deep=None, observation=None)
