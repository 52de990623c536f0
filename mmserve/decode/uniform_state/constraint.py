"""The constraint of a request to a uniform-state diffusion model, which applies to the finished canvas."""

from __future__ import annotations

from dataclasses import replace

import torch

from mmserve.constraint.session.session import Projected
from mmserve.core.canvas import Canvas
from mmserve.decode.extensions.constraint import Constraint
from mmserve.decode.logits import slices
from mmserve.decode.uniform_state.samplers import Step


class CanvasConstraint(Constraint):
    """A constraint over canvases of random tokens."""

    def begin_canvas(self, canvas: Canvas) -> bool:
        """Write the given tokens to an open canvas of noise. Returns whether they fill it."""
        return self.session.prepare_block(canvas)

    def project(self, canvas: Canvas, logits_LV: torch.Tensor, step: Step) -> Step:
        """``step`` projected onto the constraint; ``logits_LV`` (fp32) are of the open canvas."""
        return projected(step, self.session.project(canvas, slices(logits_LV)))

    def sync(self, canvas: Canvas) -> None:
        """Update the session with a canvas that became final."""
        self.session.sync_block(canvas)


def projected(step: Step, found: Projected) -> Step:
    """``step`` with the witness's tokens in place of drawn and predicted ones: a constrained canvas has them at every
    accepted position, so that the model conditions on a possible answer."""
    inside, after = slice(0, len(found.tokens)), slice(len(found.tokens), None)
    witness = torch.from_numpy(found.tokens).to(step.noise_L.device)
    noise, predicted, accepted = step.noise_L.clone(), step.predicted_L.clone(), step.accepted_L.clone()
    accepted[inside] |= torch.from_numpy(found.given).to(accepted.device)
    noise[inside] = torch.where(accepted[inside], witness, noise[inside])
    predicted[inside] = witness
    if found.padding is not None:
        noise[after] = predicted[after] = found.padding
        accepted[after] = True
    return replace(step, noise_L=noise, accepted_L=accepted, predicted_L=predicted, last_L=predicted)
