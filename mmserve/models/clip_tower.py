"""The vision transformer of CLIP (arXiv 2103.00020) and SigLIP (arXiv 2303.15343), without the pooling of patches.

Parameter names, and the bits of hidden states, are those of transformers' ``CLIPVisionModel`` and
``SiglipVisionModel``. Importing those classes would delay the start of a server by 3 s. Shapes in names: B images, N
positions, H heads, K head size, C = H * K.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmserve.errors import ConfigError
from mmserve.models.keys import Keys


def _quick_gelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
    "quick_gelu": _quick_gelu,
}


@dataclass(kw_only=True)
class TowerConfig:
    """A tower's dimensions, with the names of transformers' configurations, without unused ones."""

    model_type: str
    hidden_size: int = 768
    intermediate_size: int = 3072
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    num_channels: int = 3
    image_size: int = 224
    patch_size: int
    hidden_act: str
    layer_norm_eps: float

    def to_dict(self) -> dict[str, Any]:
        """As plain values."""
        return asdict(self)


#: With the defaults of ``CLIPVisionConfig`` and ``SiglipVisionConfig``.
CLIP = TowerConfig(model_type="clip_vision_model", patch_size=32, hidden_act="quick_gelu", layer_norm_eps=1e-5)
SIGLIP = TowerConfig(
    model_type="siglip_vision_model", patch_size=16, hidden_act="gelu_pytorch_tanh", layer_norm_eps=1e-6
)


def read_tower(keys: Keys, base: TowerConfig) -> TowerConfig:
    """The configuration in ``keys``, with defaults from ``base``; raises ``ConfigError``."""
    counts: dict[str, Any] = {
        f.name: keys.integer(f.name, default=getattr(base, f.name)) for f in fields(base) if f.type == "int"
    }
    act = keys.values.get("hidden_act") or base.hidden_act
    eps = keys.number("layer_norm_eps", default=base.layer_norm_eps)
    made = replace(base, **counts, hidden_act=str(act), layer_norm_eps=eps)
    if made.hidden_size % made.num_attention_heads:
        raise ConfigError(
            f"{keys.path}: hidden_size = {made.hidden_size} is not a multiple of num_attention_heads = "
            f"{made.num_attention_heads}"
        )
    return made


@dataclass(frozen=True)
class TowerOutput:
    """``[B, N, C]``: the input of each layer and the output of the last; in SigLIP also that after the final norm."""

    hidden_states: tuple[Tensor, ...]
    last_hidden_state: Tensor


class ClipTower(nn.Module):
    """The tower of ``config`` (ours or transformers'); ``has_cls``: CLIP, with a class token before the patches."""

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
        """Hidden states of ``pixels [B, channels, height, width]``; only the last ones unless
        ``output_hidden_states``."""
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
    from transformers.activations import get_activation  # takes seconds

    found: Callable[[Tensor], Tensor] = get_activation(activation)
    return found
