"""Quantised checkpoints, by ``quantization_config``: which weights are dequantised from which stored tensors.

Readers derive what is quantised from the tensors' names and shapes, not from lists of modules in the configuration: so
every family is read in the same way, with the names of its unquantised checkpoints.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mmserve.errors import ConfigError
from mmserve.models.formats import awq, bitsandbytes, compressed_tensors, fp8, gptq
from mmserve.models.formats.base import Files, Made, Read

#: Readers by ``quant_method``.
READERS = {
    "awq": awq.find,
    "bitsandbytes": bitsandbytes.find,
    "compressed-tensors": compressed_tensors.find,
    "fbgemm_fp8": fp8.find,
    "fp8": fp8.find,
    "gptq": gptq.find,
}

__all__ = ["READERS", "Made", "Read", "read_quantised"]


def read_quantised(config: Mapping[str, Any], files: Files) -> Read | None:
    """The dequantised tensors of a checkpoint, by its ``config.json``; None if it has no quantisation.

    Raises ``ConfigError`` for an unsupported method or variant, and for malformed tensors.
    """
    found = [
        section[key]
        for section in (config, config.get("text_config"))
        if isinstance(section, Mapping)
        for key in ("quantization_config", "compression_config")
        if section.get(key)
    ]
    if not found:
        return None
    settings = found[0]
    if not isinstance(settings, Mapping):
        raise ConfigError(f"{files.source}: quantization_config must be an object, not {settings!r}")
    method = settings.get("quant_method")
    if method is None and any(settings.get(key) for key in ("load_in_4bit", "load_in_8bit")):
        method = "bitsandbytes"  # its first checkpoints do not name it
    if method not in READERS:
        raise ConfigError(
            f"{files.source}: quantization_config has quant_method {method!r}, which is not read; read are "
            f"{', '.join(READERS)}, and plain checkpoints"
        )
    return READERS[method](settings, files)
