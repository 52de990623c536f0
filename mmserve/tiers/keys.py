"""Cache keys: full SHA-256 digests of all inputs of a value.

Inputs are the bytes of media, the weights of models, the values of settings, and the versions of libraries, as a cache
on disk may have been written with older ones.
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

#: Libraries whose version affects pixels or features.
_LIBRARIES = ("mmserve", "torch", "transformers", "pillow", "numpy", "av")


def digest(*parts: bytes) -> bytes:
    """SHA-256 of ``parts``, each prefixed with its length, so that different sequences have different inputs."""
    made = sha256()
    for part in parts:
        made.update(len(part).to_bytes(8, "little"))
        made.update(part)
    return made.digest()


def settings_digest(settings: Mapping[str, Any]) -> bytes:
    """Digest of nested plain values."""
    return digest(json.dumps(settings, sort_keys=True, default=str).encode())


def weights_digest(module: nn.Module) -> bytes:
    """Digest of a module's parameters and buffers: names, dtypes, shapes, contents."""
    parts: list[bytes] = []
    for name, tensor in sorted(module.state_dict().items()):
        raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8).cpu().numpy()
        parts += [f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode(), sha256(raw.data).digest()]
    return digest(*parts)


@cache
def software() -> bytes:
    """Names and versions of the libraries that affect values."""
    return " ".join(f"{name} {version(name)}" for name in _LIBRARIES).encode()


def media_digest(kind: str, data: bytes, limits: MediaConfig, cache: str = "") -> bytes:
    """Digest of a file, of the ``limits`` it is decoded within (other limits may reject it), and of the namespace
    ``cache``."""
    bounds = (
        limits.max_item_bytes,
        limits.max_pixels,
        limits.max_side,
        limits.max_video_seconds,
        limits.max_video_pixels,
        limits.max_sampled_pixels,
    )
    return digest(kind.encode(), repr(bounds).encode(), data, *([cache.encode()] if cache else []))
