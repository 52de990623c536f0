"""One step over a canvas of random tokens, by the model's own sampler or by a scheduler that a configuration names.

The model's own rule is DiffusionGemma's (arXiv 2505.24857; huggingface/transformers, generation_diffusion_gemma.py):
the positions of lowest entropy accept a drawn token as long as the entropies, without the largest, sum to at most the
bound; every other position gets a new random token.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from mmserve.core.canvas import Canvas
from mmserve.core.request import Request, Sampling, SeedCanvas
from mmserve.decode.schedulers import Discrete
from mmserve.models.base import Renoising


@dataclass(frozen=True)
class Step:
    """The result of a step over a canvas."""

    noise_L: Tensor  # int64: the next canvas, drawn tokens at accepted positions and noise elsewhere
    accepted_L: Tensor  # bool: accepted positions of ``noise_L``
    predicted_L: Tensor  # int64: the most probable tokens; final if the canvas no longer changes
    last_L: Tensor  # int64: final tokens if this is the last step
    shaped_LV: Tensor  # fp32, stored in the model's dtype: logits that the step drew from; input of the next step
    entropy: float  # nats, of the shaped logits, mean over positions


class CanvasSampler(Protocol):
    """Makes the steps over one request's canvases; holds no state of them."""

    @property
    def steps(self) -> int:
        """Maximum number of steps of a canvas."""
        ...

    def step(self, logits_LV: Tensor, noise_L: Tensor, index: int, generator: torch.Generator) -> Step:
        """Step ``index`` (from 0) over the canvas ``noise_L`` (int64), from its logits (fp32)."""
        ...


@dataclass(frozen=True)
class EntropyBoundSampler:
    """The model's own rule; its temperature decreases linearly from ``rule.t_max`` to ``rule.t_min``."""

    rule: Renoising

    @property
    def steps(self) -> int:
        return self.rule.steps

    def step(self, logits_LV: Tensor, noise_L: Tensor, index: int, generator: torch.Generator) -> Step:
        rule = self.rule
        left = (rule.steps - index) / rule.steps
        shaped = logits_LV.float() / (rule.t_min + (rule.t_max - rule.t_min) * left)
        length, vocabulary = shaped.shape
        drawn = torch.multinomial(shaped.softmax(-1), 1, generator=generator)[:, 0]
        entropy = _entropy(shaped)
        ordered, order = entropy.sort()
        accepted = torch.zeros(length, dtype=torch.bool, device=shaped.device)
        accepted[order] = ordered.cumsum(-1) - ordered <= rule.bound
        random = torch.randint(vocabulary, (length,), generator=generator, device=shaped.device)
        best = shaped.argmax(-1)
        return Step(torch.where(accepted, drawn, random), accepted, best, best, shaped, float(entropy.mean()))


@dataclass(frozen=True)
class ScheduledSampler:
    """A discrete scheduler for models without masks, as in diffusers' ``DiffusionGemmaPipeline``.

    If its last step leaves noise on the canvas, the most probable tokens become final, instead of the noise as in the
    pipeline.
    """

    scheduler: Discrete
    steps: int
    sampling: Sampling

    def step(self, logits_LV: Tensor, noise_L: Tensor, index: int, generator: torch.Generator) -> Step:
        out = self.scheduler.step(
            logits_LV,
            noise_L,
            index,
            steps=self.steps,
            block_length=len(noise_L),
            mask_id=None,
            sampling=self.sampling,
            generator=generator,
        )
        noise, pred_logits = out.prev_sample[0], getattr(out, "pred_logits", None)
        shaped = logits_LV if pred_logits is None else pred_logits[0].float()
        accepted, best = noise == out.sampled_tokens[0], shaped.argmax(-1)
        return Step(noise, accepted, best, torch.where(accepted, noise, best), shaped, float(_entropy(shaped).mean()))


def is_entropy_low(step: Step, rule: Renoising) -> bool:
    """Whether the entropy of the canvas is low enough for the step to be the last, if its predictions equal the
    previous ones."""
    return step.entropy < rule.confident


def _entropy(shaped_LV: Tensor) -> Tensor:
    """Entropy of each position in nats, fp32 ``[L]``."""
    return torch.special.entr(shaped_LV.log_softmax(-1).exp()).sum(-1)


def seed_of(request: Request, canvas: Canvas) -> SeedCanvas | None:
    """The seed of the open canvas; only the answer's first canvas has one."""
    return request.diffusion.seed_canvas if canvas.block_start == canvas.prompt_length else None


def pinned(step: Step, seed: SeedCanvas) -> Step:
    """``step`` with the pinned tokens of ``seed`` in its canvas, predictions and final tokens."""
    if not seed.pinned:
        return step
    at = torch.tensor(seed.pinned, device=step.noise_L.device)
    tokens = torch.tensor(seed.tokens, device=step.noise_L.device)[at]
    kept = {name: getattr(step, name).index_copy(0, at, tokens) for name in ("noise_L", "predicted_L", "last_L")}
    return replace(step, accepted_L=step.accepted_L.index_fill(0, at, True), **kept)
