"""``rope_scatter``: new rows of a decode step and of a prefill, compared with separate rotation and write."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from mmserve_kernels.bench.harness import Case, assert_near
from mmserve_kernels.bench.requests import DREAM, LLADA, PAGE, SMALL, Heads
from mmserve_kernels.dispatch import pick


def cases(device: torch.device, dtype: torch.dtype) -> Iterator[Case]:
    """A block of 32 rows for each of 16 requests, and a long prompt."""
    gpu = device.type == "cuda"
    for heads, model in ((LLADA if gpu else SMALL, "MHA"), (DREAM, "GQA 7")):
        for rows in (512, 8192 if gpu else 2048):
            yield _case(f"{model}, {rows} rows", rows, heads, device, dtype)


def _case(name: str, rows: int, heads: Heads, device: torch.device, dtype: torch.dtype) -> Case:
    op = pick("rope_scatter", device, dtype, heads.size)
    draw = torch.Generator(device).manual_seed(0)
    q, k, v = (
        torch.randn(rows, n, heads.size, generator=draw, device=device).to(dtype)
        for n in (heads.heads, heads.groups, heads.groups)
    )
    angles = torch.rand(rows, 1, heads.size // 2, generator=draw, device=device).repeat(1, 1, 2) * 6
    cos, sin = angles.cos(), angles.sin()
    slots = torch.randperm(rows, generator=draw, device=device)
    pages = [
        torch.empty(-(-rows // PAGE), PAGE, heads.groups, heads.size, dtype=dtype, device=device) for _ in range(2)
    ]
    exact = [_turned(x.float(), cos, sin) for x in (q, k)]

    def check(rotated: Tensor) -> None:
        stored = [x.flatten(0, 1)[slots] for x in pages]
        for mine, wanted in zip((rotated, *stored), (*exact, v), strict=True):
            assert_near(mine, wanted, dtype, scale=4)  # two products with a rounded sine or cosine
        for page in pages:
            page.fill_(torch.nan)

    def plain() -> Tensor:
        c, s = cos.to(dtype), sin.to(dtype)
        pages[0].flatten(0, 1)[slots] = _turned(k, c, s)
        pages[1].flatten(0, 1)[slots] = v
        return _turned(q, c, s)

    return Case(
        name=name,
        path=op.path,
        run=lambda: op.run(q, k, v, cos, sin, *pages, slots),
        check=check,
        bytes=2 * (q.nbytes + k.nbytes + v.nbytes) + cos.nbytes + sin.nbytes,
        beside={"one_after_another": plain},
    )


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin
