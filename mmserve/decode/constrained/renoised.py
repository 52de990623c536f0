"""A constrained request on canvases of random tokens: what a step accepts, and in the end all of it, is the witness's.

Until it is final a canvas may hold anything, so only what it holds in the end must obey. It holds the witness's tokens
all the same wherever a step is sure: the model then sees what its answer may become. A template's texts stand on it
from the start.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from mmserve.core.canvas import Canvas
from mmserve.decode.constrained.state import Constrained, known_tokens
from mmserve.decode.logits import slices
from mmserve.decode.uniform_state.samplers import Step


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
    noise, predicted, sure = step.noise_L.clone(), step.predicted_L.clone(), step.sure_L.clone()
    sure[inside] |= torch.from_numpy(state.given[targets - first] >= 0).to(sure.device)
    noise[inside] = torch.where(sure[inside], witness, noise[inside])
    predicted[inside] = witness
    if state.padded:
        behind = slice(len(targets), None)
        noise[behind] = predicted[behind] = min(state.witness.ends)
        sure[behind] = True
    return replace(step, noise_L=noise, sure_L=sure, predicted_L=predicted, last_L=predicted)


def begun(state: Constrained, canvas: Canvas) -> bool:
    """Put onto an open canvas of noise what of a template stands there; whether that is all of it."""
    first, block = canvas.prompt_length, canvas.block()
    given = np.full(len(block), min(state.witness.ends) if state.padded else -1, np.int64)
    inside = state.given[block[0] - first :][: len(block)]
    given[: len(inside)] = inside
    canvas.tokens[block] = np.where(given >= 0, given, canvas.tokens[block])
    return bool((given >= 0).all())


def settle(state: Constrained, canvas: Canvas) -> None:
    """Take note of a canvas that has become final."""
    state.follow(known_tokens(canvas)[: len(state.witness.tokens)])
