"""Gemma 3 with images (arXiv 2503.19786): ``gemma3`` in the layout of google/gemma-3-4b-it.

A SigLIP tower, whose patches are averaged over squares and projected to ``mm_tokens_per_image`` visual tokens, and the
decoder of Gemma 3. An image's tokens attend to each other, and to everything before them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import isqrt
from typing import Any

from PIL import Image
from torch import Tensor, nn
from transformers import Gemma3Config, Gemma3ImageProcessorPil
from transformers.models.gemma3.modeling_gemma3 import Gemma3MultiModalProjector

from mmserve.errors import ConfigError
from mmserve.models.base import LoadedModel, ModelSpec
from mmserve.models.chat import load_tokenizer
from mmserve.models.checkpoint import CONFIG, Checkpoint, Target
from mmserve.models.evidence import layers_of
from mmserve.models.family import Sources, next_token
from mmserve.models.gemma import LAYOUT
from mmserve.models.nested import (
    found_layout,
    image_token,
    load_nested,
    load_part,
    nested_tokenizer,
    read_config,
    read_processor,
)
from mmserve.models.picture import Prepared, Resize, Text, Tile
from mmserve.models.processors import check_resizes, pixels_of
from mmserve.models.shuffle import ShuffledTower, ShuffledVision
from mmserve.models.towers import KINDS, load_tower


class PooledProjector(nn.Module):
    """transformers' ``projector`` without its pooling: ``[B, S, patches * C]`` of squares to ``[B, S, D]``."""

    def __init__(self, projector: Gemma3MultiModalProjector, patches: int) -> None:
        super().__init__()
        self.norm, self.weight, self._patches = (
            projector.mm_soft_emb_norm,
            projector.mm_input_projection_weight,
            patches,
        )

    def forward(self, squares: Tensor) -> Tensor:
        """Averaged, normed and projected."""
        projected: Tensor = self.norm(squares.unflatten(-1, (self._patches, -1)).mean(2)) @ self.weight
        return projected


class GemmaImages(ShuffledVision):
    """An image processor, which resizes any image to a square, followed by ``tower``."""

    def __init__(self, tower: ShuffledTower, processor: Any) -> None:
        super().__init__(tower, processor)
        self.tokens_per_image = len(tower.blanks(1)[0].tokens)

    def first_resize(self, *, clip: bool, among: bool) -> Resize | None:
        p = self._processor
        return (p.size.width, p.size.height, int(p.resample)) if p.do_resize else None

    def prepare(self, image: Image.Image) -> Prepared:
        """``pixels [1, 3, side, side]``."""
        return {"pixels": pixels_of(self._processor([image], return_tensors="np"))}

    def row(self, tiles: Sequence[Tile], one: Prepared, *, clip: bool) -> Sequence[Tile | Text]:
        return tiles


def load(checkpoint: Checkpoint, target: Target) -> LoadedModel:
    """Load the layout; raises ``ConfigError`` naming the key, tensor or file that is wrong."""
    config = read_config(Gemma3Config, checkpoint)
    plain = load_tokenizer(checkpoint.folder)
    begin, end = (image_token(plain, config, checkpoint, name) for name in ("boi_token_id", "eoi_token_id"))
    image = image_token(plain, config, checkpoint)
    picture = f"\n\n{begin}{{}}{end}\n\n"  # as the processor writes it, tokenized with the text around it
    tokenizer = nested_tokenizer(
        checkpoint, config, picture=picture, change=lambda own: own.replace(begin, picture.format(image))
    )
    layout, prefix = found_layout(checkpoint, LAYOUT)
    vision = _vision(checkpoint, target, config, prefix)
    texts = ("gemma3_text",)
    return load_nested(checkpoint, target, config, tokenizer, layout, lambda _width: vision, _spec, texts=texts)


def _spec(sources: Sources) -> ModelSpec:
    return replace(next_token(sources), whole_images=True)


def _vision(checkpoint: Checkpoint, target: Target, config: Any, prefix: str) -> GemmaImages:
    path, tower = checkpoint.folder / CONFIG, config.vision_config
    if tower.model_type not in KINDS or KINDS[tower.model_type].has_cls:
        raise ConfigError(f"{path}: vision_config.model_type {tower.model_type!r} is not 'siglip_vision_model'")
    patches, side = tower.image_size // tower.patch_size, isqrt(config.mm_tokens_per_image)
    if not side or side**2 != config.mm_tokens_per_image or patches % side:
        raise ConfigError(
            f"{path}: mm_tokens_per_image = {config.mm_tokens_per_image} must be a square that divides the tower's "
            f"{patches} x {patches} patches"
        )
    if config.text_config.sliding_window < config.mm_tokens_per_image:
        raise ConfigError(
            f"{path}: text_config.sliding_window = {config.text_config.sliding_window} must hold a picture's "
            f"{config.mm_tokens_per_image} tokens: versions of transformers differ in what they see otherwise"
        )
    processor = read_processor(Gemma3ImageProcessorPil, checkpoint.folder)
    check_resizes(processor, checkpoint.folder)
    if processor.do_pan_and_scan:
        raise ConfigError(f"{checkpoint.folder}: do_pan_and_scan of the image processor is not implemented")
    if (processor.size.height, processor.size.width) != (tower.image_size, tower.image_size):
        raise ConfigError(
            f"{checkpoint.folder}: the image processor makes {dict(processor.size)}, not {tower.image_size}"
        )
    kind = KINDS[tower.model_type]
    made, _later, _cut = load_tower(kind, tower, checkpoint.weights, f"{prefix}vision_tower.", -1, target)
    projector: Any = load_part(
        lambda: Gemma3MultiModalProjector(config), f"{prefix}multi_modal_projector.", checkpoint, target
    )
    factor = patches // side
    pooled = PooledProjector(projector, factor**2)
    return GemmaImages(ShuffledTower(made, pooled, layers_of(made), factor=factor), processor).eval()
