"""compressed-tensors, as llm-compressor writes it: packed integers, integers of 8 bits, and fp8.

``weight_packed`` int32 ``[out, ceil(in * bits / 32)]``, low bits first, of integers with an offset that makes them
non-negative, with ``weight_shape``, ``weight_scale [out, groups]`` and, if asymmetric, ``weight_zero_point`` packed
along the output; ``weight_g_idx [in]`` if groups are in another order (-1 in it: the order was never set, so it is the
plain one). Or ``weight`` (int8 or fp8) with ``weight_scale``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from mmserve.models.formats.base import WORD, Files, Made, Read, check, refuse, served, stems, unpacked, wrong
from mmserve.models.formats.fp8 import UNUSED
from mmserve.models.formats.scaled import FLOATS, scaled

_FORMATS = ("dense", "pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "mixed-precision")
_BITS = (2, 4, 8)


def find(settings: Mapping[str, Any], files: Files) -> Read:
    """See ``read_quantised``."""
    form = settings.get("format")
    groups = list((settings.get("config_groups") or {}).values())
    for each in (form, *(group.get("format") for group in groups)):
        if each is not None and each not in _FORMATS:
            refuse(files, "format", each, ", ".join(map(repr, _FORMATS)))
    sparse = (settings.get("sparsity_config") or {}).get("format")
    if sparse not in (None, "dense"):
        refuse(files, "sparsity_config.format", sparse, "'dense'")
    if settings.get("transform_config"):
        refuse(files, "transform_config", "…", "absent: transforms run beside the weights")
    made = {f"{stem}.weight": _packed(stem, files) for stem in stems(files, ".weight_packed")}
    block = next((size for g in groups if (size := (g.get("weights") or {}).get("block_structure"))), None)
    for stem in stems(files, ".weight_scale"):
        weight, zero = f"{stem}.weight", f"{stem}.weight_zero_point"
        if weight in files.stored_names and files.header(weight).dtype in (torch.int8, *FLOATS):
            own = block or _group(files, weight, f"{stem}.weight_scale")
            made[weight] = scaled(
                files, weight, f"{stem}.weight_scale", own, zero if zero in files.stored_names else ""
            )
    return Read(f"compressed-tensors, {form}", made, (*UNUSED, "*.input_zero_point", "*.output_zero_point"))


def _group(files: Files, weight: str, scale: str) -> tuple[int, int] | None:
    """One scale for each group of inputs, if the scales have that number of columns."""
    width, scales = files.header(weight).shape[-1], files.header(scale).shape
    groups = scales[-1] if len(scales) == 2 else 1
    return None if width % groups else (1, width // groups)


def _packed(stem: str, files: Files) -> Made:
    words, scales = files.header(f"{stem}.weight_packed"), files.header(f"{stem}.weight_scale")
    if words.dtype != torch.int32 or words.ndim != 2:
        wrong(files, f"{stem}.weight_packed", f"is {words.dtype} of {words.ndim} dimensions, expected int32 of 2")
    out, width = files.stored(check(files, f"{stem}.weight_shape", (2,))).tolist()
    bits = next((bits for bits in _BITS if words.shape == (out, -(-width * bits // WORD))), None)
    if bits is None:
        wrong(files, f"{stem}.weight_packed", f"of shape {list(words.shape)} is not of {[out, width]} and {_BITS} bits")
    groups = scales.shape[-1] if scales.ndim == 2 else 1
    if width % groups or scales.numel() not in (1, out * groups):
        wrong(files, f"{stem}.weight_scale", f"of shape {list(scales.shape)} is no scale of {[out, width]}")
    parts = {"words": f"{stem}.weight_packed", "scales": f"{stem}.weight_scale", "shape": f"{stem}.weight_shape"}
    if f"{stem}.weight_zero_point" in files.stored_names:
        zero = files.header(f"{stem}.weight_zero_point")
        rows = -(-out * bits // WORD) if zero.dtype == torch.int32 else out
        parts["zeros"] = check(files, f"{stem}.weight_zero_point", (rows, groups))
    if f"{stem}.weight_g_idx" in files.stored_names:
        parts["order"] = check(files, f"{stem}.weight_g_idx", (width,))
    lowest = 1 << (bits - 1)

    def make(*stored: Tensor) -> Tensor:
        given = dict(zip(parts, stored, strict=True))
        group = torch.arange(width) // (width // groups)
        if "order" in given and -1 not in given["order"]:
            group = given["order"].long()
            if int(group.min()) < 0 or int(group.max()) >= groups:
                wrong(files, f"{stem}.weight_g_idx", f"must be from 0 to {groups - 1}")
        codes = unpacked(given["words"], bits, width).float().sub_(lowest)
        if "zeros" in given:
            zeros = given["zeros"]
            if zeros.dtype == torch.int32:
                zeros = unpacked(zeros.T, bits, out).T.float() - lowest
            codes.sub_(zeros.float()[:, group])
        return codes.mul_(given["scales"].float().reshape(-1, groups)[:, group])

    return Made((out, width), served(scales.dtype), tuple(parts.values()), make)
