"""Tiny random checkpoints in the layouts of LaViDa, and a plain way from a picture to their visual tokens.

That way is written out from jacklishufan/LaViDa's ``mm_utils.py`` and ``llava_arch.py``, cell by cell.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from llada_checkpoints import VOCAB, own_config, own_name, tokenizer
from mmada_checkpoints import llama
from PIL import Image
from qwen_checkpoints import qwen, save_dream, save_tokenizer_as_vocabulary
from torch import Tensor
from torch.nn import functional as F
from transformers import SiglipVisionConfig, SiglipVisionModel

from mmserve.models.checkpoint import read_json, write_checkpoint, write_json

SIDE, PATCH, POOLED = 30, 6, 3  # pixels and patches along a tile, and cells that are left of 5
PINPOINTS = [(SIDE, 2 * SIDE), (2 * SIDE, SIDE), (2 * SIDE, 2 * SIDE), (3 * SIDE, SIDE), (SIDE, 3 * SIDE)]
SYSTEM = (
    "You are a helpful language and vision assistant. You are able to understand the visual content that the user "
    "provides, and assist the user with a variety of tasks using natural language."
)
#: What a configuration has beside that of its decoder.
VISION = {
    "mm_vision_tower": "google/siglip-so400m-patch14-384",
    "mm_hidden_size": 24,
    "mm_patch_merge_type": "spatial_unpad",
    "mm_pooler_ratio": 2,
    "mm_projector_type": "mlp2x_gelu",
    "mm_resampler_type": None,
    "mm_spatial_pool_mode": "bilinear",
    "mm_use_im_patch_token": False,
    "mm_use_im_start_end": False,
    "mm_vision_select_feature": "patch",
    "mm_vision_select_layer": -2,
    "image_aspect_ratio": "anyres",
    "image_grid_pinpoints": [list(size) for size in PINPOINTS],
    "tokenizer_model_max_length": 4096,
    "use_mm_proj": True,
}


class Lavida:
    """A checkpoint on disk (``llada`` or ``dream``), and the parts that it was written from."""

    def __init__(self, folder: Path, kind: str, **changes: Any) -> None:
        self.folder, self.kind = folder, kind
        self.oracle: Any = llama(VOCAB) if kind == "llada" else qwen("qwen2")
        torch.manual_seed(31)
        sizes = {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 3, "num_attention_heads": 2}
        self.tower = SiglipVisionModel(SiglipVisionConfig(**sizes, image_size=SIDE, patch_size=PATCH)).eval()
        for name, parameter in self.tower.named_parameters():
            if parameter.dim() == 2 and "position" not in name:
                torch.nn.init.normal_(parameter, std=0.4)
        self.projector = torch.nn.Sequential(torch.nn.Linear(24, 32), torch.nn.GELU(), torch.nn.Linear(32, 32))
        self.newline = torch.randn(32)
        if kind == "llada":
            named = {"architectures": ["LlavaLladaForMaskedDiffusion"], "model_type": "llava_llada", "hidden_size": 32}
            config = own_config(self.oracle, **named)
            tensors = {own_name(name): t for name, t in self.oracle.state_dict().items()}
            tokenizer().save_pretrained(folder)
        else:
            save_dream(self.oracle, folder)
            config = read_json(folder / "config.json")
            config |= {"architectures": ["LlavaDreamForMaskedDiffusion"], "model_type": "llava_dream"}
            tensors = dict(self.oracle.state_dict())
            save_tokenizer_as_vocabulary(folder)
            ids = json.loads((folder / "vocab.json").read_text())
            spelled = {{"<image>": "<|unused|>"}.get(token, token): i for token, i in ids.items()}
            (folder / "vocab.json").write_text(json.dumps(spelled))
        below = "model.vision_tower.vision_tower.vision_model."
        dropped = ("encoder.layers.2.", "head.")  # before it was trained
        tensors |= {below + n: t for n, t in self.tower.state_dict().items() if not n.startswith(dropped)}
        tensors |= {f"model.mm_projector.{n}": t for n, t in self.projector.state_dict().items()}
        tensors["model.image_newline"] = self.newline
        write_checkpoint(folder, config | VISION | changes, tensors)
        write_json(folder / "vision_tower" / "config.json", self.tower.config.to_dict())

    @torch.no_grad()
    def visual_tokens(self, image: Image.Image, *, tiles: bool = True) -> Tensor:
        """``[n, D]`` of one picture, as tiles of any resolution or as one."""
        wide, high = plain_resolution(*image.size)
        cut = [image.resize((SIDE, SIDE))]
        if tiles:
            fitted = plain_fit(image, wide, high)
            for y in range(0, high, SIDE):
                cut += [fitted.crop((x, y, x + SIDE, y + SIDE)) for x in range(0, wide, SIDE)]
        grids = [self._pooled(tile) for tile in cut]
        if not tiles:
            return torch.cat([grids[0].flatten(0, 1), self.newline[None]])
        rows, columns = high // SIDE * POOLED, wide // SIDE * POOLED
        top, left = plain_margins(*image.size, rows, columns)
        tokens = list(grids[0].flatten(0, 1))
        for y in range(top, rows - top):
            for x in range(left, columns - left):
                grid = grids[1 + y // POOLED * (wide // SIDE) + x // POOLED]
                tokens.append(grid[y % POOLED, x % POOLED])
            tokens.append(self.newline)
        return torch.stack(tokens)

    def padded_tokens(self, image: Image.Image) -> Tensor:
        """``[n, D]`` of one of several pictures: ``process_images`` of LLaVA-NeXT with the ratio ``pad``."""
        side = max(image.size)
        square = Image.new("RGB", (side, side), (127, 127, 127))
        square.paste(image, ((side - image.width) // 2, (side - image.height) // 2))
        return self.visual_tokens(square, tiles=False)

    def _pooled(self, tile: Image.Image) -> Tensor:
        """``[POOLED, POOLED, D]`` of a tile."""
        pixels = torch.from_numpy(np.asarray(tile, dtype=np.float32)).permute(2, 0, 1) / 255
        hidden = self.tower(((pixels - 0.5) / 0.5)[None], output_hidden_states=True).hidden_states[-2]
        grid = self.projector(hidden)[0].unflatten(0, (5, 5)).permute(2, 0, 1)
        return F.interpolate(grid[None], size=(POOLED, POOLED), mode="bilinear")[0].permute(1, 2, 0)


def plain_resolution(width: int, height: int) -> tuple[int, int]:
    """LLaVA's ``select_best_resolution``: most of the picture's pixels, then least left over."""
    fits = []
    for wide, high in PINPOINTS:
        scale = min(wide / width, high / height)
        kept = min(int(width * scale) * int(height * scale), width * height)
        fits.append((-kept, wide * high - kept))
    return PINPOINTS[fits.index(min(fits))]


def plain_fit(image: Image.Image, wide: int, high: int) -> Image.Image:
    """LLaVA's ``resize_and_pad_image``."""
    scale = min(wide / image.width, high / image.height)
    size = [min(math.ceil(image.width * scale), wide), min(math.ceil(image.height * scale), high)]
    size[wide / image.width >= high / image.height] = (wide, high)[wide / image.width >= high / image.height]
    black = Image.new("RGB", (wide, high), (0, 0, 0))
    black.paste(image.resize(tuple(size)), ((wide - size[0]) // 2, (high - size[1]) // 2))
    return black


def plain_margins(width: int, height: int, rows: int, columns: int) -> tuple[int, int]:
    """Rows at the top (and bottom) and columns at the left (and right) that LLaVA's ``unpad_image`` cuts off."""
    if width / height > columns / rows:
        return (rows - int(height * (columns / width))) // 2, 0
    return 0, (columns - int(width * (rows / height))) // 2
