"""The PyTorch reference of ``kv_quant``.

Keys have channels that are large in every token, so KIVI (arXiv 2402.02750) uses a range for each channel of keys, and
for each token of values. Shapes in names as in ``pages``.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from mmserve_kernels.kv_quant.pages import LEVELS, QuantizedPages, checked


def kv_quant(x_PSGK: Tensor, filled_P: Tensor, *, kind: str, per: str) -> QuantizedPages:
    """Pages in 8 or 4 bits: ``kind`` is ``int8``, ``int4`` or ``fp8``, with one range ``per`` ``channel`` or ``token``.

    Only the first ``filled_P`` (int64) positions of each page are read. int8 and int4 span from the minimum to the
    maximum, with an error of at most half a step; fp8 spans to the absolute maximum. Raises ``ValueError`` for another
    kind or ``per``, and for int4 with an odd head size.
    """
    checked(kind, per, x_PSGK.shape[-1])
    over = (1,) if per == "channel" else (3,)
    filled = (torch.arange(x_PSGK.shape[1], device=x_PSGK.device) < filled_P[:, None])[..., None, None]
    x = torch.where(filled, x_PSGK.float(), 0.0)
    # A tensor: a GPU multiplies by the approximate inverse of a Python number instead of dividing.
    levels = torch.full((), float(LEVELS[kind]), device=x.device)
    if kind == "fp8":
        scale = x.abs().amax(over, keepdim=True) / levels
        codes = (x / _divisor(scale)).clamp(-LEVELS[kind], LEVELS[kind]).to(torch.float8_e4m3fn).view(torch.uint8)
        return QuantizedPages(kind, codes, scale, None)
    lowest = torch.where(filled, x, torch.inf).amin(over, keepdim=True)
    highest = torch.where(filled, x, -torch.inf).amax(over, keepdim=True)
    low = torch.where(lowest > highest, 0.0, lowest)
    scale = torch.where(lowest > highest, 0.0, highest - lowest) / levels
    codes = torch.floor((x - low) / _divisor(scale) + 0.5).clamp(0, LEVELS[kind])
    codes = torch.where(filled, codes, 0.0).to(torch.uint8)
    if kind == "int4":
        codes = codes[..., 0::2] | codes[..., 1::2] << 4
    return QuantizedPages(kind, codes, scale, low)


def _divisor(scale: Tensor) -> Tensor:
    return torch.where(scale == 0, 1.0, scale)


def dequantize(pages: QuantizedPages) -> Tensor:
    """The values that ``pages`` encode, fp32 ``[P, S, G, K]``."""
    if pages.kind == "fp8":
        x = pages.codes.view(torch.float8_e4m3fn).float()
    elif pages.kind == "int4":
        x = torch.stack([pages.codes & 15, pages.codes >> 4], dim=-1).flatten(-2).float()
    else:
        x = pages.codes.float()
    x *= pages.scale  # in place: on a CPU allocating another tensor costs more than the product
    if pages.low is not None:
        x += pages.low
    if pages.kept is None or pages.kept_at is None or not len(pages.kept):
        return x
    at = pages.kept_at.long()[..., None, None]
    kept = pages.kept.index_select(0, at.flatten().clamp(min=0)).view(x.shape)
    return torch.where(at >= 0, kept.float(), x)


def keep(pages: QuantizedPages, x_PSGK: Tensor, slots: Tensor) -> QuantizedPages:
    """``pages`` with the tokens at ``slots`` (int64 ``[N]``, page × S + offset) of ``x_PSGK`` stored at full
    precision."""
    kept_at = torch.full(x_PSGK.shape[:2], -1, dtype=torch.int32, device=x_PSGK.device)
    kept_at.view(-1)[slots] = torch.arange(len(slots), dtype=torch.int32, device=x_PSGK.device)
    return replace(pages, kept=x_PSGK.flatten(0, 1)[slots], kept_at=kept_at)
