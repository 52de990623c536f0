"""Speed of ``cached_attention`` with other block sizes than those of its table, on the present GPU.

``python kernels/bench/tilings.py`` prints one JSON object a line: the table's sizes first, then variants with one size
changed, for every batch shape. The sizes in use are set in ``cached_attention/tiles.py``: they determine the order of
additions, so all batches must use the same ones.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from typing import Any

import torch
from mmserve_kernels.bench.harness import Case, Device, assert_near, measure
from mmserve_kernels.bench.requests import DREAM, LLADA, Heads, Requests
from mmserve_kernels.cached_attention import kernel
from mmserve_kernels.cached_attention.tiles import Tiling, gpu_of, tiling

#: Alternative values of each size.
OTHERS: Mapping[str, tuple[int, ...]] = {
    "block_m": (32, 64, 128),
    "block_n": (32, 64, 128),
    "split": (256, 512, 1024, 2048),
    "num_warps": (4, 8),
    "num_stages": (1, 2, 3, 4),
}
#: Heads, rows and positions of each request, and whether attention is causal.
Shape = tuple[str, Heads, list[tuple[int, int]], bool]
SHAPES: tuple[Shape, ...] = (
    *(
        (f"{name}, batch {batch}, {rows} rows", heads, [(rows, 4096)] * batch, False)
        for name, heads in (("MHA", LLADA), ("GQA 7", DREAM))
        for batch, rows in ((1, 32), (16, 32), (16, 1))
    ),
    ("MHA, causal prefill", LLADA, [(8192, 8192)], True),
)


def candidates(table: Tiling) -> Iterator[Tiling]:
    """The tiling ``table``, and variants of it with one size changed."""
    yield table
    for name, values in OTHERS.items():
        for value in values:
            other = replace(table, **{name: value})
            if other != table:
                yield other


def rows(on: Device, shapes: tuple[Shape, ...], rounds: int) -> Iterator[dict[str, Any]]:
    """A row of ``measure`` for each shape and candidate; candidates that do not fit or compile yield a row with the
    error."""
    for name, heads, counts, causal in shapes:
        r = Requests.drawn(counts, heads, on.device, on.dtype, causal=causal)
        exact = r.exact()
        case = Case(
            name=name,
            path="triton",
            run=lambda r=r: kernel.cached_attention(r.q_THK, r.k_PSGK, r.v_PSGK, r.ragged),
            check=lambda out, exact=exact: assert_near(out, exact, on.dtype),
            bytes=r.bytes,
            operations=r.operations,
        )
        for sizes in candidates(tiling(on.dtype, heads.size, backend=gpu_of(on.device))):
            kernel.tiling = lambda *_, sizes=sizes, **__: sizes
            yield measure("cached_attention", case, on, rounds) | asdict(sizes)
        kernel.tiling = tiling


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("block sizes are compared on a GPU, and there is none", file=sys.stderr)
        return 1
    with torch.inference_mode():
        for row in rows(Device.measured(torch.device("cuda"), torch.bfloat16), SHAPES, arguments.rounds):
            print(json.dumps(row), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
