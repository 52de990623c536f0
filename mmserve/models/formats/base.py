"""Common parts of readers of quantised checkpoints: dequantised tensors, and integers packed into words."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor

from mmserve.errors import ConfigError

#: Bits of a word that integers are packed into.
WORD = 32


class Files(Protocol):
    """The tensors of a checkpoint as stored."""

    @property
    def source(self) -> Path: ...
    @property
    def stored_names(self) -> Iterable[str]: ...
    def header(self, name: str) -> Tensor:
        """The tensor on "meta": its shape and dtype."""
        ...

    def stored(self, name: str) -> Tensor:
        """The tensor as stored."""
        ...


@dataclass(frozen=True)
class Made:
    """A dequantised tensor: its ``shape`` and ``dtype``, the names of its stored tensors, and the function (fp32)."""

    shape: tuple[int, ...]
    dtype: torch.dtype  # that of its scales, if weights can be served in it
    parts: tuple[str, ...]
    make: Callable[..., Tensor]


@dataclass(frozen=True)
class Read:
    """A quantised checkpoint: a short description of its ``form``, dequantised tensors by name, and patterns of stored
    tensors that are not needed."""

    form: str
    made: Mapping[str, Made]
    unused: tuple[str, ...] = ()


def stems(files: Files, suffix: str) -> list[str]:
    """Names of stored tensors that end in ``suffix``, without it."""
    return [name.removesuffix(suffix) for name in files.stored_names if name.endswith(suffix)]


def unpacked(words: Tensor, bits: int, count: int) -> Tensor:
    """Unsigned integers of ``bits`` bits (uint8 ``[..., count]``) from int32 ``[..., W]``, lowest bits first.

    Packed without gaps: if ``bits`` does not divide a word, integers span words.
    """
    mask = (1 << bits) - 1
    if WORD % bits == 0:
        shifts = torch.arange(0, WORD, bits, dtype=torch.int32)
        return ((words[..., None] >> shifts) & mask).to(torch.uint8).flatten(-2)[..., :count]
    begins = torch.arange(count) * bits
    word, shift = begins // WORD, begins % WORD
    wide = words.long() & 0xFFFFFFFF
    after = wide[..., (word + 1).clamp_max(words.shape[-1] - 1)]
    return (((wide[..., word] >> shift) | (after << (WORD - shift))) & mask).to(torch.uint8)


def wrong(files: Files, name: str, why: str) -> NoReturn:
    """Raises ``ConfigError`` about a stored tensor."""
    raise ConfigError(f"{files.source}: tensor {name} {why}")


def refuse(files: Files, key: str, value: Any, accepted: str) -> NoReturn:
    """Raises ``ConfigError`` about a key of ``quantization_config``."""
    raise ConfigError(
        f"{files.source}: quantization_config has {key} = {value!r}, which is not read; it can be {accepted}"
    )


def check(files: Files, name: str, shape: tuple[int, ...]) -> str:
    """``name``, if that stored tensor has ``shape``; raises ``ConfigError`` if it is missing, or has another shape."""
    if name not in files.stored_names:
        raise ConfigError(f"{files.source} has no tensor {name}")
    found = tuple(files.header(name).shape)
    if found != shape:
        wrong(files, name, f"has shape {list(found)}, expected {list(shape)}")
    return name


def served(dtype: torch.dtype) -> torch.dtype:
    """``dtype`` of scales if weights can be served in it, else fp32."""
    return dtype if dtype in (torch.float16, torch.bfloat16) else torch.float32
