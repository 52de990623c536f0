"""Checks, before anything is allocated, whether a device has enough memory for the K/V of its models."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mmserve.config import EngineConfig
from mmserve.errors import ConfigError
from mmserve.models.decoder_config import DecoderConfig

_GIB = 1 << 30
#: Bytes for the range and minimum of a token's quantised key or value, and for the index of an unquantised token.
_RANGE, _INDEX = 2 * 4, 4


def pool_bytes(decoder: DecoderConfig, engine: EngineConfig, dtype: torch.dtype) -> int:
    """Bytes of the store that ``engine`` (resolved) creates for a model with ``decoder``, including the scratch
    page."""
    heads, size, slots = decoder.num_kv_heads, decoder.head_dim, (engine.pages + 1) * engine.page_size
    if not engine.kv_bits:
        return 2 * decoder.num_layers * slots * heads * size * dtype.itemsize
    salient = round(engine.kv_kept * engine.page_size)
    slots = engine.pages * engine.page_size
    quantized = 2 * slots * heads * (size * engine.kv_bits // 8 + _RANGE)
    unquantized = 2 * engine.pages * salient * heads * size * dtype.itemsize + (slots * _INDEX if salient else 0)
    return decoder.num_layers * (quantized + unquantized)


def free_bytes(device: torch.device) -> int:
    """Free bytes of a GPU, including those that PyTorch caches unused."""
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(torch.cuda.mem_get_info(device)[0] + unused)


def check_capacity(pools: Sequence[int], cache_bytes: int, free: int, device: torch.device) -> None:
    """Raises ``ConfigError`` unless ``free`` bytes are enough for the ``pools`` and image caches of ``cache_bytes``.

    Image caches are filled only by requests: without this check, memory could run out during a request.
    """
    pool = sum(pools)
    if pool + cache_bytes <= free:
        return
    reserved = f", and [encoder_cache] kv_bytes reserves {cache_bytes / _GIB:.2f} GiB" if cache_bytes else ""
    lower = "max_running, max_tokens or pages" + (", or kv_bytes" if cache_bytes else "")
    raise ConfigError(
        f"[engine] the K/V pages take {pool / _GIB:.2f} GiB{reserved}, but {free / _GIB:.2f} GiB are free on {device}: "
        f"lower {lower}"
    )
