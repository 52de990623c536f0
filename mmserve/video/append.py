"""The pass over new rows of streams: each attends to the kept rows of its stream, and among the new rows to those that
its model's attention allows: to its left, or up to the end of its block.

Rows of several frames and streams share matrix products, but attend frame by frame, so that no bit of a row depends on
other rows in the pass. Shapes in names: R rows, T total rows, D hidden, G key/value heads, K head size, L visible
rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from mmserve_kernels.rope_scatter import rotate
from torch import Tensor

from mmserve.core.encoded import DeepStack
from mmserve.decode.logits import padded_rows
from mmserve.encode.embedding import deep_rows
from mmserve.models.base import LoadedModel
from mmserve.models.decoder import DecoderLayer
from mmserve.video.rows import Buffers


@dataclass(frozen=True)
class New:
    """Rows that are appended together, such as those of a frame, after the first ``start`` rows of ``buffers``."""

    buffers: Buffers
    start: int
    x_RD: Tensor
    places: np.ndarray  # int64 [R], or [axes, R]
    deep: DeepStack | None = None  # features added to rows in later layers

    @property
    def stop(self) -> int:
        """Number of rows of the stream after the pass."""
        return self.start + len(self.x_RD)


def _mask(rows: int, start: int, block: int, device: torch.device) -> Tensor:
    """Attention mask, bool ``[R, L]``, of ``rows`` rows after ``start`` others: each attends up to the end of its block
    of ``block`` positions, counted from the stream's first row."""
    at = torch.arange(start + rows, device=device)
    return at < ((at[start:, None] // block) + 1) * block


@torch.inference_mode()
def append(model: LoadedModel, batch: Sequence[New], floor: int) -> None:
    """Write the K/V of the rows of ``batch`` into their buffers, in order for each stream.

    ``floor``: see ``mmserve.decode.forward.row_floor``. Can be repeated after a failure.
    """
    if not batch:
        return
    ends = np.cumsum([len(new.x_RD) for new in batch]).tolist()
    own = [(slice(end - len(new.x_RD), end), new) for end, new in zip(ends, batch, strict=True)]
    short = padded_rows(ends[-1], floor) - ends[-1]
    x_TD = F.pad(torch.cat([new.x_RD for new in batch]), (0, 0, 0, short))
    places = torch.from_numpy(np.concatenate([new.places for new in batch], axis=-1)).to(model.device)
    deep = deep_rows((np.arange(len(new.x_RD)), new.deep) for new in batch)

    decoder, block = model.decoder, model.spec.attention_block or 1
    masks = [_mask(len(new.x_RD), new.start, block, model.device) for new in batch]
    cos, sin = decoder.rotary(F.pad(places, (0, short)))

    def write(layer: int, k: Tensor, v: Tensor) -> None:
        rotated = rotate(k, cos, sin)
        for rows, new in own:
            b = new.buffers
            assert b.keys is not None and b.values is not None and b.rotated is not None
            for buffer, fresh in ((b.keys, k), (b.values, v), (b.rotated, rotated)):
                buffer[layer, new.start : new.stop] = fresh[rows]

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        write(layer, k, v)
        q = rotate(q, cos, sin)
        out = torch.zeros_like(q)
        for (rows, new), mask in zip(own, masks, strict=True):
            keys, values = new.buffers.rotated, new.buffers.values
            assert keys is not None and values is not None
            out[rows] = _attention(q[rows], keys[layer, : new.stop], values[layer, : new.stop], mask)
        return out

    last = len(decoder.layers) - 1
    for index, layer in enumerate(decoder.layers):
        assert isinstance(layer, DecoderLayer)
        if index < last:
            x_TD = layer(x_TD, cos, sin, index, attend)
            if deep is not None and index < len(deep.features_LnD):
                x_TD = x_TD.index_add(0, deep.rows, deep.features_LnD[index])
        else:  # padding rows, whose output is unused
            write(index, *layer.keys_and_values(x_TD))


def _attention(q_RHK: Tensor, k_LGK: Tensor, v_LGK: Tensor, mask_RL: Tensor) -> Tensor:
    q, k, v = (x.transpose(0, 1)[None] for x in (q_RHK, k_LGK, v_LGK))
    grouped = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask_RL, enable_gqa=grouped)[0].transpose(0, 1)
