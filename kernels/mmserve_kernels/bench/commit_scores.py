"""``commit_scores``: the outputs for a step's rows of logits, compared with a sequence of PyTorch operations."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from mmserve_kernels.bench.harness import Case
from mmserve_kernels.commit_scores import CommitScores, Draw
from mmserve_kernels.dispatch import pick

#: Rows, vocabulary size, k of the top-k tokens, and whether a token is sampled.
SHAPES = (
    (1, 126_464, 1, False),
    (32, 126_464, 1, False),
    (32, 126_464, 16, False),
    (32, 126_464, 1, True),
    (64, 2_048, 1, False),
)
#: The rows of 16 concurrent requests, on a GPU only.
WIDE = ((512, 126_464, 1, False), (512, 126_464, 1, True))


def cases(device: torch.device, dtype: torch.dtype) -> Iterator[Case]:
    """Rows of LLaDA's vocabulary, and of a small one."""
    for rows, vocabulary, k, drawn in SHAPES + (WIDE if device.type == "cuda" else ()):
        yield _case(rows, vocabulary, k, device, dtype, drawn=drawn)


def _case(rows: int, vocabulary: int, k: int, device: torch.device, dtype: torch.dtype, *, drawn: bool) -> Case:
    op = pick("commit_scores", device, dtype)
    draw_of = torch.Generator(device).manual_seed(0)
    logits = (torch.randn(rows, vocabulary, generator=draw_of, device=device) * 4).to(dtype)
    ones = torch.ones(rows, device=device)
    draw = Draw(torch.arange(rows, device=device), ones) if drawn else None
    exact = plain(logits, k, drawn=False)

    def check(made: CommitScores | tuple[Tensor, ...]) -> None:
        found: Any = made[:3] if isinstance(made, tuple) else (made.log_probs, made.gap, made.entropy)
        for mine, wanted in zip(found, exact, strict=False):
            torch.testing.assert_close(mine, wanted, rtol=1e-4, atol=1e-4)

    return Case(
        name=f"{rows} rows of {vocabulary}, best {k}{', one drawn' if drawn else ''}",
        path=op.path,
        run=lambda: op.run(logits, k, draw=draw),
        check=check,
        bytes=logits.nbytes,
        beside={"plain": lambda: plain(logits, k, drawn=drawn)},
    )


def plain(logits: Tensor, k: int, *, drawn: bool) -> tuple[Tensor, ...]:
    """Log-probabilities of the top-k tokens, gap, entropy, ids and a sampled token, in straightforward PyTorch."""
    logits = logits.float()
    log_z = torch.logsumexp(logits, -1, keepdim=True)
    best, ids = logits.topk(max(k, 2), -1)
    entropy = torch.special.entr((logits - log_z).exp()).sum(-1)
    noise = torch.empty_like(logits).exponential_().log_().neg_() if drawn else 0
    tokens = (logits + noise).argmax(-1)
    return best[:, :k] - log_z, best[:, 0] - best[:, 1], entropy, ids[:, :k], tokens
