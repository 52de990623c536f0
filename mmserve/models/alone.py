"""Runs a single sequence through a decoder without pages or a batch: keys and values, hidden states.

Results are bit-identical for the same sequence. Shapes in names: L positions, D hidden, N layers, G key/value heads, K
head size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from mmserve_kernels.rope_scatter import rotate
from torch import Tensor

from mmserve.models.decoder import Decoder, DecoderLayer, DeepRows, dense_attention


def kv_alone(
    decoder: Decoder,
    x_LD: Tensor,
    positions: Tensor,
    *,
    causal: bool,
    layers: int,
    deep: DeepRows | None = None,
    observe: Callable[[DecoderLayer, Tensor], None] | None = None,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields keys, before rotation, and values ``[L, G, K]`` of each of the first ``layers`` layers.

    ``causal``: causal attention; otherwise full attention over the sequence. A layer is run when its K/V are requested,
    so that callers can do other work between layers. ``x_LD``: the embedded sequence; ``positions``: int64 ``[L]``, or
    ``[axes, L]``; ``deep``: visual features added after the first layers; ``observe`` receives the last of the layers
    and its input.
    """
    cos, sin = decoder.rotary(positions)
    made: list[tuple[Tensor, Tensor]] = []

    def attend(_layer: int, q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        made.append((k, v))
        return attention_alone(q, k, v, cos, sin, causal=causal)

    for index in range(layers - 1):
        x_LD = decoder.layers[index](x_LD, cos, sin, index, attend)
        if deep is not None and index < len(deep.features_LnD):
            x_LD = x_LD.index_add(0, deep.rows, deep.features_LnD[index])
        yield made.pop()
    last = decoder.layers[layers - 1]
    assert isinstance(last, DecoderLayer)
    if observe is not None:
        observe(last, x_LD)
    yield last.keys_and_values(x_LD)


def attention_alone(q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, *, causal: bool) -> Tensor:
    """Self-attention ``[L, H, K]`` of a sequence ``[L, heads, K]``; ``causal``: with a causal mask."""
    q, k, v = (x.transpose(0, 1)[None] for x in (rotate(q, cos, sin), rotate(k, cos, sin), v))
    seen = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1])
    return seen[0].transpose(0, 1)


def hidden_alone(decoder: Decoder, x_TD: Tensor, positions_T: Tensor, sees_TT: Tensor, wanted_n: Tensor) -> Tensor:
    """Final hidden states ``[n, D]`` of the ``wanted_n`` rows (int64), with the bool attention mask ``sees_TT``.

    In the last layer only these rows attend: of the others, only keys and values are needed.
    """
    mask_TT = torch.where(sees_TT, 0.0, -torch.inf).to(x_TD.dtype)
    cos, sin = decoder.rotary(positions_T)
    attend, x_1TD = dense_attention(mask_TT[None, None]), x_TD[None]
    for index in range(len(decoder.layers) - 1):
        x_1TD = decoder.layers[index](x_1TD, cos, sin, index, attend)
    last, x_TD = decoder.layers[-1], x_1TD[0]
    assert isinstance(last, DecoderLayer)
    q, k, v = last.heads(x_TD)
    q, k = rotate(q[wanted_n], cos[wanted_n], sin[wanted_n]), rotate(k, cos, sin)
    q, k, v = (each.transpose(0, 1)[None] for each in (q, k, v))
    grouped = q.shape[1] != k.shape[1]
    seen = F.scaled_dot_product_attention(q, k, v, attn_mask=mask_TT[wanted_n][None, None], enable_gqa=grouped)
    return decoder.norm(last.after_attention(x_TD[wanted_n], seen[0].transpose(0, 1)))
