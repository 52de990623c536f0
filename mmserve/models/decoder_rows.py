"""A decoder's layers for compiled loops (``mmserve_kernels/layer_rows.py``): passes of few rows on a CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from mmserve_kernels.cached_attention.cpu import FLOOR
from mmserve_kernels.few_rows import MOST_ROWS
from mmserve_kernels.layer_rows import LayerWeights, Stored, Weights, run_layers
from torch import Tensor, nn

from mmserve.models.packed import JointLinear, PackedLinear
from mmserve.models.silu import silu

if TYPE_CHECKING:
    from mmserve.models.decoder import Decoder


class DecoderRows:
    """The layers of one decoder; their weights are shared, not copied."""

    def __init__(self, layers: Sequence[LayerWeights], heads: int) -> None:
        self._layers, self._heads = layers, heads

    @classmethod
    def of(cls, decoder: Decoder) -> DecoderRows | None:
        """The layers of ``decoder`` in their served form; None unless all of them have plain attention and SwiGLU,
        packed in fp32."""
        c = decoder.config
        plain = c.plain_attention and not (c.qk_norm or c.output_norms or c.moe) and c.query_scale == 1.0
        if not plain or c.num_heads // c.num_kv_heads >= FLOOR:  # such rows use another attention implementation
            return None
        layers = [_weights_of(layer) for layer in decoder.layers]
        found = [layer for layer in layers if layer is not None]
        return cls(found, c.num_heads) if len(found) == len(layers) else None

    def run(
        self, x_TD: Tensor, cos_T1W: Tensor, sin_T1W: Tensor, stored: Stored, between: Callable[[], None] | None
    ) -> Tensor:
        """The layers' output for embedded tokens ``[T, D]``; ``between`` is called in each layer."""
        return run_layers(self._layers, x_TD, cos_T1W, sin_T1W, stored, self._heads, between)

    def takes(self, x_TD: Tensor) -> bool:
        """Whether a pass of these rows is faster with the loops: few rows, on one thread."""
        return 0 < len(x_TD) <= MOST_ROWS and torch.get_num_threads() == 1 and not torch.is_grad_enabled()

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """None: a copied decoder has plain layers with their own weights."""


def _weights_of(layer: nn.Module) -> LayerWeights | None:
    """The weights of one layer; None if it is not supported."""
    of: Any = layer
    joint = of.qkv, of.gate_up
    if of.activation is not silu or not all(isinstance(each, JointLinear) for each in joint):
        return None
    packed = [_packed(each) for each in (of.qkv.product, of.o_proj, of.gate_up.product, of.down_proj)]
    norms = of.attn_norm, of.mlp_norm
    if any(norm.weight.dtype != torch.float32 for norm in norms):
        return None
    qkv, out, gate_up, down = packed
    if qkv is None or out is None or gate_up is None or down is None:
        return None
    attn_norm, mlp_norm = (norm.weight.detach().numpy() for norm in norms)
    return LayerWeights(attn_norm, mlp_norm, of.attn_norm.eps, qkv, out, gate_up, down)


def _packed(linear: nn.Module) -> Weights | None:
    if not isinstance(linear, PackedLinear) or linear.few is None:
        return None
    blocks, part = linear.few
    bias = np.empty(0, np.float32) if linear.bias is None else linear.bias.detach().numpy()
    return Weights(blocks, part, bias, linear.out_features)
