"""The vision tower of Qwen2.5-VL (arXiv 2502.13923): most blocks have windowed attention, and time is in seconds."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers.vision_utils import get_vision_window_index

from mmserve.models.qwen_vision import QwenVision


class Qwen25Vision(QwenVision):
    """Time positions of a clip's frames advance by ``tokens_per_second`` per second."""

    def _times(self, seconds_F2: Tensor) -> Tensor:
        """As in transformers' ``get_rope_index``: evenly spaced from the clip's start, rounded down."""
        count = len(seconds_F2)
        apart = float(seconds_F2[-1, 0] - seconds_F2[0, 0]) / (count - 1) if count > 1 else 0.0
        return (torch.arange(count) * (self.config.tokens_per_second * apart)).long()

    def stream_time(self, number: int, seconds: float) -> int:
        return int(self.config.tokens_per_second * seconds)

    @property
    def _scored(self) -> int:
        """The last block with attention over the whole frame."""
        return max(self.config.fullatt_block_indexes, default=int(self.config.depth) - 1)

    def _in_order(self, values: Tensor, grids: Tensor) -> Tensor:
        """Restores the order of tokens, which the blocks have grouped by windows."""
        c = self.config
        order, _ends = get_vision_window_index(grids, c.spatial_merge_size, c.window_size, c.patch_size)
        return values[order.argsort().to(values.device)]
