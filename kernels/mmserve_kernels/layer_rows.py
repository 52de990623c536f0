"""A decoder's layers for few rows of separate requests: a step of next-token decoding in few compiled calls.

With few rows the number of operations determines the time: PyTorch needs about 20 for a layer. Here there are three:
the part before attention, attention (``cached_attention/rows.py``), and the part after it. Each part is bitwise equal
to the operation used otherwise (``elementwise``, ``few_rows``, ``rope_scatter``).

Shapes in names: T rows, D hidden, N columns of a product, H query heads, G key/value heads, K head size, W rotated
dimensions; P pages, S positions a page; B, C blocks of weights and their columns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from mmserve_kernels.cached_attention.batch import LoneRows
from mmserve_kernels.cached_attention.rows import attend_in_place
from mmserve_kernels.compiled import compiled
from mmserve_kernels.elementwise import norm_rows, silu_of
from mmserve_kernels.few_rows import product
from mmserve_kernels.rope_scatter.cpu import turn

_WEIGHTS = "f4[:, :, ::1], i8, f4[::1]"


@dataclass(frozen=True, eq=False)
class Weights:
    """Packed weights of a linear layer (``few_rows.blocks_of``), the part size of its sums, and its bias (fp32 ``[N]``;
    ``[0]`` = none)."""

    blocks_BKC: np.ndarray
    part: int
    bias_N: np.ndarray
    columns: int


@dataclass(frozen=True, eq=False)
class LayerWeights:
    """Weights of a pre-norm layer with SwiGLU; queries, keys and values are one product, gate and up another."""

    attn_norm_D: np.ndarray
    mlp_norm_D: np.ndarray
    eps: float
    qkv: Weights
    out: Weights
    gate_up: Weights
    down: Weights


@dataclass(frozen=True, eq=False)
class Stored:
    """The slots for the rows' keys and values, and the visible positions of each row: fp32 pages ``[P, S, G, K]`` of
    each layer, slots as in ``Ragged``."""

    keys: Sequence[Tensor]
    values: Sequence[Tensor]
    slots_T: np.ndarray
    rows: LoneRows


@compiled(f"void(f4[:, ::1], {_WEIGHTS}, f4[:, ::1])", fused=False)
def _linear(x: np.ndarray, blocks: np.ndarray, part: int, bias: np.ndarray, out: np.ndarray) -> None:
    product(x, blocks, part, out)
    if len(bias):
        for t in range(out.shape[0]):
            for n in range(out.shape[1]):
                out[t, n] += bias[n]


@compiled("void(f4[:, ::1], f4[:, ::1])", fused=False)
def _add(x_TD: np.ndarray, more_TD: np.ndarray) -> None:
    for t in range(x_TD.shape[0]):
        for i in range(x_TD.shape[1]):
            x_TD[t, i] += more_TD[t, i]


@compiled(
    f"void(f4[:, ::1], f4[::1], f4, {_WEIGHTS}, f4[:, ::1], f4[:, ::1], f4[:, :, :, ::1], f4[:, :, :, ::1], i8[::1], "
    "f4[:, ::1], f4[:, ::1], f4[:, :, ::1])",
    fused=False,
)
def _before(
    x_TD: np.ndarray,
    norm_D: np.ndarray,
    eps: np.float32,
    blocks: np.ndarray,
    part: int,
    bias: np.ndarray,
    cos_TW: np.ndarray,
    sin_TW: np.ndarray,
    k_PSGK: np.ndarray,
    v_PSGK: np.ndarray,
    slots_T: np.ndarray,
    h_TD: np.ndarray,
    made_TN: np.ndarray,
    q_THK: np.ndarray,
) -> None:
    norm_rows(x_TD, norm_D, eps, h_TD)
    _linear(h_TD, blocks, part, bias, made_TN)
    page_size, groups, size = k_PSGK.shape[1:]
    heads = q_THK.shape[1]
    for t in range(len(slots_T)):
        page, at = slots_T[t] // page_size, slots_T[t] % page_size
        made, cos, sin = made_TN[t], cos_TW[t], sin_TW[t]
        for h in range(heads):
            turn(made[h * size : (h + 1) * size], cos, sin, q_THK[t, h])
        for g in range(groups):
            first = (heads + g) * size
            turn(made[first : first + size], cos, sin, k_PSGK[page, at, g])
            first += groups * size
            v_PSGK[page, at, g] = made[first : first + size]


@compiled(
    f"void(f4[:, ::1], f4[:, ::1], {_WEIGHTS}, f4[::1], f4, {_WEIGHTS}, {_WEIGHTS}, f4[:, ::1], f4[:, ::1], "
    "f4[:, ::1])",
    fused=False,
)
def _after(
    x_TD: np.ndarray,
    attended_TN: np.ndarray,
    out_blocks: np.ndarray,
    out_part: int,
    out_bias: np.ndarray,
    norm_D: np.ndarray,
    eps: np.float32,
    up_blocks: np.ndarray,
    up_part: int,
    up_bias: np.ndarray,
    down_blocks: np.ndarray,
    down_part: int,
    down_bias: np.ndarray,
    h_TD: np.ndarray,
    both_TN: np.ndarray,
    gated_TN: np.ndarray,
) -> None:
    """Updates ``x_TD`` to the layer's output, in place."""
    _linear(attended_TN, out_blocks, out_part, out_bias, h_TD)
    _add(x_TD, h_TD)
    norm_rows(x_TD, norm_D, eps, h_TD)
    _linear(h_TD, up_blocks, up_part, up_bias, both_TN)
    width = gated_TN.shape[1]
    for t in range(x_TD.shape[0]):
        gate, up, gated = both_TN[t, :width], both_TN[t, width:], gated_TN[t]
        for i in range(width):
            gated[i] = silu_of(gate[i]) * up[i]
    _linear(gated_TN, down_blocks, down_part, down_bias, h_TD)
    _add(x_TD, h_TD)


def run_layers(
    layers: Sequence[LayerWeights],
    x_TD: Tensor,
    cos_T1W: Tensor,
    sin_T1W: Tensor,
    stored: Stored,
    heads: int,
    between: Callable[[], None] | None = None,
) -> Tensor:
    """The output of the layers for rows ``[T, D]`` (fp32), on one thread; their values and rotated keys are written to
    the pages. ``between`` is called at the start of each layer."""
    x, cos, sin = x_TD.clone().numpy(), cos_T1W[:, 0].numpy(), sin_T1W[:, 0].numpy()
    count, size, first = len(x), stored.keys[0].shape[3], layers[0]
    h, made, both = (np.empty((count, n), np.float32) for n in (x.shape[1], first.qkv.columns, first.gate_up.columns))
    gated = np.empty((count, first.gate_up.columns // 2), np.float32)
    q, attended = (np.empty((count, heads, size), np.float32) for _ in range(2))
    flat = attended.reshape(count, -1)
    for layer, keys, values in zip(layers, stored.keys, stored.values, strict=True):
        if between is not None:
            between()
        k, v = keys.numpy(), values.numpy()
        w, eps = layer.qkv, np.float32(layer.eps)
        _before(x, layer.attn_norm_D, eps, w.blocks_BKC, w.part, w.bias_N, cos, sin, k, v, stored.slots_T, h, made, q)
        attend_in_place(q, k, v, stored.rows, attended)
        o, up, down = layer.out, layer.gate_up, layer.down
        _after(
            x,
            flat,
            o.blocks_BKC,
            o.part,
            o.bias_N,
            layer.mlp_norm_D,
            eps,
            up.blocks_BKC,
            up.part,
            up.bias_N,
            down.blocks_BKC,
            down.part,
            down.bias_N,
            h,
            both,
            gated,
        )
    return torch.from_numpy(x)
