"""The vision transformer of CLIP (arXiv 2103.00020) and SigLIP (arXiv 2303.15343), without what pools its patches.

Parameters have the names of transformers' ``CLIPVisionModel`` and ``SiglipVisionModel``, and hidden states their bits.
Those classes take 2.5 s to import, which a server would start later by.
Shapes in names: B pictures, N positions, H heads, K head size, C = H * K.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def _quick_gelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
    "quick_gelu": _quick_gelu,
}


@dataclass(frozen=True)
class TowerOutput:
    """``[B, N, C]``: the input of each layer, and the output of the last; and that after the final norm in SigLIP."""

    hidden_states: tuple[Tensor, ...]
    last_hidden_state: Tensor


class ClipTower(nn.Module):
    """The tower of ``config``, of transformers; ``has_cls``: CLIP, with a class token before the patches."""

    def __init__(self, config: Any, *, has_cls: bool) -> None:
        super().__init__()
        self.config = config
        self.embeddings = _Embeddings(config, has_cls=has_cls)
        self.pre_layrnorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps) if has_cls else nn.Identity()
        self.encoder = nn.Module()
        self.encoder.layers = nn.ModuleList(_Layer(config) for _ in range(config.num_hidden_layers))
        self.post_layernorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self._has_cls = has_cls

    def forward(self, pixels: Tensor, *, output_hidden_states: bool = True) -> TowerOutput:
        """What the layers make of ``pixels [B, channels, height, width]``; without ``hidden_states`` where they are
        not wanted."""
        x_BNC = self.pre_layrnorm(self.embeddings(pixels))
        hidden = [x_BNC]
        for layer in self.encoder.get_submodule("layers").children():
            x_BNC = layer(x_BNC)
            if output_hidden_states:
                hidden.append(x_BNC)
        last = x_BNC if self._has_cls else self.post_layernorm(x_BNC)
        return TowerOutput(tuple(hidden) if output_hidden_states else (), last)


class _Embeddings(nn.Module):
    def __init__(self, config: Any, *, has_cls: bool) -> None:
        super().__init__()
        width, patch = config.hidden_size, config.patch_size
        self.patch_embedding = nn.Conv2d(config.num_channels, width, patch, stride=patch, bias=not has_cls)
        if has_cls:
            self.class_embedding = nn.Parameter(torch.empty(width))
        self.position_embedding = nn.Embedding((config.image_size // patch) ** 2 + has_cls, width)

    def forward(self, pixels: Tensor) -> Tensor:
        x_BNC = self.patch_embedding(pixels.to(self.patch_embedding.weight.dtype)).flatten(2).transpose(1, 2)
        if hasattr(self, "class_embedding"):
            x_BNC = torch.cat([self.class_embedding.expand(len(x_BNC), 1, -1), x_BNC], dim=1)
        return x_BNC + self.position_embedding.weight


class _Layer(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        width = config.hidden_size
        self.layer_norm1 = nn.LayerNorm(width, eps=config.layer_norm_eps)
        self.self_attn = _Attention(width, config.num_attention_heads)
        self.layer_norm2 = nn.LayerNorm(width, eps=config.layer_norm_eps)
        self.mlp = _Mlp(width, config.intermediate_size, config.hidden_act)

    def forward(self, x_BNC: Tensor, _mask: None = None) -> Tensor:
        x_BNC = x_BNC + self.self_attn(self.layer_norm1(x_BNC))
        return x_BNC + self.mlp(self.layer_norm2(x_BNC))


class _Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.num_heads, self.scale = heads, (width // heads) ** -0.5
        self.q_proj, self.k_proj = nn.Linear(width, width), nn.Linear(width, width)
        self.v_proj, self.out_proj = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x_BNC: Tensor) -> Tensor:
        made = (project(x_BNC) for project in (self.q_proj, self.k_proj, self.v_proj))
        q, k, v = (x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for x in made)
        attended_BHNK = F.scaled_dot_product_attention(q, k, v, scale=self.scale)
        return self.out_proj(attended_BHNK.transpose(1, 2).flatten(2))


class _Mlp(nn.Module):
    def __init__(self, width: int, inner: int, activation: str) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(width, inner), nn.Linear(inner, width)
        self._activation = _ACTIVATIONS[activation] if activation in _ACTIVATIONS else _other(activation)

    def forward(self, x_BNC: Tensor) -> Tensor:
        return self.fc2(self._activation(self.fc1(x_BNC)))


def _other(activation: str) -> Callable[[Tensor], Tensor]:
    from transformers.activations import get_activation  # seconds

    found: Callable[[Tensor], Tensor] = get_activation(activation)
    return found
