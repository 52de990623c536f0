"""Training of a filter on recorded steps, and its evaluation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from mmserve.errors import ConfigError
from mmserve.models.commit_filter import CommitFilter, features
from mmserve.train_filter.record import StepExample

#: Context positions on either side, hidden units (as in the paper's filter), batch size in rows, peak learning rate.
RADIUS, HIDDEN, BATCH, RATE = 8, 32, 1024, 3e-3
LOG_EVERY = 500


@dataclass(frozen=True)
class Score:
    """Evaluation of a filter at one threshold; shares are None if their denominator is 0."""

    candidates: int
    right: float | None  # share of correct candidates
    precision: float | None  # share of correct candidates among the accepted
    recall: float | None  # share of accepted candidates among the correct


def fit(examples: Sequence[StepExample], *, seed: int, steps: int, progress: Callable[[str], None]) -> CommitFilter:
    """A filter trained to predict which candidates of ``examples`` are correct; deterministic for a seed.

    Cross-entropy and AdamW at 3e-3 as in the reference, but with batches and a learning rate that decays to 0. Raises
    ``ConfigError`` if no candidate has a label.
    """
    x, y = _rows(examples)
    if not len(x):
        raise ConfigError("no candidate to learn from: the prompts gave no answers")
    generator = torch.Generator().manual_seed(seed)
    network = nn.Sequential(nn.Linear(x.shape[1], HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 1))
    for parameter in network.parameters():  # initialization as in nn.Linear, with a separate generator
        bound = (x.shape[1] if parameter.shape[-1] == x.shape[1] else HIDDEN) ** -0.5
        nn.init.uniform_(parameter, -bound, bound, generator=generator)
    optimizer = torch.optim.AdamW(network.parameters(), lr=RATE)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for step in range(1, steps + 1):
        rows = torch.randint(len(x), (BATCH,), generator=generator)
        loss = F.binary_cross_entropy_with_logits(network(x[rows])[:, 0], y[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % LOG_EVERY == 0 or step == steps:
            progress(f"step {step} of {steps}: loss {loss.item():.4f}")
    hidden_weight, hidden_bias, output_weight, output_bias = (p.detach().numpy() for p in network.parameters())
    return CommitFilter(hidden_weight, hidden_bias, output_weight[0], output_bias.reshape(()))


def score(commit_filter: CommitFilter, examples: Sequence[StepExample], threshold: float) -> Score:
    """The evaluation of ``commit_filter`` on the candidates of ``examples``."""
    trusted, right = [], []
    for example in examples:
        trusted.append((commit_filter.trust(example.confidence, example.still_open) > threshold)[example.judged])
        right.append(example.right[example.judged])
    picked, truth = np.concatenate(trusted), np.concatenate(right)
    both, of_picked, of_truth = (int(which.sum()) for which in (picked & truth, picked, truth))
    return Score(len(truth), _share(of_truth, len(truth)), _share(both, of_picked), _share(both, of_truth))


def _rows(examples: Sequence[StepExample]) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and labels of every labelled candidate."""
    kept = [example for example in examples if example.judged.any()]
    if not kept:
        return torch.empty(0, 4 * RADIUS + 4), torch.empty(0)
    x = np.concatenate([features(s.confidence, s.still_open, RADIUS)[s.judged] for s in kept])
    y = np.concatenate([s.right[s.judged] for s in kept])
    return torch.from_numpy(x), torch.from_numpy(y).float()


def _share(part: int, whole: int) -> float | None:
    return round(part / whole, 4) if whole else None
