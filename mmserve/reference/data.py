"""Training batches: scenes and questions drawn from a seed, as tensors."""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from mmserve.models.chat import IMAGE, prompt_ids
from mmserve.reference.model import PIXELS, VISUAL_TOKENS, SceneLabels
from mmserve.reference.scenes import SHORT_TASKS, TRAIN_SEEDS, Question, Scene, sample
from mmserve.reference.tokenizer import EOT, token_id

#: Mean and deviation of the processor, per channel: pixels come out in [-1, 1].
PIXEL_MEAN = PIXEL_STD = 0.5
#: Canvas lengths (tokens) and how often each is drawn, for short answers and for JSON.
CANVAS = {"short": ((8, 16, 32), (0.75, 0.15, 0.1)), "json": ((64, 96), (0.85, 0.15))}
#: One batch in so many is JSON: a JSON answer teaches forty tokens, a short one two.
JSON_EVERY = 4
#: Rows of a batch of each kind; a JSON row costs about twice a short one.
ROWS = {"short": 64, "json": 32}


@dataclass(frozen=True)
class Batch:
    """One task kind's rows: ``ids [B, T]`` end in a canvas of ``canvas`` answer tokens; padding is not ``seen``."""

    pixels: Tensor
    ids: Tensor
    positions: Tensor
    seen: Tensor
    image_at: int
    canvas: int
    answered: Tensor  # [B]: tokens of each answer, its end token included
    labels: SceneLabels


def pixels_of(picture: Image.Image) -> Tensor:
    """A picture as the tower sees it: ``[3, PIXELS, PIXELS]`` fp32 in [-1, 1], resized as the processor does."""
    array = np.asarray(picture.resize((PIXELS, PIXELS), Image.Resampling.BICUBIC), dtype=np.float32) / 255
    return torch.from_numpy((array - PIXEL_MEAN) / PIXEL_STD).permute(2, 0, 1)


def draw(step: int, seed: int) -> tuple[str, list[tuple[Scene, Question]], int]:
    """Kind, samples and canvas length of training step ``step``: the same for the same (step, seed)."""
    rng = random.Random(TRAIN_SEEDS[0] + seed * 1_000_003 + step)
    kind = "json" if step % JSON_EVERY == 0 else "short"
    samples = [sample(rng, "json" if kind == "json" else rng.choice(SHORT_TASKS)) for _ in range(ROWS[kind])]
    return kind, samples, rng.choices(*CANVAS[kind])[0]


def collate(samples: list[tuple[Scene, Question]], canvas: int, tokenizer: PreTrainedTokenizerFast) -> Batch:
    """Tensors of one batch; prompts of unequal length are padded before the canvas and the padding is unseen."""
    image_id, eot_id = token_id(tokenizer, IMAGE), token_id(tokenizer, EOT)
    prompts, answers, lengths = [], [], []
    for _scene, question in samples:
        content = [{"type": "image"}, {"type": "text", "text": question.text}]
        prompt = prompt_ids(tokenizer, [{"role": "user", "content": content}])
        at = prompt.index(image_id)
        prompts.append(prompt[:at] + [image_id] * VISUAL_TOKENS + prompt[at + 1 :])
        answer = [*tokenizer.encode(question.answer, add_special_tokens=False), eot_id]
        if len(answer) > canvas:
            raise ValueError(f"an answer of {len(answer)} tokens does not fit a canvas of {canvas}: {question.answer}")
        lengths.append(len(answer))
        answers.append(answer + [tokenizer.eos_token_id] * (canvas - len(answer)))
    longest = max(map(len, prompts))
    ids, positions, seen = [], [], []
    for prompt, answer in zip(prompts, answers, strict=True):
        pad = longest - len(prompt)
        ids.append(prompt + [tokenizer.eos_token_id] * pad + answer)
        positions.append([*range(len(prompt)), *[0] * pad, *range(len(prompt), len(prompt) + canvas)])
        seen.append([True] * len(prompt) + [False] * pad + [True] * canvas)
    return Batch(
        torch.stack([pixels_of(scene.picture) for scene, _question in samples]),
        torch.tensor(ids),
        torch.tensor(positions),
        torch.tensor(seen),
        prompts[0].index(image_id),
        canvas,
        torch.tensor(lengths),
        SceneLabels.of([scene for scene, _question in samples]),
    )
