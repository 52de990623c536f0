"""bitsandbytes: nf4 and fp4 of QLoRA (arXiv 2305.14314) with plain or quantised scales, and LLM.int8() (2208.07339).

4 bits: ``weight`` uint8 ``[n / 2, 1]`` has two numbers per byte, the first in the high bits, each an index into
``weight.quant_map``; ``weight.absmax`` has the scale of each block. If the scales are quantised themselves, they are
bytes, indices into ``nested_quant_map``, with scales ``nested_absmax`` and a mean. Other data are JSON in a tensor of
bytes, ``weight.quant_state.bitsandbytes__nf4``. 8 bits: ``SCB`` has each row's largest magnitude, which corresponds to
127.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from mmserve.models.formats.base import Files, Made, Read, check, served, stems, wrong

_KINDS = ("nf4", "fp4")
_STATE = ".quant_state.bitsandbytes__"
_MOST = 127


def find(settings: Mapping[str, Any], files: Files) -> Read:
    """See ``read_quantised``."""
    made = {name: _four(name, files, kind) for kind in _KINDS for name in stems(files, _STATE + kind)}
    eight = {f"{stem}.weight": _eight(stem, files) for stem in stems(files, ".SCB")}
    kinds = sorted({kind for kind in _KINDS for _ in stems(files, _STATE + kind)})
    form = f"{'/'.join(kinds)}" if kinds else "8 bits"
    return Read(f"bitsandbytes, {form}", made | eight, ("*.weight_format",))


def _four(name: str, files: Files, kind: str) -> Made:
    state = name + _STATE + kind
    try:
        values = json.loads(files.stored(state).numpy().tobytes())
        shape, block = tuple(map(int, values["shape"])), int(values["blocksize"])
        nested, offset = int(values.get("nested_blocksize") or 0), float(values.get("nested_offset") or 0.0)
    except (ValueError, KeyError, TypeError) as error:
        wrong(files, state, f"is no state of bitsandbytes: {error!r}")
    count = torch.Size(shape).numel()
    blocks = -(-count // block)
    check(files, name, (-(-count // 2), 1))
    parts = {
        "codes": name,
        "map": check(files, f"{name}.quant_map", (16,)),
        "scales": check(files, f"{name}.absmax", (blocks,)),
        "state": state,
    }
    if nested:
        parts["nested_map"] = check(files, f"{name}.nested_quant_map", (256,))
        parts["nested_scales"] = check(files, f"{name}.nested_absmax", (-(-blocks // nested),))

    def make(*stored: Tensor) -> Tensor:
        given = dict(zip(parts, stored, strict=True))
        scales = given["scales"]
        if nested:
            own = given["nested_scales"].float().repeat_interleave(nested)[:blocks]
            scales = given["nested_map"].float()[scales.int()] * own + offset
        codes = given["codes"].view(torch.uint8).flatten()
        numbers = given["map"].float()[torch.stack((codes >> 4, codes & 15), 1).int()].flatten()[:count]
        return (numbers * scales.float().repeat_interleave(block)[:count]).view(shape)

    dtype = getattr(torch, str(values.get("dtype")), torch.float32)
    return Made(shape, served(dtype), tuple(parts.values()), make)


def _eight(stem: str, files: Files) -> Made:
    weight = files.header(f"{stem}.weight")
    shape = tuple(weight.shape)
    if weight.dtype != torch.int8 or weight.ndim != 2:
        wrong(files, f"{stem}.weight", f"is {weight.dtype} of {weight.ndim} dimensions, expected int8 of 2")
    form = f"{stem}.weight_format"
    if form in files.stored_names and int(files.stored(form)):
        wrong(files, form, "must be 0: weights in rows")
    scales = check(files, f"{stem}.SCB", shape[:1])

    def make(codes: Tensor, most: Tensor) -> Tensor:
        return codes.float() * (most.float() / _MOST)[:, None]

    return Made(shape, torch.float16, (f"{stem}.weight", scales), make)
