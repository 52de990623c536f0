"""Checkpoints of quantised weights: which tensors are made of several stored ones, by ``quantization_config``.

A reader derives from the tensors' names and shapes what is quantised, not by lists of modules in the configuration: so
every family is read alike, under the names that its plain checkpoints have.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mmserve.errors import ConfigError
from mmserve.models.formats import awq, bitsandbytes, compressed_tensors, fp8, gptq
from mmserve.models.formats.base import Files, Made, Read

#: ``quant_method`` to what finds its weights.
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
    """What is made of a checkpoint's tensors by its ``config.json``; None where no quantisation is named there.

    Raises ``ConfigError`` for a method or a variant of one that is not read, and for tensors that are none of it.
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
