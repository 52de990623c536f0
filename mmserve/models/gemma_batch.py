"""Patches for transformers' DiffusionGemma that run the canvases of several requests in one pass, independently.

Canvases have the same length, but different caches. So a pass stacks the canvases, and attention runs separately for
each request over its own cache; padding and masks would change sums. Experts take multiples of a number of rows, so
that results do not depend on other tokens of the same expert (``row_floor``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

#: Names of these implementations in transformers' configuration.
ATTENTION, EXPERTS = "mmserve_ragged", "mmserve_floored"


@dataclass(frozen=True)
class _Nothing:
    keys: Tensor  # [B, heads, 0, head_dim]
    values: Tensor


class NoCache:
    """An empty replacement of the cache whose keys transformers' decoder puts before the canvases'."""

    is_compileable = False

    def __init__(self, past: Any, count: int) -> None:
        self.layers = [
            _Nothing(*(part[:, :, :0].expand(count, -1, -1, -1) for part in (layer.keys, layer.values)))
            for layer in past.layers
        ]


def _ragged_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    pasts: list[Any] | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of queries ``[B, heads, L, head_dim]``; with ``pasts``, the caches of B requests, each over its own."""
    if pasts is None:
        out: tuple[Tensor, None] = sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
        return out
    found = []
    for i, past in enumerate(pasts):
        layer, one = past.layers[module.layer_idx], slice(i, i + 1)
        keys, values = torch.cat([layer.keys, key[one]], -2), torch.cat([layer.values, value[one]], -2)
        found.append(sdpa_attention_forward(module, query[one], keys, values, None, **kwargs)[0])
    return torch.cat(found), None


def _floored_experts(module: Any, x_ND: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
    """The weighted sum of each token's experts ``[N, top_k]``, computed expert by expert: ``[N, D]``."""
    out = torch.zeros_like(x_ND)
    for expert in experts.unique().tolist():
        token, choice = torch.where(experts == expert)
        rows = F.pad(x_ND[token], (0, 0, 0, -len(token) % module.row_floor))
        gate, up = F.linear(rows, module.gate_up_proj[expert]).chunk(2, dim=-1)
        made = F.linear(module.act_fn(gate) * up, module.down_proj[expert])[: len(token)]
        out.index_add_(0, token, (made * weights[token, choice, None]).to(out.dtype))
    return out


AttentionInterface.register(ATTENTION, _ragged_attention)
AttentionMaskInterface.register(ATTENTION, sdpa_mask)
ALL_EXPERTS_FUNCTIONS.register(EXPERTS, _floored_experts)
