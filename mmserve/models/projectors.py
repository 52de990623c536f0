"""LLaVA's projectors, from a vision tower's features to visual tokens, and the pooling of grids of patches."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class NewlineProjector(nn.Module):
    """A projector that appends LLaVA's ``image_newline`` to every image: ``[B, N, C]`` to ``[B, N + 1, D]``."""

    def __init__(self, projector: nn.Module, newline: Tensor) -> None:
        super().__init__()
        self.projector = projector
        self.newline = nn.Parameter(newline, requires_grad=False)

    def forward(self, features: Tensor) -> Tensor:
        tokens = self.projector(features)
        return torch.cat([tokens, self.newline.to(tokens.dtype).expand(len(tokens), 1, -1)], dim=1)


class PooledProjector(nn.Module):
    """A projector whose tokens are pooled over squares of ``stride``, by ``mode``: ``[B, N, C]`` to ``[B, n, D]``."""

    def __init__(self, projector: nn.Module, stride: int, mode: str) -> None:
        super().__init__()
        self.projector, self.stride, self.mode = projector, stride, mode

    def forward(self, features: Tensor) -> Tensor:
        return pool_grid(self.projector(features), self.stride, self.mode).flatten(1, 2)


def pooled_side(side: int, stride: int, mode: str) -> int:
    """Rows, and columns, of the grid after ``pool_grid`` of a grid with ``side``."""
    return -(-side // stride) if mode == "bilinear" else side // stride


def pool_grid(tokens: Tensor, stride: int, mode: str) -> Tensor:
    """Pool ``tokens [F, side * side, D]`` over their grid, as LLaVA-NeXT's ``get_2dPool``: ``[F, rows, columns, D]``.

    ``average`` and ``max`` pool squares of ``stride``, ignoring incomplete squares at the right and bottom;
    ``bilinear`` interpolates at the centres of ``ceil(side / stride)`` equal squares.
    """
    frames, count, width = tokens.shape
    side = int(count**0.5)
    grid_FDHW = tokens.view(frames, side, side, width).permute(0, 3, 1, 2)
    if mode == "average":
        pooled = F.avg_pool2d(grid_FDHW, stride)
    elif mode == "max":
        pooled = F.max_pool2d(grid_FDHW, stride)
    else:
        size = pooled_side(side, stride, mode)
        pooled = F.interpolate(grid_FDHW, size=(size, size), mode="bilinear")
    return pooled.permute(0, 2, 3, 1)


def pooled_evidence(values: Tensor, stride: int, mode: str) -> Tensor:
    """Evidence ``[F, side * side]`` or ``[F, side * side, C]``, pooled as ``pool_grid`` pools tokens."""
    wide = values if values.dim() == 3 else values[..., None]
    pooled = pool_grid(wide, stride, mode).flatten(1, 2)
    return pooled if values.dim() == 3 else pooled[..., 0]


def separated(grid_FHWD: Tensor, newline: Tensor | None, position: str) -> list[Tensor]:
    """The tokens ``[n, D]`` of each frame, with the separator ``newline [D]`` inserted according to ``position``."""
    frames, rows, _columns, width = grid_FHWD.shape
    if newline is None or position == "no_token":
        return list(grid_FHWD.flatten(1, 2))
    if position == "grid":
        return list(torch.cat([grid_FHWD, newline.expand(frames, rows, 1, width)], dim=2).flatten(1, 2))
    tokens = list(grid_FHWD.flatten(1, 2))
    ends = range(frames) if position == "frame" else [frames - 1]
    for i in ends:
        tokens[i] = torch.cat([tokens[i], newline[None]])
    return tokens


def mlp_projector(kind: str, vision_size: int, hidden_size: int) -> nn.Sequential:
    """LLaVA's projector ``linear`` or ``mlpNx_gelu``, from the tower's feature size to the decoder's hidden size."""
    if kind == "linear":
        return nn.Sequential(nn.Linear(vision_size, hidden_size))
    depth = int(kind.removeprefix("mlp").removesuffix("x_gelu"))
    layers: list[nn.Module] = [nn.Linear(vision_size, hidden_size)]
    for _ in range(depth - 1):
        layers += [nn.GELU(), nn.Linear(hidden_size, hidden_size)]
    return nn.Sequential(*layers)
