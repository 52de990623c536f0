"""``attention_scores``: the row of a class token and the column sums of a vision tower's layer, compared with computing
the whole matrix of weights."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from mmserve_kernels.bench.harness import Case
from mmserve_kernels.bench.requests import Heads, Requests
from mmserve_kernels.dispatch import pick

#: Heads of CLIP ViT-L, and number of patches of a picture of 384 × 384.
TOWER, PATCHES = Heads(16, 16, 64), 729


def cases(device: torch.device, dtype: torch.dtype) -> Iterator[Case]:
    """The class row of one picture, and the column sums of one and of several pictures."""
    several = 8 if device.type == "cuda" else 2
    yield _case("class row", [(1, PATCHES)] * several, device, dtype)
    for pictures in (1, several):
        yield _case(f"column sums of {pictures} pictures", [(PATCHES, PATCHES)] * pictures, device, dtype)


def _case(name: str, counts: list[tuple[int, int]], device: torch.device, dtype: torch.dtype) -> Case:
    op = pick("attention_scores", device, dtype, TOWER.size)
    r = Requests.drawn(counts, TOWER, device, dtype)
    rows = r.q_THK.split(r.counts)

    def matrix(dtype: torch.dtype) -> Tensor:
        parts = zip(rows, r.keys, strict=True)
        scores = (torch.einsum("rhk,lhk->hrl", q.to(dtype), k.to(dtype)) * TOWER.size**-0.5 for q, k in parts)
        return torch.cat([s.softmax(-1, dtype=torch.float32).sum(1).T for s in scores])

    exact = matrix(torch.float32)

    def check(sums: Tensor) -> None:
        # Relative to the total weight: the distribution over positions is checked, independent of the scale.
        wide = dtype != torch.float32
        torch.testing.assert_close(sums, exact, rtol=5e-2 if wide else 1e-3, atol=1e-3)

    return Case(
        name=name,
        path=op.path,
        run=lambda: op.run(r.q_THK, r.k_PSGK, r.ragged),
        check=check,
        bytes=sum(k.nbytes for k in r.keys) + r.q_THK.nbytes + 4 * exact.numel(),
        operations=r.operations // 2,
        beside={"whole_matrix": lambda: matrix(dtype)},
    )
