"""GPTQ (arXiv 2210.17323) as AutoGPTQ and GPTQModel write it: integers packed along the input, low bits first.

``qweight`` int32 ``[in * bits / 32, out]``, ``qzeros`` int32 ``[groups, out * bits / 32]``, ``scales [groups, out]``,
and ``g_idx [in]``, the group of each input (in any order: ``desc_act``). The first checkpoint format stores zero points
minus 1, ``gptq_v2`` stores them unchanged. Symmetric weights also have zero points.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from mmserve.models.formats.base import WORD, Files, Made, Read, check, refuse, served, stems, unpacked, wrong

_FORMATS = {None: 1, "gptq": 1, "gptq_v2": 0}  # offset of stored zero points
_BITS = (2, 3, 4, 8)


def find(settings: Mapping[str, Any], files: Files) -> Read:
    """See ``read_quantised``."""
    kind = settings.get("checkpoint_format")
    if kind not in _FORMATS:
        refuse(files, "checkpoint_format", kind, "'gptq' or 'gptq_v2'")
    if settings.get("is_marlin_format"):
        refuse(files, "is_marlin_format", True, "false")
    made = {f"{stem}.weight": _made(stem, files, _FORMATS[kind]) for stem in stems(files, ".qweight")}
    return Read(f"gptq, {settings.get('bits')} bits", made)


def _made(stem: str, files: Files, added: int) -> Made:
    scales = files.header(f"{stem}.scales")
    if scales.ndim != 2:
        wrong(files, f"{stem}.scales", f"must have two dimensions, not {scales.ndim}")
    groups, out = scales.shape
    words, zeros = files.header(f"{stem}.qweight"), files.header(f"{stem}.qzeros")
    bits = zeros.shape[-1] * WORD // out  # a layer may have another number of bits than the configuration
    if bits not in _BITS or zeros.shape != (groups, out * bits // WORD):
        wrong(files, f"{stem}.qzeros", f"of shape {list(zeros.shape)} is not of {groups} groups and {out} outputs")
    width = words.shape[0] * WORD // bits
    check(files, f"{stem}.qweight", (width * bits // WORD, out))
    parts = [f"{stem}.qweight", f"{stem}.qzeros", f"{stem}.scales"]
    if f"{stem}.g_idx" in files.stored_names:
        parts.append(check(files, f"{stem}.g_idx", (width,)))
    elif width % groups:
        wrong(files, f"{stem}.scales", f"has {groups} groups, which do not divide {width} inputs")

    def make(words: Tensor, zeros: Tensor, scales: Tensor, order: Tensor | None = None) -> Tensor:
        group = torch.arange(width) // (width // groups) if order is None else order.long()
        if int(group.min()) < 0 or int(group.max()) >= groups:
            wrong(files, f"{stem}.g_idx", f"must be from 0 to {groups - 1}")
        middle = (unpacked(zeros, bits, out).int() + added) & ((1 << bits) - 1)
        codes = unpacked(words.T, bits, width).float()
        return codes.sub_(middle.T.float()[:, group]).mul_(scales.T.float()[:, group])

    return Made((out, width), served(scales.dtype), tuple(parts), make)
