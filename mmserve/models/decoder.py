"""One pre-norm transformer decoder for the LLaMA / Qwen / LLaDA family.

Shapes in names: T tokens (any leading dimensions), D hidden, H query heads, G key/value heads, K head size.
The decoder knows nothing of caches, masks or batches: attention is a callable that it is given, so the same
module trains on padded batches, serves ragged ones from a paged store, and runs causal or bidirectional.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

#: ``attend(layer, q[..., H, K], k[..., G, K], v[..., G, K]) -> [..., H, K]``; q and k arrive rotated.
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


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
    rms_norm_eps: float = 1e-5
    max_positions: int = 4096
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    tie_embeddings: bool = False

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"{self.num_heads} query heads cannot share {self.num_kv_heads} key/value heads evenly")
        if self.head_dim % 2:
            raise ValueError(f"head size {self.head_dim} is odd: rotary embedding pairs its halves")


class RMSNorm(nn.Module):
    """Root-mean-square norm, computed in fp32 and returned in the input's dtype."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), x.shape[-1:], self.weight.float(), self.eps).to(x.dtype)


def rotary_table(positions: Tensor, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Cosine and sine of the rotary angles, fp32 ``[..., 1, head_dim]``, for integer ``positions [...]``."""
    frequencies = theta ** (-torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32) / head_dim)
    angles = positions[..., None].float() * frequencies
    angles = torch.cat([angles, angles], dim=-1).unsqueeze(-2)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of ``x [..., heads, K]`` in the half-split convention that LLaMA, Qwen and LLaDA share."""
    first, second = x.chunk(2, dim=-1)
    return x * cos.to(x.dtype) + torch.cat([-second, first], dim=-1) * sin.to(x.dtype)


class DecoderLayer(nn.Module):
    """Attention and SwiGLU feed-forward, each behind its norm, each added to the residual stream."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        c = config
        self.head_dim = c.head_dim
        self.attn_norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.q_proj = nn.Linear(c.hidden_size, c.num_heads * c.head_dim, bias=c.qkv_bias)
        self.k_proj = nn.Linear(c.hidden_size, c.num_kv_heads * c.head_dim, bias=c.qkv_bias)
        self.v_proj = nn.Linear(c.hidden_size, c.num_kv_heads * c.head_dim, bias=c.qkv_bias)
        self.o_proj = nn.Linear(c.num_heads * c.head_dim, c.hidden_size, bias=c.out_bias)
        self.q_norm = RMSNorm(c.head_dim, c.rms_norm_eps) if c.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(c.head_dim, c.rms_norm_eps) if c.qk_norm else nn.Identity()
        self.mlp_norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.gate_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=c.mlp_bias)
        self.up_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=c.mlp_bias)
        self.down_proj = nn.Linear(c.intermediate_size, c.hidden_size, bias=c.mlp_bias)

    def forward(self, x_TD: Tensor, cos: Tensor, sin: Tensor, layer: int, attend: Attend) -> Tensor:
        h_TD = self.attn_norm(x_TD)
        q_THK = rotate(self.q_norm(self.q_proj(h_TD).unflatten(-1, (-1, self.head_dim))), cos, sin)
        k_TGK = rotate(self.k_norm(self.k_proj(h_TD).unflatten(-1, (-1, self.head_dim))), cos, sin)
        v_TGK = self.v_proj(h_TD).unflatten(-1, (-1, self.head_dim))
        x_TD = x_TD + self.o_proj(attend(layer, q_THK, k_TGK, v_TGK).flatten(-2))
        h_TD = self.mlp_norm(x_TD)
        return x_TD + self.down_proj(F.silu(self.gate_proj(h_TD)) * self.up_proj(h_TD))


class Decoder(nn.Module):
    """The transformer: embeddings in, final hidden states out; ``logits`` is separate so that callers pick rows."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_embeddings:
            self.head.weight = self.embed.weight

    def forward(self, x_TD: Tensor, positions_T: Tensor, attend: Attend) -> Tensor:
        """Final hidden states ``[..., D]`` of embedded tokens ``[..., D]`` at integer ``positions [...]``."""
        cos, sin = rotary_table(positions_T, self.config.head_dim, self.config.rope_theta)
        for index, layer in enumerate(self.layers):
            x_TD = layer(x_TD, cos, sin, index, attend)
        return self.norm(x_TD)

    def logits(self, hidden: Tensor) -> Tensor:
        """Vocabulary logits ``[..., V]`` of hidden states ``[..., D]``, in the model's dtype."""
        return self.head(hidden)


def dense_attention(mask: Tensor | None = None) -> Attend:
    """Attention within each row of a padded batch ``[B, T, …]``; ``mask``: bool ``[B, 1, T or 1, T]``, True = seen."""

    def attend(_layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(-3, -2) for x in (q, k, v))
        grouped = q.shape[-3] != k.shape[-3]
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=grouped).transpose(-3, -2)

    return attend
