"""Keys of caches: SHA-256, never shortened, of everything that a value depends on.

Media go in by their bytes, models by their weights, settings by their values, and so do the libraries' versions: a
cache on disk may be older than they are.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from hashlib import sha256
from importlib.metadata import version
from typing import Any

import torch
from torch import nn

from mmserve.config import MediaConfig

#: Libraries that change pixels or features.
_LIBRARIES = ("mmserve", "torch", "transformers", "pillow", "numpy", "av")


def digest(*parts: bytes) -> bytes:
    """SHA-256 of ``parts``, each with its length: no two different rows of parts are the same to it."""
    made = sha256()
    for part in parts:
        made.update(len(part).to_bytes(8, "little"))
        made.update(part)
    return made.digest()


def settings_digest(settings: Mapping[str, Any]) -> bytes:
    """Of nested plain values."""
    return digest(json.dumps(settings, sort_keys=True, default=str).encode())


def weights_digest(module: nn.Module) -> bytes:
    """Of a module's parameters and buffers: names, types, shapes, contents."""
    parts: list[bytes] = []
    for name, tensor in sorted(module.state_dict().items()):
        raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8).cpu().numpy()
        parts += [f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode(), sha256(raw.data).digest()]
    return digest(*parts)


@cache
def software() -> bytes:
    """Names and versions of the libraries that values come from."""
    return " ".join(f"{name} {version(name)}" for name in _LIBRARIES).encode()


def media_digest(kind: str, data: bytes, limits: MediaConfig, cache: str = "") -> bytes:
    """Of a file as it is decoded within ``limits``, which another server's may refuse, for the tenants of ``cache``."""
    bounds = (
        limits.max_item_bytes,
        limits.max_pixels,
        limits.max_side,
        limits.max_video_seconds,
        limits.max_video_pixels,
        limits.max_sampled_pixels,
    )
    return digest(kind.encode(), repr(bounds).encode(), data, *([cache.encode()] if cache else []))
