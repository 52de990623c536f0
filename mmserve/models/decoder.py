"""One pre-norm transformer decoder for the LLaMA / Qwen / LLaDA family.

Shapes in names: T tokens (any leading dimensions), D hidden, H query heads, G key/value heads, K head size.
The decoder is independent of caches, masks and batches: attention is passed as a callable, so that the same module
trains on padded batches, serves ragged ones from a paged store, and runs causal or bidirectional.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from mmserve_kernels import elementwise
from mmserve_kernels.layer_rows import Stored
from mmserve_kernels.rope_scatter import rotate
from torch import Tensor, nn

from mmserve.models.decoder_config import DecoderConfig
from mmserve.models.decoder_rows import DecoderRows
from mmserve.models.lora import HEAD, Adapted
from mmserve.models.moe import MoE
from mmserve.models.packed import FEWEST_ROWS, has_few_rows
from mmserve.models.rotary import Rotary
from mmserve.models.tensor_parts import Part
from mmserve.models.variations import ACTIVATIONS, ScaledEmbedding, capped, sees

#: ``attend(layer, q[..., H, K], k[..., G, K], v[..., G, K], cos, sin) -> [..., H, K]`` applies rotary embedding itself,
#: by the tables (fp32 ``[..., 1, rotated]``), so that it can be fused with writing K/V.
Attend = Callable[[int, Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class DeepRows:
    """Features that are added to some rows' hidden states after each of the first layers (DeepStack, arXiv
    2406.04334)."""

    rows: Tensor  # int64 [n], distinct
    features_LnD: Tensor  # one for each layer, from the first


class RMSNorm(nn.Module):
    """Root-mean-square norm, computed in fp32 and returned in the input's dtype."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype == self.weight.dtype == torch.float32:
            if elementwise.takes(x):
                return elementwise.rms_norm(x, self.weight, self.eps)
            return F.rms_norm(x, x.shape[-1:], self.weight, self.eps)
        return F.rms_norm(x.float(), x.shape[-1:], self.weight.float(), self.eps).to(x.dtype)


class DecoderLayer(nn.Module):
    """Attention and SwiGLU feed-forward or experts, each preceded by its norm and added to the residual stream.

    ``qkv`` and ``gate_up`` are set if projections are joined for inference (``models/packed.py``).
    """

    #: Linear layers with the same input, which can be joined to one product.
    joined: ClassVar = {"qkv": ("q_proj", "k_proj", "v_proj"), "gate_up": ("gate_proj", "up_proj")}
    qkv: Callable[[Tensor], tuple[Tensor, ...]] | None
    gate_up: Callable[[Tensor], tuple[Tensor, ...]] | None

    def __init__(self, config: DecoderConfig, index: int) -> None:
        super().__init__()
        c = config
        self.qkv = self.gate_up = None
        self.head_dim, self.query_scale, self.activation = c.head_dim, c.query_scale, ACTIVATIONS[c.activation]
        self.attn_norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.q_proj = nn.Linear(c.hidden_size, c.num_heads * c.head_dim, bias=c.qkv_bias)
        self.k_proj = nn.Linear(c.hidden_size, c.num_kv_heads * c.head_dim, bias=c.qkv_bias)
        self.v_proj = nn.Linear(c.hidden_size, c.num_kv_heads * c.head_dim, bias=c.qkv_bias)
        self.o_proj = nn.Linear(c.num_heads * c.head_dim, c.hidden_size, bias=c.out_bias)
        self.q_norm = RMSNorm(c.head_dim, c.rms_norm_eps) if c.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(c.head_dim, c.rms_norm_eps) if c.qk_norm else nn.Identity()
        self.mlp_norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.attn_out_norm = RMSNorm(c.hidden_size, c.rms_norm_eps) if c.output_norms else nn.Identity()
        self.mlp_out_norm = RMSNorm(c.hidden_size, c.rms_norm_eps) if c.output_norms else nn.Identity()
        self.moe = MoE(c.moe, c.hidden_size) if c.moe is not None and c.moe.has(index) else None
        if self.moe is not None:
            return
        self.gate_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=c.mlp_bias)
        self.up_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=c.mlp_bias)
        self.down_proj = nn.Linear(c.intermediate_size, c.hidden_size, bias=c.mlp_bias)

    def forward(
        self, x_TD: Tensor, cos: Tensor, sin: Tensor, layer: int, attend: Attend, adapted: Adapted | None = None
    ) -> Tensor:
        q_THK, k_TGK, v_TGK = self._heads(self.attn_norm(x_TD), adapted, layer)
        return self.after_attention(x_TD, attend(layer, q_THK, k_TGK, v_TGK, cos, sin), adapted, layer)

    def heads(self, x_TD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries ``[..., H, K]``, keys and values ``[..., G, K]``, before rotation, from the layer's input."""
        return self._heads(self.attn_norm(x_TD))

    def after_attention(
        self, x_TD: Tensor, attended_THK: Tensor, adapted: Adapted | None = None, layer: int = 0
    ) -> Tensor:
        """The layer's output for rows of its input, given their attention output."""
        attended_TD = attended_THK.flatten(-2)
        made_TD = self.o_proj(attended_TD)
        if adapted is not None:
            adapted.add(layer, "o", attended_TD, (made_TD,))
        x_TD = x_TD + self.attn_out_norm(made_TD)
        h_TD = self.mlp_norm(x_TD)
        if self.moe is not None:
            return x_TD + self.moe(h_TD)
        gate, up = (self.gate_proj(h_TD), self.up_proj(h_TD)) if self.gate_up is None else self.gate_up(h_TD)
        if adapted is not None:
            adapted.add(layer, "gate_up", h_TD, (gate, up))
        gated = self.activation(gate) * up
        made_TD = self.down_proj(gated)
        if adapted is not None:
            adapted.add(layer, "down", gated, (made_TD,))
        return x_TD + self.mlp_out_norm(made_TD)

    def _heads(self, h_TD: Tensor, adapted: Adapted | None = None, layer: int = 0) -> tuple[Tensor, Tensor, Tensor]:
        """Queries ``[..., H, K]``, keys and values ``[..., G, K]`` of normed hidden states ``[..., D]``."""
        if self.qkv is None:
            q, k, v = self.q_proj(h_TD), self.k_proj(h_TD), self.v_proj(h_TD)
        else:
            q, k, v = self.qkv(h_TD)
        if adapted is not None:
            adapted.add(layer, "qkv", h_TD, (q, k, v))
        q, k, v = (x.unflatten(-1, (-1, self.head_dim)) for x in (q, k, v))
        return self._scaled(self.q_norm(q)), self.k_norm(k), v

    def _scaled(self, q: Tensor) -> Tensor:
        return q if self.query_scale == 1.0 else q * self.query_scale

    def queries_and_keys(self, x_TD: Tensor, asking: slice) -> tuple[Tensor, Tensor]:
        """Queries ``[R, H, K]`` of the R tokens ``asking``, and keys ``[T, G, K]``, before rotation, from the layer's
        input."""
        h_TD = self.attn_norm(x_TD)
        if self.qkv is not None:
            q, k, _v = self._heads(h_TD)
            return q[asking], k
        q, k = self.q_proj(h_TD[asking]), self.k_proj(h_TD)
        q, k = (x.unflatten(-1, (-1, self.head_dim)) for x in (q, k))
        return self._scaled(self.q_norm(q)), self.k_norm(k)

    def keys_and_values(self, x_TD: Tensor) -> tuple[Tensor, Tensor]:
        """Keys, before rotation, and values ``[..., G, K]``, from the layer's input."""
        h_TD = self.attn_norm(x_TD)
        if self.qkv is not None:
            _q, k, v = self._heads(h_TD)
            return k, v
        k, v = (project(h_TD).unflatten(-1, (-1, self.head_dim)) for project in (self.k_proj, self.v_proj))
        return self.k_norm(k), v

    def values(self, x_TD: Tensor, adapted: Adapted | None = None, layer: int = 0) -> Tensor:
        """Values ``[..., G, K]``, from the layer's input."""
        if adapted is not None:
            return self._heads(self.attn_norm(x_TD), adapted, layer)[2]
        values: Tensor = self.v_proj(self.attn_norm(x_TD))
        return values.unflatten(-1, (-1, self.head_dim))


class Decoder(nn.Module):
    """The transformer, from embeddings to final hidden states; ``logits`` is separate so that callers can select
    rows."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        width = config.rotary_width or config.head_dim
        self._rotary = Rotary(width, config.rope_theta, config.rope_scaling, config.rope_axes)
        self._local_rotary = Rotary(width, config.local_theta) if config.local_theta else None
        self._few_rows = False
        self._rows: DecoderRows | None = None
        #: For each parameter: its tensor in the checkpoint, and its shape. Empty if not loaded from a checkpoint.
        self.origins: dict[str, tuple[Part, torch.Size]] = {}
        self.embed = ScaledEmbedding(config.vocab_size, config.hidden_size, config.embed_scale)
        self.layers = nn.ModuleList(DecoderLayer(config, index) for index in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_embeddings:
            self.head.weight = self.embed.weight

    def forward(
        self,
        x_TD: Tensor,
        positions: Tensor,
        attend: Attend,
        deep: DeepRows | None = None,
        adapted: Adapted | None = None,
    ) -> Tensor:
        """Final hidden states ``[..., D]`` of embedded tokens ``[..., D]`` at integer ``positions [...]``.

        With several position axes, ``positions`` are ``[axes, ...]``. ``deep`` and ``adapted`` require tokens ``[T,
        D]``.
        """
        return self.hidden(x_TD, *self.rotary(positions), attend, deep, adapted)

    def hidden(
        self,
        x_TD: Tensor,
        cos: Tensor,
        sin: Tensor,
        attend: Attend,
        deep: DeepRows | None = None,
        adapted: Adapted | None = None,
    ) -> Tensor:
        """As ``forward``, with precomputed cosine and sine of the rotary angles (``rotary``)."""
        tables = self._tables(cos, sin)
        for index, layer in enumerate(self.layers):
            x_TD = layer(x_TD, *tables[self.config.window(index) > 0], index, attend, adapted)
            if deep is not None and index < len(deep.features_LnD):
                x_TD = x_TD.index_add(0, deep.rows, deep.features_LnD[index])
        return self.norm(x_TD)

    def hidden_rows(
        self, x_TD: Tensor, positions: Tensor, stored: Stored, between: Callable[[], None] | None = None
    ) -> Tensor | None:
        """As ``forward``, bit for bit, for single rows of different requests whose K/V are ``stored`` in pages; None if
        that is slower or not supported by the layers. ``between`` is called in each layer."""
        if self._rows is None or not self._rows.takes(x_TD):
            return None
        return self.norm(self._rows.run(x_TD, *self.rotary(positions), stored, between))

    def values_of_second_layer(
        self, x_TD: Tensor, positions_T: Tensor, attend: Attend, adapted: Adapted | None = None
    ) -> Tensor:
        """Value vectors ``[..., G, K]`` of the second layer, for embedded tokens ``[..., D]``."""
        cos, sin = self.rotary(positions_T)
        first, second = self.layers[0], self.layers[1]
        assert isinstance(second, DecoderLayer)
        return second.values(first(x_TD, cos, sin, 0, attend, adapted), adapted, 1)

    def rotary(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosine and sine of the rotary angles, fp32 ``[..., 1, rotated]``; ``positions`` as in ``forward``.

        If layers with a sliding window have their own base, their table is appended: ``[..., 1, 2 * rotated]``.
        """
        cos, sin = self._rotary.table(positions)
        if self._local_rotary is None:
            return cos, sin
        local_cos, local_sin = self._local_rotary.table(positions)
        return torch.cat([cos, local_cos], -1), torch.cat([sin, local_sin], -1)

    def _tables(self, cos: Tensor, sin: Tensor) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        """Splits ``rotary`` tables into those of global layers and those of layers with a sliding window."""
        if not self.config.local_theta:
            return (cos, sin), (cos, sin)
        half = cos.shape[-1] // 2
        everything, local = (
            (cos[..., own].contiguous(), sin[..., own].contiguous()) for own in (slice(half), slice(half, None))
        )
        return everything, local

    def set_row_floor(self, rows: int) -> None:
        """Set the row floor (the number of rows from which a product's bits do not depend on it) for experts. To be
        called when the layers have their final form."""
        for module in self.modules():
            if isinstance(module, MoE):
                module.row_floor = rows
        self._few_rows, self._rows = has_few_rows(self), DecoderRows.of(self)

    @property
    def fewest_rows(self) -> int:
        """The minimum number of rows of a pass, because fewer rows take no less time."""
        return 1 if self._few_rows and torch.get_num_threads() == 1 else FEWEST_ROWS

    def logits(self, hidden: Tensor, adapted: Adapted | None = None) -> Tensor:
        """Vocabulary logits ``[..., V]`` of hidden states ``[..., D]``, in the model's dtype.

        ``adapted`` requires hidden states ``[T, D]``.
        """
        made: Tensor = self.head(hidden)
        if adapted is not None:
            adapted.add(self.config.num_layers, HEAD, hidden, (made,))
        return capped(made, self.config.logit_cap)


def dense_attention(mask: Tensor | None = None, config: DecoderConfig | None = None) -> Attend:
    """Attention within each row of a padded batch ``[B, T, …]``; ``mask``: bool ``[B, 1, T or 1, T]``, True = visible.

    ``config``: for a decoder without ``plain_attention``.
    """
    special = None if config is None or config.plain_attention else config

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = (x.transpose(-3, -2) for x in (rotate(q, cos, sin), rotate(k, cos, sin), v))
        if special is not None:
            seen = sees(q.shape[-2], special.window(layer), mask, q.device)
            k, v = (x.repeat_interleave(q.shape[-3] // x.shape[-3], -3) for x in (k, v))
            scores = capped(q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5, special.score_cap)
            return (scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v).transpose(-3, -2)
        grouped = q.shape[-3] != k.shape[-3]
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=grouped).transpose(-3, -2)

    return attend
