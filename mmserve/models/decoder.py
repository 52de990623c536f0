"""One pre-norm transformer decoder for the LLaMA / Qwen / LLaDA family.

Shapes in names: T tokens (any leading dimensions), D hidden, H query heads, G key/value heads, K head size.
The decoder knows nothing of caches, masks or batches: attention is a callable that it is given, so the same
module trains on padded batches, serves ragged ones from a paged store, and runs causal or bidirectional.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from mmserve_kernels.rope_scatter import rotate
from torch import Tensor, nn

from mmserve.models.moe import MoE, MoEConfig
from mmserve.models.rotary import Llama3Scaling, rotary_table
from mmserve.models.silu import silu

#: ``attend(layer, q[..., H, K], k[..., G, K], v[..., G, K], cos, sin) -> [..., H, K]`` rotates q and k by the tables
#: (fp32 ``[..., 1, rotated]``) itself: where K/V are kept, that is one pass over memory with their write.
Attend = Callable[[int, Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class DeepRows:
    """What is added to some rows' hidden states after each of the first layers (DeepStack, arXiv 2406.04334)."""

    rows: Tensor  # int64 [n], none twice
    features_LnD: Tensor  # one a layer, from the first on


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """Dimensions and switches of a decoder; every number comes from a checkpoint's ``config.json``."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float = 10_000.0
    rope_scaling: Llama3Scaling | None = None
    rotary_width: int = 0  # of a head's dimensions, the first so many are rotated; 0 = all
    rope_axes: tuple[int, ...] = ()  # the axis of position that turns each frequency; () = positions have one axis
    deep_layers: int = 0  # the first so many take visual features of their own (``DeepRows``)
    rms_norm_eps: float = 1e-5
    max_positions: int = 4096
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    tie_embeddings: bool = False
    moe: MoEConfig | None = None  # experts instead of the feed-forward

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"{self.num_heads} query heads cannot share {self.num_kv_heads} key/value heads evenly")
        if self.head_dim % 2:
            raise ValueError(f"head size {self.head_dim} is odd: rotary embedding pairs its halves")
        if self.rotary_width % 2 or self.rotary_width > self.head_dim:
            raise ValueError(f"{self.rotary_width} dimensions of {self.head_dim} cannot be rotated in pairs")
        if self.rope_axes and 2 * len(self.rope_axes) != (self.rotary_width or self.head_dim):
            raise ValueError(f"axes of {len(self.rope_axes)} frequencies do not fit heads of {self.head_dim}")
        if self.deep_layers > self.num_layers:
            raise ValueError(f"visual features for {self.deep_layers} layers, but there are only {self.num_layers}")

    @property
    def position_axes(self) -> int:
        """Axes of a position: 3 of M-RoPE."""
        return max(self.rope_axes, default=0) + 1


class RMSNorm(nn.Module):
    """Root-mean-square norm, computed in fp32 and returned in the input's dtype."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype == self.weight.dtype == torch.float32:
            return F.rms_norm(x, x.shape[-1:], self.weight, self.eps)
        return F.rms_norm(x.float(), x.shape[-1:], self.weight.float(), self.eps).to(x.dtype)


class DecoderLayer(nn.Module):
    """Attention and SwiGLU feed-forward or experts, each after its norm, each added to the residual stream.

    ``qkv`` and ``gate_up`` are set where layers are joined for inference (``models/packed.py``).
    """

    #: Layers of the same input, which can become one product.
    joined: ClassVar = {"qkv": ("q_proj", "k_proj", "v_proj"), "gate_up": ("gate_proj", "up_proj")}
    qkv: Callable[[Tensor], tuple[Tensor, ...]] | None
    gate_up: Callable[[Tensor], tuple[Tensor, ...]] | None

    def __init__(self, config: DecoderConfig, index: int) -> None:
        super().__init__()
        c = config
        self.qkv = self.gate_up = None
        self.head_dim = c.head_dim
        self.attn_norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.q_proj = nn.Linear(c.hidden_size, c.num_heads * c.head_dim, bias=c.qkv_bias)
        self.k_proj = nn.Linear(c.hidden_size, c.num_kv_heads * c.head_dim, bias=c.qkv_bias)
        self.v_proj = nn.Linear(c.hidden_size, c.num_kv_heads * c.head_dim, bias=c.qkv_bias)
        self.o_proj = nn.Linear(c.num_heads * c.head_dim, c.hidden_size, bias=c.out_bias)
        self.q_norm = RMSNorm(c.head_dim, c.rms_norm_eps) if c.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(c.head_dim, c.rms_norm_eps) if c.qk_norm else nn.Identity()
        self.mlp_norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.moe = MoE(c.moe, c.hidden_size) if c.moe is not None and index >= c.moe.first_layer else None
        if self.moe is not None:
            return
        self.gate_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=c.mlp_bias)
        self.up_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=c.mlp_bias)
        self.down_proj = nn.Linear(c.intermediate_size, c.hidden_size, bias=c.mlp_bias)

    def forward(self, x_TD: Tensor, cos: Tensor, sin: Tensor, layer: int, attend: Attend) -> Tensor:
        q_THK, k_TGK, v_TGK = self.heads(x_TD)
        return self.after_attention(x_TD, attend(layer, q_THK, k_TGK, v_TGK, cos, sin))

    def heads(self, x_TD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries ``[..., H, K]``, and keys and values ``[..., G, K]``, not yet rotated, that the layer makes of its
        input."""
        return self._heads(self.attn_norm(x_TD))

    def after_attention(self, x_TD: Tensor, attended_THK: Tensor) -> Tensor:
        """The layer's output for rows of its input, from what attention gives them."""
        x_TD = x_TD + self.o_proj(attended_THK.flatten(-2))
        h_TD = self.mlp_norm(x_TD)
        if self.moe is not None:
            return x_TD + self.moe(h_TD)
        gate, up = (self.gate_proj(h_TD), self.up_proj(h_TD)) if self.gate_up is None else self.gate_up(h_TD)
        return x_TD + self.down_proj(silu(gate) * up)

    def _heads(self, h_TD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries ``[..., H, K]``, keys and values ``[..., G, K]`` of normed hidden states ``[..., D]``."""
        if self.qkv is None:
            q, k, v = self.q_proj(h_TD), self.k_proj(h_TD), self.v_proj(h_TD)
        else:
            q, k, v = self.qkv(h_TD)
        q, k, v = (x.unflatten(-1, (-1, self.head_dim)) for x in (q, k, v))
        return self.q_norm(q), self.k_norm(k), v

    def queries_and_keys(self, x_TD: Tensor, asking: slice) -> tuple[Tensor, Tensor]:
        """Queries ``[R, H, K]`` of the R tokens ``asking`` and keys ``[T, G, K]``, not yet rotated, that the layer
        makes of its input."""
        h_TD = self.attn_norm(x_TD)
        if self.qkv is not None:
            q, k, _v = self._heads(h_TD)
            return q[asking], k
        q, k = self.q_proj(h_TD[asking]), self.k_proj(h_TD)
        return self.q_norm(q.unflatten(-1, (-1, self.head_dim))), self.k_norm(k.unflatten(-1, (-1, self.head_dim)))

    def keys_and_values(self, x_TD: Tensor) -> tuple[Tensor, Tensor]:
        """Keys, not yet rotated, and values ``[..., G, K]`` that the layer makes of its input."""
        h_TD = self.attn_norm(x_TD)
        if self.qkv is not None:
            _q, k, v = self._heads(h_TD)
            return k, v
        k, v = (project(h_TD).unflatten(-1, (-1, self.head_dim)) for project in (self.k_proj, self.v_proj))
        return self.k_norm(k), v

    def values(self, x_TD: Tensor) -> Tensor:
        """Value vectors ``[..., G, K]`` that the layer makes of its input."""
        values: Tensor = self.v_proj(self.attn_norm(x_TD))
        return values.unflatten(-1, (-1, self.head_dim))


class Decoder(nn.Module):
    """The transformer: embeddings in, final hidden states out; ``logits`` is separate so that callers pick rows."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config, index) for index in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_embeddings:
            self.head.weight = self.embed.weight

    def forward(self, x_TD: Tensor, positions: Tensor, attend: Attend, deep: DeepRows | None = None) -> Tensor:
        """Final hidden states ``[..., D]`` of embedded tokens ``[..., D]`` at integer ``positions [...]``.

        Where positions have several axes, they are ``[axes, ...]``. ``deep`` is for tokens ``[T, D]``.
        """
        return self.hidden(x_TD, *self.rotary(positions), attend, deep)

    def hidden(self, x_TD: Tensor, cos: Tensor, sin: Tensor, attend: Attend, deep: DeepRows | None = None) -> Tensor:
        """As ``forward``, of tokens whose rotary angles have the cosine and sine (``rotary``)."""
        for index, layer in enumerate(self.layers):
            x_TD = layer(x_TD, cos, sin, index, attend)
            if deep is not None and index < len(deep.features_LnD):
                x_TD = x_TD.index_add(0, deep.rows, deep.features_LnD[index])
        return self.norm(x_TD)

    def values_of_second_layer(self, x_TD: Tensor, positions_T: Tensor, attend: Attend) -> Tensor:
        """Value vectors ``[..., G, K]`` that the second layer makes of embedded tokens ``[..., D]``."""
        cos, sin = self.rotary(positions_T)
        first, second = self.layers[0], self.layers[1]
        assert isinstance(second, DecoderLayer)
        return second.values(first(x_TD, cos, sin, 0, attend))

    def rotary(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosine and sine of the rotary angles, fp32 ``[..., 1, rotated]``; ``positions`` as of ``forward``."""
        c = self.config
        return rotary_table(positions, c.rotary_width or c.head_dim, c.rope_theta, c.rope_scaling, c.rope_axes)

    def set_row_floor(self, rows: int) -> None:
        """From how many rows on a matrix product gives a row the same bits: experts run no fewer."""
        for module in self.modules():
            if isinstance(module, MoE):
                module.row_floor = rows

    def logits(self, hidden: Tensor) -> Tensor:
        """Vocabulary logits ``[..., V]`` of hidden states ``[..., D]``, in the model's dtype."""
        return self.head(hidden)


def dense_attention(mask: Tensor | None = None) -> Attend:
    """Attention within each row of a padded batch ``[B, T, …]``; ``mask``: bool ``[B, 1, T or 1, T]``, True = seen."""

    def attend(_layer: int, q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = (x.transpose(-3, -2) for x in (rotate(q, cos, sin), rotate(k, cos, sin), v))
        grouped = q.shape[-3] != k.shape[-3]
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=grouped).transpose(-3, -2)

    return attend
