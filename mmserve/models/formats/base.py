"""What readers of quantised checkpoints share: tensors that are made of stored ones, and integers packed into words."""

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
    """The tensors of a checkpoint as they are stored."""

    @property
    def source(self) -> Path: ...
    @property
    def stored_names(self) -> Iterable[str]: ...
    def header(self, name: str) -> Tensor:
        """The tensor on "meta": its shape and dtype."""
        ...

    def stored(self, name: str) -> Tensor:
        """The tensor as it is stored."""
        ...


@dataclass(frozen=True)
class Made:
    """A tensor that is made of stored ones: its ``shape`` and ``dtype``, their names, and how it is made (fp32)."""

    shape: tuple[int, ...]
    dtype: torch.dtype  # that of its scales, if it is one that weights are served in
    parts: tuple[str, ...]
    make: Callable[..., Tensor]


@dataclass(frozen=True)
class Read:
    """A quantised checkpoint: its ``form`` in a few words, what is made, by name, and patterns of stored tensors that
    weights do not need."""

    form: str
    made: Mapping[str, Made]
    unused: tuple[str, ...] = ()


def stems(files: Files, suffix: str) -> list[str]:
    """Names of stored tensors that end in ``suffix``, without it."""
    return [name.removesuffix(suffix) for name in files.stored_names if name.endswith(suffix)]


def unpacked(words: Tensor, bits: int, count: int) -> Tensor:
    """Unsigned integers of ``bits`` (uint8 ``[..., count]``) from int32 ``[..., W]``, the lowest bits first.

    Without gaps: where ``bits`` does not divide a word, integers cross from one to the next.
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
    """Raise ``ConfigError`` about a stored tensor."""
    raise ConfigError(f"{files.source}: tensor {name} {why}")


def refuse(files: Files, key: str, value: Any, accepted: str) -> NoReturn:
    """Raise ``ConfigError`` about a key of ``quantization_config``."""
    raise ConfigError(
        f"{files.source}: quantization_config has {key} = {value!r}, which is not read; it can be {accepted}"
    )


def check(files: Files, name: str, shape: tuple[int, ...]) -> str:
    """``name``, of a stored tensor of ``shape``; raises ``ConfigError`` where there is none, or it has another."""
    if name not in files.stored_names:
        raise ConfigError(f"{files.source} has no tensor {name}")
    found = tuple(files.header(name).shape)
    if found != shape:
        wrong(files, name, f"has shape {list(found)}, expected {list(shape)}")
    return name


def served(dtype: torch.dtype) -> torch.dtype:
    """``dtype`` of scales, where weights can be served in it, else fp32."""
    return dtype if dtype in (torch.float16, torch.bfloat16) else torch.float32
