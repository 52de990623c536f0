"""One step over a canvas of random tokens: DiffusionGemma's sampler (arXiv 2505.24857; huggingface/transformers,
generation_diffusion_gemma.py).

The positions of lowest entropy take a drawn token as long as the entropies, but for the largest, sum to at most the
bound; every other position gets a random token again.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mmserve.models.base import Renoising


@dataclass(frozen=True)
class Step:
    """What a step made of a canvas."""

    noise_L: Tensor  # int64: the canvas to go on with, drawn tokens where it is sure and random ones elsewhere
    predicted_L: Tensor  # int64: the most probable token of each position, which is what becomes final
    shaped_LV: Tensor  # fp32: logits over the step's temperature; the next step is told them
    entropy: float  # nats, mean over positions


def accept(logits_LV: Tensor, index: int, rule: Renoising, generator: torch.Generator) -> Step:
    """Step number ``index`` (from 0) of ``rule.steps``; the tokens drawn come first from ``generator``, then the noise.

    The temperature falls evenly from ``rule.t_max`` towards ``rule.t_min``.
    """
    left = (rule.steps - index) / rule.steps
    shaped = logits_LV.float() / (rule.t_min + (rule.t_max - rule.t_min) * left)
    length, vocabulary = shaped.shape
    drawn = torch.multinomial(shaped.softmax(-1), 1, generator=generator)[:, 0]
    log_p = shaped.log_softmax(-1)
    entropy = torch.special.entr(log_p.exp()).sum(-1)
    ordered, order = entropy.sort()
    sure = torch.zeros(length, dtype=torch.bool, device=shaped.device)
    sure[order] = ordered.cumsum(-1) - ordered <= rule.bound
    random = torch.randint(vocabulary, (length,), generator=generator, device=shaped.device)
    return Step(torch.where(sure, drawn, random), shaped.argmax(-1), shaped, float(entropy.mean()))


def quiet(step: Step, rule: Renoising) -> bool:
    """Whether the step is sure enough of the whole canvas to be the last, if it also predicts what the last one did."""
    return step.entropy < rule.confident
