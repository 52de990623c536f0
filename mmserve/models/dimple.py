"""Dimple (arXiv 2505.16990; rp-yu/Dimple-7B): Dream's decoder with three position axes, and Qwen2.5-VL's tower.

With its own projector. Images only: its code has no projector for videos.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from mmserve.errors import ConfigError
from mmserve.models.base import Attention, LoadedModel
from mmserve.models.checkpoint import CONFIG, Checkpoint, Target
from mmserve.models.dimensions import decoder_config
from mmserve.models.dream import MASK
from mmserve.models.family import load_decoder, make_spec, mask_id_of
from mmserve.models.keys import Keys
from mmserve.models.layouts import HUGGING_FACE
from mmserve.models.qwen25_vision import Qwen25Vision
from mmserve.models.qwen_pixels import QwenPixels, load_pixels
from mmserve.models.qwen_vl import KINDS, chat_sources, load_tower, tower_config
from mmserve.models.unfilled import unfilled

TOWER, PROJECTOR = "visual.", "img_projector."


class Projector(nn.Module):
    """Two layers with a SiLU; parameters have the names of their tensors."""

    def __init__(self, width: int, hidden_size: int) -> None:
        super().__init__()
        self.linear_1, self.linear_2 = nn.Linear(width, hidden_size), nn.Linear(hidden_size, hidden_size)

    def forward(self, features: Tensor) -> Tensor:
        projected: Tensor = self.linear_2(nn.functional.silu(self.linear_1(features)))
        return projected


class DimpleVision(Qwen25Vision):
    """Qwen2.5-VL's tower for images, followed by a projector."""

    def __init__(self, tower: nn.Module, pixels: QwenPixels, projector: Projector) -> None:
        super().__init__(tower, pixels, frames=0)
        self.projector = projector

    def _tokens(self, made: Any) -> Tensor:
        tokens: Tensor = self.projector(super()._tokens(made))
        return tokens


def load(checkpoint: Checkpoint, target: Target) -> LoadedModel:
    """Load ``rp-yu/Dimple-7B`` as published; raises ``ConfigError`` naming the key, tensor or file that is wrong."""
    keys = Keys(checkpoint.config, checkpoint.folder / CONFIG)
    keys.check({"full_attn_mask": (True, None), "hidden_act": ("silu", None)})
    config = checkpoint.stretch.applied(decoder_config(keys), keys.path)
    if config.position_axes != 3:
        raise ConfigError(f"{keys.path} has no mrope_section, which assigns axes of position to frequencies")
    sources = chat_sources(checkpoint, target, keys, config, videos=False)
    spec = make_spec(sources, attention=Attention.FULL, mask_id=mask_id_of(sources, MASK), logit_shift=1)  # as Dream's
    decoder = load_decoder(checkpoint, config, target, HUGGING_FACE)
    vision = _vision(checkpoint, target, config.hidden_size)
    checkpoint.weights.check_all_read()
    return LoadedModel(spec, decoder, sources.tokenizer, vision.eval(), target.dtype, target.device)


def _vision(checkpoint: Checkpoint, target: Target, hidden_size: int) -> DimpleVision:
    kind = KINDS["qwen2_5_vl"]
    tower = tower_config(checkpoint, kind)
    with unfilled():
        projector = Projector(tower.out_hidden_size, hidden_size)
    names = {name: PROJECTOR + name for name, _ in projector.named_parameters()}
    checkpoint.weights.fill(projector, names, target.dtype, target.device)
    return DimpleVision(
        load_tower(checkpoint, kind, tower, lambda name: TOWER + name, target),
        load_pixels(checkpoint.folder, tower, together=False),
        projector,
    )
