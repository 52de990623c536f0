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
from mmserve.reference.scenes import SHORT_TASKS, TRAIN_SEEDS, Question, Scene, caption, draw_scene, sample
from mmserve.reference.tokenizer import EOT, token_id

#: Mean and deviation of the processor, per channel: pixels come out in [-1, 1].
PIXEL_MEAN = PIXEL_STD = 0.5
#: Tokens of a block, as block-wise decoding will fill the canvas.
BLOCK = 32
#: Canvas lengths (tokens) and how often each is drawn, for short answers and for JSON.
CANVAS = {
    "short": ((12, 16, 32), (0.7, 0.2, 0.1)),
    "caption": ((32,), (1.0,)),
    "json": ((64, 96), (0.85, 0.15)),
}
#: Rows of a batch of each kind. One question a row: chats of five turns seemed to teach more slowly, the answers
#: being easily bound to each other's questions.
ROWS = {"short": 64, "caption": 48, "json": 32}
#: Padding behind an answer's end counts this much of a token: it is easy, and most of a short answer's canvas.
PADDING_WEIGHT = 0.1

Sample = tuple[Scene, list[Question]]


@dataclass(frozen=True)
class Batch:
    """Rows ``[B, T]`` of chats about a scene each, padded on the right, and what the loss takes of each position.

    ``kind`` is that of its questions. ``share`` sums to 1 over a row's answer tokens and is 0 elsewhere; ``block`` is
    the answer block a position lies in (0 outside); ``seen`` is False at padding.
    """

    kind: str
    pixels: Tensor
    ids: Tensor
    seen: Tensor
    share: Tensor
    block: Tensor
    image_at: int
    labels: SceneLabels


def pixels_of(picture: Image.Image) -> Tensor:
    """A picture as the tower sees it: ``[3, PIXELS, PIXELS]`` fp32 in [-1, 1], resized as the processor does."""
    array = np.asarray(picture.resize((PIXELS, PIXELS), Image.Resampling.BICUBIC), dtype=np.float32) / 255
    return torch.from_numpy((array - PIXEL_MEAN) / PIXEL_STD).permute(2, 0, 1)


def draw(step: int, seed: int, shares: dict[str, float]) -> tuple[str, list[Sample], int]:
    """Kind, samples and last canvas of training step ``step``: the same for the same arguments.

    ``shares`` says how often each kind of batch is drawn.
    """
    rng = random.Random(TRAIN_SEEDS[0] + seed * 1_000_003 + step)
    kind = rng.choices(tuple(shares), tuple(shares.values()))[0]
    samples = [_sample(kind, rng) for _ in range(ROWS[kind])]
    return kind, samples, rng.choices(*CANVAS[kind])[0]


def _sample(kind: str, rng: random.Random) -> Sample:
    if kind == "caption":
        scene = draw_scene(rng)
        return scene, [caption(scene, rng)]
    scene, question = sample(rng, "json" if kind == "json" else rng.choice(SHORT_TASKS))
    return scene, [question]


def collate(kind: str, samples: list[Sample], canvas: int, tokenizer: PreTrainedTokenizerFast) -> Batch:
    """Tensors of one batch; the last answer of each row is padded with end-of-text to ``canvas`` tokens."""
    rows = [_row(questions, canvas, tokenizer) for _scene, questions in samples]
    longest = max(len(ids) for ids, _share, _block in rows)
    ids = torch.full((len(rows), longest), tokenizer.eos_token_id)
    share, block = torch.zeros(len(rows), longest), torch.zeros(len(rows), longest, dtype=torch.long)
    seen = torch.zeros(len(rows), longest, dtype=torch.bool)
    for b, (row, row_share, row_block) in enumerate(rows):
        ids[b, : len(row)] = torch.tensor(row)
        share[b, : len(row)] = torch.tensor(row_share)
        block[b, : len(row)] = torch.tensor(row_block)
        seen[b, : len(row)] = True
    return Batch(
        kind,
        torch.stack([pixels_of(scene.picture) for scene, _questions in samples]),
        ids,
        seen,
        share / share.sum(1, keepdim=True),
        block,
        rows[0][0].index(token_id(tokenizer, IMAGE)),
        SceneLabels.of([scene for scene, _questions in samples]),
    )


def _row(
    questions: list[Question], canvas: int, tokenizer: PreTrainedTokenizerFast
) -> tuple[list[int], list[float], list[int]]:
    """Ids, loss shares and blocks of one chat; each answer ends in end-of-turn, as the chat template ends it."""
    image_id, eot_id = token_id(tokenizer, IMAGE), token_id(tokenizer, EOT)
    ids: list[int] = []
    share: list[float] = []
    block: list[int] = []
    for turn, question in enumerate(questions):
        content = [*([{"type": "image"}] if turn == 0 else []), {"type": "text", "text": question.text}]
        prompt = prompt_ids(tokenizer, [{"role": "user", "content": content}])
        if turn:
            prompt = prompt[1:]  # start-of-text stands once
        else:
            at = prompt.index(image_id)
            prompt = prompt[:at] + [image_id] * VISUAL_TOKENS + prompt[at + 1 :]
        answer = [*tokenizer.encode(question.answer, add_special_tokens=False), eot_id]
        padding = canvas - len(answer) if turn == len(questions) - 1 else 0
        if padding < 0:
            raise ValueError(f"an answer of {len(answer)} tokens does not fit a canvas of {canvas}: {question.answer}")
        ids += prompt + answer + [tokenizer.eos_token_id] * padding
        share += [0.0] * len(prompt) + [1.0] * len(answer) + [PADDING_WEIGHT] * padding
        block += [0] * len(prompt) + [i // BLOCK for i in range(len(answer) + padding)]
    return ids, share, block
