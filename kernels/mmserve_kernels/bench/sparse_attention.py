"""``sparse_attention``: prefill at several densities and decode over selected pages, and the cost of index builders.

Compared with dense SDPA (``dense_sdpa``, with a different result), and on the same blocks with SDPA (``masked_sdpa``)
and, on a GPU, compiled FlexAttention. The cost of an index builder must be small relative to ``dense_sdpa``.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from mmserve_kernels.bench.harness import Case, Run, assert_near
from mmserve_kernels.bench.requests import DREAM, LLADA, PAGE, SMALL, FlexAttention, Heads, Requests
from mmserve_kernels.dispatch import pick
from mmserve_kernels.sparse_attention import Rows, block_index, estimates

BLOCK = 64


def cases(device: torch.device, dtype: torch.dtype) -> Iterator[Case]:
    """One causal prompt at four densities, its index builders, and a decode step at two densities."""
    gpu = device.type == "cuda"
    length = 16384 if gpu else 1024
    for heads, model in ((LLADA if gpu else SMALL, "MHA"), (DREAM, "GQA 7")):
        prompt = Requests.drawn([(length, length)], heads, device, dtype, causal=True)
        for density in (1.0, 0.5, 0.25, 0.125):
            yield _prefill(f"{model}, prefill of {length} at density {density:g}", prompt, density)
        yield from _builders(f"{model}, prefill of {length}", prompt)
        step = Requests.drawn([(32, length)], heads, device, dtype)
        for density in (0.25, 0.125):
            yield _decode(f"{model}, 32 rows over {length}, pages at density {density:g}", step, heads, density)


def _prefill(name: str, r: Requests, density: float) -> Case:
    """Random blocks, including each row's own: the time does not depend on their contents."""
    blocks = -(-len(r.q_THK) // BLOCK)
    draw = torch.Generator().manual_seed(1)
    chosen = torch.rand(r.q_THK.shape[1], blocks, blocks, generator=draw) < density
    mask = ((chosen | torch.eye(blocks, dtype=torch.bool)) & torch.ones(blocks, blocks).tril().bool()).to(
        r.q_THK.device
    )
    return _attention(name, r, mask, BLOCK, BLOCK)


def _decode(name: str, r: Requests, heads: Heads, density: float) -> Case:
    count, length = len(r.q_THK), r.ragged.kv_lengths[0]
    rows = Rows(torch.arange(length - count, length, device=r.q_THK.device), length, None, count, PAGE)
    pages = r.keys[0].unflatten(0, (-1, PAGE))
    mask = estimates.densest(estimates.by_bounds(r.q_THK, pages.amin(1), pages.amax(1), rows), rows, density=density)
    return _attention(name, r, mask, len(r.q_THK), PAGE)


def _attention(name: str, r: Requests, mask_ABC: Tensor, q_block: int, kv_block: int) -> Case:
    device, dtype = r.q_THK.device, r.q_THK.dtype
    op = pick("sparse_attention", device, dtype, r.q_THK.shape[2])
    index = block_index([mask_ABC], q_block, kv_block)
    length = r.ragged.kv_lengths[0]

    seen_ATL = mask_ABC.repeat_interleave(q_block, 1)[:, : len(r.q_THK)].repeat_interleave(kv_block, 2)[:, :, :length]
    if r.ragged.kv_limit is not None:
        seen_ATL = seen_ATL & (torch.arange(length, device=device) < r.ragged.kv_limit[:, None])
    share = r.q_THK.shape[1] // len(seen_ATL)  # query heads for each mask
    seen_HTL = seen_ATL.repeat_interleave(share, 0) if share > 1 else seen_ATL

    def masked(q_THK: Tensor, k_LGK: Tensor, v_LGK: Tensor, heads: slice = slice(None)) -> Tensor:
        """The result by SDPA; on a GPU masks are not supported with grouped-query heads."""
        k, v = (x.repeat_interleave(q_THK.shape[1] // x.shape[1], 1) for x in (k_LGK, v_LGK))
        q, k, v = (x.transpose(0, 1)[None, heads] for x in (q_THK, k, v))
        return F.scaled_dot_product_attention(q, k, v, seen_HTL[None, heads])[0].transpose(0, 1)

    single = r.q_THK.float(), r.keys[0].float(), r.values[0].float()
    # A head at a time: in fp32 the mask of a single head takes a gigabyte.
    exact = torch.cat([masked(*single, slice(head, head + 1)) for head in range(r.q_THK.shape[1])], 1)
    density = float(mask_ABC.float().mean())
    touched = float(mask_ABC.unflatten(0, (r.k_PSGK.shape[2], -1)).any(1).any(1).float().mean())  # share of K/V read
    beside: dict[str, Run] = {"masked_sdpa": lambda: masked(r.q_THK, r.keys[0], r.values[0])}
    if device.type == "cuda":
        beside["flex"] = FlexAttention.over_blocks(r, mask_ABC, q_block, kv_block)
    dense = r.sdpa()

    def check(out: Tensor) -> None:
        if out is not dense:
            assert_near(out, exact, dtype)

    def whole() -> Tensor:
        r.sdpa()
        return dense

    return Case(
        name=name,
        path=op.path,
        run=lambda: op.run(r.q_THK, r.k_PSGK, r.v_PSGK, r.ragged, index),
        check=check,
        bytes=round(touched * (r.bytes - 2 * r.q_THK.nbytes)) + 2 * r.q_THK.nbytes,
        operations=round(4 * density * len(r.q_THK) * length * r.q_THK.shape[1] * r.q_THK.shape[2]),
        beside=beside | {"dense_sdpa": whole},
    )


def _builders(name: str, r: Requests) -> Iterator[Case]:
    """The index builders, in PyTorch on any device. A mask is valid if each block of rows has a visible block."""
    positions = torch.arange(len(r.q_THK), device=r.q_THK.device)
    rows = Rows(positions, len(positions), positions + 1, BLOCK, BLOCK)
    q, k = r.q_THK, r.keys[0]

    def chosen(estimate_ABC: Tensor) -> Tensor:
        return estimates.densest(estimate_ABC, rows, density=0.25)

    def check(made: Tensor) -> None:
        if made.dtype == torch.bool:
            assert made.any(-1).all() and not (made & ~rows.visible()).any(), "a block of rows looks at nothing it sees"

    builders: dict[str, Run] = {
        "vertical_slash": lambda: chosen(estimates.by_lines(q, k, rows)),
        "query_aware": lambda: chosen(estimates.by_means(q, k, rows)),
    }
    for builder, run in builders.items():
        read = k.nbytes + q.nbytes
        yield Case(
            name=f"{name}, {builder}", path="pytorch", run=run, check=check, bytes=read, beside={"dense_sdpa": r.sdpa}
        )
