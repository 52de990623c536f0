"""Keys and values of a row of tokens that a decoder reads by itself: without pages, with nobody beside it.

The same row always has the same bits. Shapes in names: L positions, D hidden, N layers, G key/value heads, K head size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch.nn.functional as F
from mmserve_kernels.rope_scatter import rotate
from torch import Tensor

from mmserve.models.decoder import Decoder, DecoderLayer, DeepRows


def kv_alone(
    decoder: Decoder,
    x_LD: Tensor,
    positions: Tensor,
    *,
    causal: bool,
    layers: int,
    deep: DeepRows | None = None,
    onlook: Callable[[DecoderLayer, Tensor], None] | None = None,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Keys, not yet rotated, and values ``[L, G, K]`` of each of the first ``layers`` layers.

    ``causal``: no position looks at what stands right of it; otherwise each looks at all of the row. A layer is run
    when its own are asked for: who has other things to do stops between two.
    ``x_LD``: the embedded row; ``positions``: int64 ``[L]``, or ``[axes, L]``; ``deep``: what its visual tokens add
    behind the first layers; ``onlook`` is shown the last of the layers and its input.
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
    if onlook is not None:
        onlook(last, x_LD)
    yield last.keys_and_values(x_LD)


def attention_alone(q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, *, causal: bool) -> Tensor:
    """Attention ``[L, H, K]`` of a row ``[L, heads, K]`` to itself; ``causal``: no position looks right."""
    q, k, v = (x.transpose(0, 1)[None] for x in (rotate(q, cos, sin), rotate(k, cos, sin), v))
    seen = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1])
    return seen[0].transpose(0, 1)
