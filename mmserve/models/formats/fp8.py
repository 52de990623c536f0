"""fp8 as DeepSeek-V3 (arXiv 2412.19437) and transformers' ``FineGrainedFP8Config`` write it, with or without blocks,
and as vLLM's and FBGEMM's quantisers do: ``weight`` beside ``weight_scale_inv`` or ``weight_scale``.

Both are multiplied with, despite the names. Scales of activations are not needed for dequantised weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mmserve.models.formats.base import Files, Read
from mmserve.models.formats.scaled import FLOATS, scaled

_SCALES = ("_scale_inv", "_scale")
#: Scales of activations and of K/V.
UNUSED = ("*.input_scale", "*.activation_scale", "*.output_scale", "*.input_scale_ub", "*.k_scale", "*.v_scale")


def find(settings: Mapping[str, Any], files: Files) -> Read:
    """See ``read_quantised``."""
    block = settings.get("weight_block_size")
    made = {
        stem: scaled(files, stem, stem + suffix, block)
        for suffix in _SCALES
        for stem in files.stored_names
        if stem + suffix in files.stored_names and files.header(stem).dtype in FLOATS
    }
    kind = f"blocks of {' × '.join(map(str, block))}" if block else "one scale a tensor or channel"
    return Read(f"{settings['quant_method']}, {kind}", made, UNUSED)
