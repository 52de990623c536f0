"""The CPU path of ``commit_scores`` beside the same figures from plain PyTorch, one after another.

``python kernels/bench/commit_scores.py`` prints for each shape how long it takes as a share of plain PyTorch's time:
median and quartiles of rounds in which both run, in CPU time of one thread. ``draw``: with a token drawn by each,
whose random numbers differ. No figure is given where a result differs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch
from mmserve_kernels.commit_scores import Draw, commit_scores
from torch import Tensor

#: Rows, tokens of the vocabulary, and best tokens wanted.
SHAPES = ((32, 126_464, 1), (32, 126_464, 16), (1, 126_464, 1), (64, 2_048, 1))


def plain(logits: Tensor, k: int, *, draw: bool) -> tuple[Tensor, ...]:
    """Best tokens, their log-probabilities, gap, entropy and a drawn token, as one would write them."""
    logits = logits.float()
    log_z = torch.logsumexp(logits, -1, keepdim=True)
    best, ids = logits.topk(max(k, 2), -1)
    entropy = torch.special.entr((logits - log_z).exp()).sum(-1)
    noise = torch.empty_like(logits).exponential_().log_().neg_() if draw else 0
    tokens = (logits + noise).argmax(-1)
    return ids[:, :k], best[:, :k] - log_z, best[:, 0] - best[:, 1], entropy, tokens


def measure(rows: int, vocabulary: int, k: int, rounds: int) -> dict[str, list[float]]:
    """Quartiles of the ratios of times; ``AssertionError`` where the results differ."""
    logits = (torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(0)) * 4).bfloat16()
    draw = Draw(torch.arange(rows), torch.ones(rows))
    made, wanted = commit_scores(logits, k), plain(logits, k, draw=False)
    for ours, theirs in zip((made.log_probs, made.gap, made.entropy), wanted[1:4], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    times = {}
    for name, drawn in (("best", None), ("draw", draw)):
        ratios = []
        for _ in range(rounds):
            mine = _seconds(lambda drawn=drawn: commit_scores(logits, k, draw=drawn))
            ratios.append(mine / _seconds(lambda drawn=drawn: plain(logits, k, draw=drawn is not None)))
        times[name] = [round(x, 2) for x in statistics.quantiles(ratios, n=4)]
    return times


def _seconds(run: Callable[[], object]) -> float:
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
        for rows, vocabulary, k in SHAPES:
            ratios = measure(rows, vocabulary, k, arguments.rounds)
            if arguments.json:
                print(json.dumps({"rows": rows, "vocabulary": vocabulary, "k": k} | ratios), flush=True)
                continue
            for name, (low, middle, high) in ratios.items():
                print(f"{rows} rows of {vocabulary}, k {k}, {name}: {middle} ({low}–{high})", flush=True)


if __name__ == "__main__":
    main()
