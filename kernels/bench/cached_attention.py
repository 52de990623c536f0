"""The CPU path of ``cached_attention`` beside SDPA called once a request.

``python kernels/bench/cached_attention.py`` prints for each shape how much longer it takes than SDPA (median and
quartiles of rounds in which both run, in CPU time of one thread), over pages one behind another and over pages in any
order. ``gathering``: SDPA whose keys and values are gathered from the pages first; ``ready``: SDPA whose keys and
values lie head by head already, as no paged store has them. No figure is given where a result differs from SDPA's.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from mmserve_kernels.cached_attention import Ragged, cached_attention
from torch import Tensor

PAGE = 16


@dataclass(frozen=True)
class Shape:
    """``batch`` requests of ``rows`` query rows over ``length`` positions."""

    batch: int
    rows: int
    length: int
    heads: int
    groups: int
    head_size: int


SHAPES = tuple(
    Shape(batch, rows, 512, *heads) for batch in (1, 16) for rows in (1, 32) for heads in ((8, 8, 32), (28, 4, 128))
)
#: Keys and values of each request, ``[1, G, L, K]``.
Pairs = list[list[Tensor]]


def measure(shape: Shape, rounds: int) -> dict[str, dict[str, list[float]]]:
    """Quartiles of the ratios of times for one shape; ``AssertionError`` where the results differ."""
    draw = torch.Generator().manual_seed(0)
    pages = -(-shape.length // PAGE)
    total = shape.batch * pages
    q = torch.randn(shape.batch * shape.rows, shape.heads, shape.head_size, generator=draw)
    k, v = (torch.randn(total, PAGE, shape.groups, shape.head_size, generator=draw) for _ in range(2))
    out: dict[str, dict[str, list[float]]] = {}
    for name, order in (("in order", torch.arange(total)), ("any order", torch.randperm(total, generator=draw))):
        ragged = _ragged(shape, order.split(pages))

        def gathered(ragged: Ragged = ragged) -> Pairs:
            tables = ragged.page_tables
            return [[x[t].flatten(0, 1)[: shape.length].transpose(0, 1)[None] for x in (k, v)] for t in tables]

        ready = [[x.contiguous() for x in pair] for pair in gathered()]
        runs: dict[str, Callable[[], Tensor]] = {
            "mine": lambda r=ragged: cached_attention(q, k, v, r),
            "gathering": lambda g=gathered: _sdpa(shape, q, g()),
            "ready": lambda pairs=ready: _sdpa(shape, q, pairs),
        }
        for run in runs.values():
            torch.testing.assert_close(runs["mine"](), run(), rtol=1e-4, atol=1e-5)
        times = [{n: _seconds(run) for n, run in runs.items()} for _ in range(rounds)]
        ratios = {n: [t["mine"] / t[n] for t in times] for n in ("gathering", "ready")}
        out[name] = {n: [round(x, 2) for x in statistics.quantiles(r, n=4)] for n, r in ratios.items()}
    return out


def _ragged(shape: Shape, tables: tuple[Tensor, ...]) -> Ragged:
    rows = torch.arange(shape.rows)
    slots = torch.cat([table[rows // PAGE] * PAGE + rows % PAGE for table in tables])
    return Ragged((shape.rows,) * shape.batch, (shape.length,) * shape.batch, tables, slots)


def _sdpa(shape: Shape, q: Tensor, together: Pairs) -> Tensor:
    rows = q.split(shape.rows)
    grouped = shape.heads != shape.groups
    out = [
        F.scaled_dot_product_attention(r.transpose(0, 1)[None], k, v, enable_gqa=grouped)[0].transpose(0, 1)
        for r, (k, v) in zip(rows, together, strict=True)
    ]
    return torch.cat(out)


def _seconds(run: Callable[[], Tensor]) -> float:
    start = time.thread_time()
    for _ in range(3):
        run()
    return time.thread_time() - start


def main() -> None:
    """Print a row for each shape."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with torch.inference_mode():
        for shape in SHAPES:
            ratios = measure(shape, arguments.rounds)
            if arguments.json:
                print(json.dumps(vars(shape) | ratios), flush=True)
                continue
            print(", ".join(f"{name} {value}" for name, value in vars(shape).items()))
            for order, against in ratios.items():
                for baseline, (low, middle, high) in against.items():
                    print(f"  {order}, SDPA {baseline}: {middle} ({low}–{high})", flush=True)


if __name__ == "__main__":
    main()
