"""MAGVIT-v2's encoder (arXiv 2310.05737) in the layout of ``showlab/magvitv2``: images to codes of a codebook.

Convolutions, with a single attention layer at the coarsest grid. The last convolution gives each cell as many numbers
as a code has bits; a bit is set if its number is above zero (look-up free quantisation), so there is no codebook
tensor. The checkpoint's configuration has no sizes: they are derived from its tensors. Its decoder is not loaded.
Modules have the names of their tensors. Shapes in names: B images, C channels, H and W rows and columns of a grid.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mmserve.errors import ConfigError
from mmserve.models.checkpoint import Weights
from mmserve.models.unfilled import unfilled

PREFIX = "encoder."
_GROUPS = 32


@dataclass(frozen=True)
class MagvitConfig:
    """Sizes of the encoder; each level except for the last halves the grid."""

    stem: int  # channels of the first convolution
    widths: tuple[int, ...]  # channels of each level
    blocks: tuple[int, ...]  # residual blocks of each level
    bits: int  # number of bits of a code

    @property
    def stride(self) -> int:
        """Size of a cell in pixels, along a side."""
        return int(2 ** (len(self.widths) - 1))

    @classmethod
    def of(cls, weights: Weights) -> Self:
        """The sizes derived from ``weights``; raises ``ConfigError`` if they are not such an encoder."""
        if any(name.startswith(f"{PREFIX}down.") and ".attn." in name for name in weights.names):
            raise ConfigError(f"{weights.source}: attention between the levels of a MAGVIT-v2 encoder is not supported")
        widths: list[int] = []
        blocks: list[int] = []
        while (first := _convolution(len(widths), 0)) in weights:
            widths.append(weights.shape(first)[0])
            level = len(blocks)
            blocks.append(0)
            while _convolution(level, blocks[level]) in weights:
                blocks[level] += 1
        stem, bits = (weights.shape(f"{PREFIX}{name}.weight")[0] for name in ("conv_in", "conv_out"))
        uneven = [width for width in (stem, *widths) if width % _GROUPS]
        if uneven or not widths:
            raise ConfigError(f"{weights.source} is no MAGVIT-v2 encoder: its levels have {widths} channels")
        return cls(stem, tuple(widths), tuple(blocks), bits)


def _convolution(level: int, block: int) -> str:
    return f"{PREFIX}down.{level}.block.{block}.conv1.weight"


class MagvitEncoder(nn.Module):
    """Images to codes; in fp32, because rounding could flip the signs that form a code."""

    def __init__(self, config: MagvitConfig) -> None:
        super().__init__()
        self.config = config
        self.conv_in = nn.Conv2d(3, config.stem, 3, padding=1)
        self.down = nn.ModuleList()
        width = config.stem
        for level, (out, blocks) in enumerate(zip(config.widths, config.blocks, strict=True)):
            self.down.append(_Level(width, out, blocks, halves=level < len(config.widths) - 1))
            width = out
        self.mid = nn.ModuleDict(
            {"block_1": _Residual(width, width), "attn_1": _Attention(width), "block_2": _Residual(width, width)}
        )
        self.norm_out = _norm(width)
        self.conv_out = nn.Conv2d(width, config.bits, 3, padding=1)
        self.quant_conv = nn.Conv2d(config.bits, config.bits, 1)

    def forward(self, pixels: Tensor) -> Tensor:
        """The numbers whose signs form the codes: fp32 ``[B, bits, H, W]``, from ``pixels [B, 3, H * stride, W *
        stride]``."""
        x_BCHW = self.conv_in(pixels)
        for level in self.down:
            x_BCHW = level(x_BCHW)
        for layer in self.mid.values():
            x_BCHW = layer(x_BCHW)
        latents: Tensor = self.quant_conv(self.conv_out(F.silu(self.norm_out(x_BCHW))))
        return latents

    def codes(self, pixels: Tensor) -> Tensor:
        """Codes (int64 ``[B, H * W]``, row by row) of ``pixels`` (fp32 in -1 to 1); the first bit is the most
        significant."""
        set_BCHW = self(pixels) > 0
        weights = 2 ** torch.arange(self.config.bits - 1, -1, -1, device=pixels.device)
        return (set_BCHW * weights[:, None, None]).sum(1).flatten(1)


def load_magvit(weights: Weights, device: torch.device) -> MagvitEncoder:
    """The encoder from ``weights``, frozen, in fp32; raises ``ConfigError``."""
    with unfilled():
        encoder = MagvitEncoder(MagvitConfig.of(weights))
    names = {name: f"{PREFIX}{name}" for name, _ in encoder.named_parameters()}
    weights.fill(encoder, names, torch.float32, device)
    weights.check_all_read((PREFIX,))
    return encoder.eval()


def _norm(width: int) -> nn.GroupNorm:
    return nn.GroupNorm(_GROUPS, width, eps=1e-6)


class _Level(nn.Module):
    def __init__(self, width: int, out: int, blocks: int, *, halves: bool) -> None:
        super().__init__()
        self.block = nn.ModuleList(_Residual(width if i == 0 else out, out) for i in range(blocks))
        self.downsample = nn.ModuleDict({"conv": nn.Conv2d(out, out, 3, stride=2)}) if halves else None

    def forward(self, x_BCHW: Tensor) -> Tensor:
        for block in self.block:
            x_BCHW = block(x_BCHW)
        if self.downsample is None:
            return x_BCHW
        halved: Tensor = self.downsample["conv"](F.pad(x_BCHW, (0, 1, 0, 1)))
        return halved


class _Residual(nn.Module):
    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = _norm(width), nn.Conv2d(width, out, 3, padding=1)
        self.norm2, self.conv2 = _norm(out), nn.Conv2d(out, out, 3, padding=1)
        self.nin_shortcut = nn.Identity() if width == out else nn.Conv2d(width, out, 1)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        h_BCHW = self.conv1(F.silu(self.norm1(x_BCHW)))
        h_BCHW = self.conv2(F.silu(self.norm2(h_BCHW)))
        sum_BCHW: Tensor = self.nin_shortcut(x_BCHW) + h_BCHW
        return sum_BCHW


class _Attention(nn.Module):
    """One head over all cells."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = _norm(width)
        self.q, self.k, self.v, self.proj_out = (nn.Conv2d(width, width, 1) for _ in range(4))

    def forward(self, x_BCHW: Tensor) -> Tensor:
        normed = self.norm(x_BCHW)
        q, k, v = (project(normed).flatten(2).mT[:, None] for project in (self.q, self.k, self.v))
        seen = F.scaled_dot_product_attention(q, k, v)[:, 0].mT.reshape(x_BCHW.shape)
        sum_BCHW: Tensor = x_BCHW + self.proj_out(seen)
        return sum_BCHW
