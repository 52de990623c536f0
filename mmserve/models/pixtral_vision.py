"""The vision tower of Pixtral (arXiv 2410.07073): images of any size, as rows of patches that each end in a token.

LLaVA's projector projects each patch; Mistral 3's first merges squares of patches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn
from transformers import PixtralImageProcessorPil, PixtralVisionModel
from transformers.models.llava.modeling_llava import LlavaMultiModalProjector
from transformers.models.mistral3.modeling_mistral3 import Mistral3MultiModalProjector

from mmserve.models.checkpoint import CONFIG, Checkpoint, Target, read_json
from mmserve.models.keys import Keys
from mmserve.models.nested import load_part, read_processor
from mmserve.models.picture import Grid, Picture, Prepared, Text, VisionEncoder, check_shape
from mmserve.models.processors import BOTH, check_resizes, pixels_of
from mmserve.models.vision import describe_processor
from mmserve.prune.base import Evidence, GridView

#: Processor settings of the tokens that end a row of patches, and an image.
BREAK, END = "[IMG_BREAK]", "[IMG_END]"


class PixtralVision(VisionEncoder):
    """A Pixtral ``tower``, and a ``projector`` of its hidden state ``select_layer``.

    ``merge``: side, in patches, of a square that becomes one visual token; ``ends``: texts after each row except for
    the last, and after the last.
    """

    tokens_per_image = 0

    def __init__(
        self,
        tower: nn.Module,
        projector: nn.Module,
        processor: Any,
        *,
        merge: int,
        select_layer: int,
        ends: tuple[str, str] = (BREAK, END),
    ) -> None:
        super().__init__()
        self.tower, self.projector, self._processor = tower, projector, processor
        self.merge, self.select_layer, self._ends = merge, select_layer, ends
        config: Any = tower.config
        self._square = int(config.patch_size) * merge

    def settings(self) -> Mapping[str, Any]:
        config: Any = self.tower.config
        return {
            "processor": [describe_processor(self._processor), self._square],
            "tower": config.to_dict(),
            "merge": self.merge,
            "select_layer": self.select_layer,
            "text": self._ends,
        }

    def prepare(self, image: Image.Image) -> Prepared:
        """``pixels [1, 3, height, width]``, in whole squares of patches."""
        check_shape(image)
        made = self._processor([image], patch_size=self._square, return_tensors="np")
        return {"pixels": pixels_of(made)}

    def pieces(self, one: Prepared, *, clip: bool) -> tuple[Text | int, ...]:
        rows, columns = self._grid(one)
        inner, last = self._ends
        made: list[Text | int] = []
        for row in range(rows):
            made += [columns, inner if row + 1 < rows else last]
        return tuple(made)

    def encode(self, batch: Sequence[Prepared], wanted: frozenset[Evidence], *, clip: bool) -> list[Picture]:
        return [self._picture(one) for one in batch]

    def _grid(self, one: Prepared) -> tuple[int, int]:
        height, width = one["pixels"].shape[-2:]
        return height // self._square, width // self._square

    def _picture(self, one: Prepared) -> Picture:
        pixels, (rows, columns) = one["pixels"], self._grid(one)
        size = (rows * self._square, columns * self._square)
        out = self.tower(pixels, image_sizes=[size], output_hidden_states=True)
        features = out.hidden_states[self.select_layer][0]
        if isinstance(self.projector, Mistral3MultiModalProjector):
            tokens: Tensor = self.projector(features, [size])
        else:
            tokens = self.projector(features)
        grid = Grid(torch.arange(rows * columns), GridView(rows, columns, {}))
        return Picture(tokens, (grid,), self.pieces(one, clip=False))


def load_pixtral_vision(checkpoint: Checkpoint, target: Target, config: Any, prefix: str, width: int) -> PixtralVision:
    """The encoder of visual tokens of ``width`` for ``config`` (of transformers); tensor names begin with ``prefix``.

    Raises ``ConfigError`` naming the key, tensor or file that is wrong.
    """
    keys, merge = Keys(checkpoint.config, checkpoint.folder / CONFIG), int(getattr(config, "spatial_merge_size", 1))
    layers = config.vision_config.num_hidden_layers
    select = keys.layer("vision_feature_layer", config.vision_feature_layer, layers)
    if config.model_type == "llava":
        keys.check({"vision_feature_select_strategy": ("full",)})
    settings = _settings(checkpoint)
    Keys(settings, checkpoint.folder / BOTH).check(
        {"patch_size": (config.vision_config.patch_size,), "spatial_merge_size": (merge,)}
    )
    tower: Any = load_part(
        lambda: PixtralVisionModel._from_config(config.vision_config), f"{prefix}vision_tower.", checkpoint, target
    )
    rotary = tower.patch_positional_embedding
    tower.patch_positional_embedding = type(rotary)(tower.config).to(target.device)  # checkpoints have no frequencies
    kind = LlavaMultiModalProjector if config.model_type == "llava" else Mistral3MultiModalProjector
    projector = load_part(lambda: kind(config), f"{prefix}multi_modal_projector.", checkpoint, target)
    ends = (str(settings.get("image_break_token", BREAK)), str(settings.get("image_end_token", END)))
    processor = read_processor(PixtralImageProcessorPil, checkpoint.folder)
    check_resizes(processor, checkpoint.folder)
    return PixtralVision(tower, projector, processor, merge=merge, select_layer=select, ends=ends).eval()


def _settings(checkpoint: Checkpoint) -> dict[str, Any]:
    """The processor's settings besides those of its image processor."""
    path = checkpoint.folder / BOTH
    return read_json(path) if path.is_file() else {}
