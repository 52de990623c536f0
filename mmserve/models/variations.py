"""Small differences between decoders of the LLaMA family: activations, caps, scaled embeddings, windows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmserve.models.silu import silu

#: Activations of the gate in a feed-forward, by their names in ``DecoderConfig``.
ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {"silu": silu, "gelu_tanh": partial(F.gelu, approximate="tanh")}


def capped(x: Tensor, cap: float) -> Tensor:
    """``cap * tanh(x / cap)``, elementwise (Gemma 2, arXiv 2408.00118); ``x`` itself if ``cap`` is 0."""
    return torch.tanh(x / cap) * cap if cap else x


class ScaledEmbedding(nn.Embedding):
    """Embeddings times a factor that is rounded to their dtype (Gemma, arXiv 2403.08295)."""

    def __init__(self, rows: int, width: int, scale: float = 1.0) -> None:
        super().__init__(rows, width)
        self.scale = scale

    def forward(self, ids: Tensor) -> Tensor:
        """``[..., D]`` of int64 ``ids [...]``."""
        found = super().forward(ids)
        if self.scale == 1.0:
            return found
        return found * float(torch.tensor(self.scale).to(found.dtype))


def sees(length: int, window: int, mask: Tensor | None, device: torch.device) -> Tensor:
    """The attention mask of ``length`` positions, bool ``[..., T or 1, T]``: ``mask`` restricted to the last
    ``window``."""
    at = torch.arange(length, device=device)
    seen = torch.ones(length, length, dtype=torch.bool, device=device) if mask is None else mask
    return seen & (at[:, None] - at < window) if window else seen
