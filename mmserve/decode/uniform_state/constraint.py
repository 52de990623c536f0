"""The constraint of a request to a uniform-state diffusion model: only a finished canvas must obey it."""

from __future__ import annotations

from torch import Tensor

from mmserve.core.canvas import Canvas
from mmserve.decode.constrained.renoised import begun, projected, settle
from mmserve.decode.extensions.constraint import Constraint
from mmserve.decode.uniform_state.samplers import Step


class CanvasConstraint(Constraint):
    """What a constraint does to canvases of random tokens."""

    def begin_canvas(self, canvas: Canvas) -> bool:
        """Put onto an open canvas of noise what is there from the start; whether that is all of it."""
        return begun(self.session, canvas)

    def project(self, canvas: Canvas, logits_LV: Tensor, step: Step) -> Step:
        """``step`` with the witness's tokens where it is sure; ``logits_LV`` (fp32) are of the open canvas."""
        return projected(self.session, canvas, logits_LV, step)

    def sync(self, canvas: Canvas) -> None:
        """Take note of a canvas that became final."""
        settle(self.session, canvas)
