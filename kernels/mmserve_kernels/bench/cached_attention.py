"""``cached_attention``: block decode, single rows, very uneven requests, prefill, and quantized pages.

Compared with SDPA called for each request on contiguous keys and values (``sdpa``: with pages in order, so neither
gathers), or gathered first from pages in any order (``sdpa_gathering``: both gather), and with compiled FlexAttention
on contiguous keys and values. Compiling the latter takes about ten seconds a case: it is measured only for pages in any
order, the harder case, and on a CPU only for uneven requests and prefill.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from mmserve_kernels.bench.harness import Case, Run, assert_near
from mmserve_kernels.bench.requests import DREAM, LLADA, SMALL, Heads, Requests
from mmserve_kernels.dispatch import pick
from mmserve_kernels.kv_quant import QuantizedPages, dequantize

#: Rows and positions of each request.
Counts = list[tuple[int, int]]


def cases(device: torch.device, dtype: torch.dtype) -> Iterator[Case]:
    """Shapes of real models on a GPU, small ones on a CPU."""
    gpu = device.type == "cuda"
    length = 4096 if gpu else 512
    for heads, model in ((LLADA if gpu else SMALL, "MHA"), (DREAM, "GQA 7")):
        for batch in (1, 16):
            for rows in (1, 32):
                name = f"{model}, batch {batch}, {rows} rows over {length}"
                yield from _orders(name, [(rows, length)] * batch, heads, device, dtype)
        if not gpu:
            yield _case(
                f"{model}, batch 1, 32 rows over 4096, in order", [(32, 4096)], heads, device, dtype, in_order=True
            )
        uneven = [(1, length), (32, length // 3), (32, 63), (7, 100)]
        yield _case(f"{model}, uneven", uneven, heads, device, dtype, flex=True)
        prompt = [(2 * length, 2 * length)]
        yield _case(f"{model}, causal prefill of {2 * length}", prompt, heads, device, dtype, causal=True, flex=True)
        for kind in ("int8", "int4", "fp8") if gpu else ("int8",):
            yield _quantized(kind, f"{model}, {kind}, batch 16, 32 rows over {length}", length, heads, device, dtype)


def _orders(name: str, counts: Counts, heads: Heads, device: torch.device, dtype: torch.dtype) -> Iterator[Case]:
    yield _case(name, counts, heads, device, dtype)
    yield _case(f"{name}, in order", counts, heads, device, dtype, in_order=True)


def _case(
    name: str,
    counts: Counts,
    heads: Heads,
    device: torch.device,
    dtype: torch.dtype,
    *,
    causal: bool = False,
    in_order: bool = False,
    flex: bool = False,
) -> Case:
    op = pick("cached_attention", device, dtype, heads.size)
    r = Requests.drawn(counts, heads, device, dtype, causal=causal, in_order=in_order)
    exact = r.exact()
    beside: dict[str, Run] = {"sdpa": r.sdpa} if in_order else {"sdpa_gathering": r.sdpa_gathering}
    if flex or (device.type == "cuda" and not in_order):
        beside["flex"] = r.flex()
    return Case(
        name=name,
        path=op.path,
        run=lambda: op.run(r.q_THK, r.k_PSGK, r.v_PSGK, r.ragged),
        check=lambda out: assert_near(out, exact, dtype),
        bytes=r.bytes,
        operations=r.operations,
        beside=beside,
    )


def _quantized(kind: str, name: str, length: int, heads: Heads, device: torch.device, dtype: torch.dtype) -> Case:
    """Pages of 8 or 4 bits, compared with the same attention over pages at full precision."""
    op, quantize = (pick(op, device, dtype, heads.size, quantized=True) for op in ("cached_attention", "kv_quant"))
    whole = Requests.drawn([(32, length)] * 16, heads, device, dtype)
    filled = torch.full((len(whole.k_PSGK),), whole.k_PSGK.shape[1], device=device)
    pages: list[QuantizedPages] = [
        quantize.run(x, filled, kind=kind, per=per) for x, per in ((whole.k_PSGK, "channel"), (whole.v_PSGK, "token"))
    ]
    k, v = (dequantize(x).to(dtype) for x in pages)
    exact = op.run(whole.q_THK, k, v, whole.ragged)
    return Case(
        name=name,
        path=op.path,
        run=lambda: op.run(whole.q_THK, *pages, whole.ragged),
        check=lambda out: assert_near(out, exact, dtype),
        bytes=sum(x.bytes for x in pages) + 2 * whole.q_THK.nbytes,
        operations=whole.operations,
        beside={"full_precision": lambda: op.run(whole.q_THK, k, v, whole.ragged)},
    )
