"""What is known of a picture's row before its tower runs is the row that comes out of it."""

from __future__ import annotations

import torch
from PIL import Image

from mmserve.models.base import Model
from mmserve.models.picture import Prepared

SIZES = ((40, 30), (24, 24), (61, 20), (17, 50))


def check_foreseen(model: Model) -> None:
    """Of images alone and among others, wide, tall and square, and of clips where the model takes them."""
    vision = model.vision
    assert vision is not None
    pictures = [Image.effect_noise(size, 80).convert("RGB") for size in SIZES]
    ones: list[tuple[Prepared, bool]] = [(vision.prepare(p), False) for p in pictures]
    ones += [(vision.prepare_among(p), False) for p in pictures[:2] if vision.tells_several]
    if vision.frames_per_video:
        frames = [Image.effect_noise((40, 30), 80).convert("RGB") for _ in range(3)]
        ones += [(vision.prepare_clip(frames[:n], [0.5 * i for i in range(n)]), True) for n in (1, 3)]
    for one, clip in ones:
        with torch.inference_mode():
            [seen] = vision.encode([{**one, "pixels": one["pixels"].to(model.dtype)}], frozenset(), clip=clip)
        assert vision.pieces(one, clip=clip) == seen.pieces
        assert sum(piece for piece in seen.pieces if isinstance(piece, int)) == len(seen.tokens)
