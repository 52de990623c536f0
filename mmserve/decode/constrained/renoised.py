"""A constrained request on canvases of random tokens: what a step accepts, and in the end all of it, is the witness's.

Until it is final a canvas may hold anything, so only what it holds in the end must obey. It holds the witness's tokens
all the same wherever a step is sure: the model then sees what its answer may become.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from mmserve.core.canvas import Canvas
from mmserve.decode.constrained.state import Constrained, known_tokens
from mmserve.decode.logits import slices
from mmserve.decode.renoising import Step


def projected(state: Constrained, canvas: Canvas, logits_LV: torch.Tensor, step: Step) -> Step:
    """``step`` with the witness's tokens in place of the drawn and predicted ones, after a search for a better witness.

    ``logits_LV``: fp32, of the open canvas. What of that lies behind the request's budget stays as it is.
    """
    first, budget = canvas.prompt_length, len(state.witness.tokens)
    targets = canvas.block()[: first + budget - canvas.block_start]
    best = state.best_of(targets - first, causal=False)
    for part in slices(logits_LV[: len(targets)]):
        rows = part.float().clone()
        best.restrict(rows)
        best.take(rows, torch.logsumexp(rows, -1), None, None)
    ranked = best.ranked()
    with state.meter.running():
        state.search(known_tokens(canvas)[:budget], ranked.top, int(targets[-1]) + 1 - first)
    state.meter.end_step()
    witness = torch.from_numpy(state.witness.tokens[targets - first]).to(logits_LV.device)
    inside = slice(0, len(targets))
    noise, predicted = step.noise_L.clone(), step.predicted_L.clone()
    noise[inside] = torch.where(step.sure_L[inside], witness, noise[inside])
    predicted[inside] = witness
    return replace(step, noise_L=noise, predicted_L=predicted, last_L=predicted)


def settle(state: Constrained, canvas: Canvas) -> None:
    """Take note of a canvas that has become final."""
    state.follow(known_tokens(canvas)[: len(state.witness.tokens)])
