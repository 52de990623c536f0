"""``kv_quant``: pages of one layer to 8 and 4 bits, compared with a plain copy of them."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from mmserve_kernels.bench.harness import Case, assert_near
from mmserve_kernels.bench.requests import LLADA, PAGE
from mmserve_kernels.dispatch import pick
from mmserve_kernels.kv_quant import QuantizedPages, dequantize


def cases(device: torch.device, dtype: torch.dtype) -> Iterator[Case]:
    """Keys quantized by channel and values by token, with LLaDA's heads."""
    pages = 4096 if device.type == "cuda" else 32
    for kind in ("int8", "int4", "fp8"):
        for per in ("channel", "token"):
            yield _case(pages, kind, per, device, dtype)


def _case(pages: int, kind: str, per: str, device: torch.device, dtype: torch.dtype) -> Case:
    op = pick("kv_quant", device, dtype, LLADA.size)
    draw = torch.Generator(device).manual_seed(0)
    x = torch.randn(pages, PAGE, LLADA.groups, LLADA.size, generator=draw, device=device).to(dtype)
    filled = torch.full((pages,), PAGE, device=device)
    room = torch.empty_like(x)

    def check(made: QuantizedPages | torch.Tensor) -> None:
        if isinstance(made, torch.Tensor):
            assert_near(made, x, dtype)
            return
        off = (dequantize(made) - x.float()).abs()
        # Half a step; for fp8 with three mantissa bits, a sixteenth of the value or half its smallest step.
        most = x.float().abs() / 16 + made.scale / 256 if made.low is None else made.scale * 0.501
        assert bool((off <= most).all()), f"off by {float((off - most).max()):.3g} more than a step allows"

    made: QuantizedPages = op.run(x, filled, kind=kind, per=per)
    return Case(
        name=f"{pages} pages to {kind}, a range for each {per}",
        path=op.path,
        run=lambda: op.run(x, filled, kind=kind, per=per),
        check=check,
        bytes=x.nbytes + made.bytes,
        beside={"copy": lambda: room.copy_(x)},
    )
