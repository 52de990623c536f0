"""The filter of the commit policy ``learned``: a small network over a block's confidences, and its file.

Learn2PD's filter (arXiv 2509.25188; ims-kdks/Learning-to-Parallel-Decoding, train.ipynb) is a two-layer network from
the confidences of a block of 32 positions to 32 logits, for a single block length. Here all positions share one such
network, whose inputs are a window around the position and two means over the block, so that one filter works for blocks
of any length. Outside of the block, positions to its left count as final, and those to its right as unknown.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from mmserve.errors import ConfigError

#: The filter's file in a model's folder.
FILTER = "commit_filter.safetensors"
#: Log-odds are clamped to this (a confidence of 0.9997), and divided by it for the network.
_SUREST = 8.0


@dataclass(frozen=True, eq=False)
class CommitFilter:
    """A two-layer network with a ReLU; ``features`` computes its inputs.

    ``F = 4 radius + 4`` inputs, ``H`` hidden units, all fp32.
    """

    hidden_weight: np.ndarray  # [H, F]
    hidden_bias: np.ndarray  # [H]
    output_weight: np.ndarray  # [H]
    output_bias: np.ndarray  # []

    @property
    def radius(self) -> int:
        """Window size: positions on either side."""
        return (self.hidden_weight.shape[1] - 4) // 4

    def trust(self, confidence: np.ndarray, still_open: np.ndarray) -> np.ndarray:
        """Probability (fp32 ``[L]``) that each position's candidate equals the schedule's final token.

        ``confidence`` fp32 ``[L]``: of the block's candidates, 1 at final positions, and 0 at open ones without a
        candidate; ``still_open``: bool ``[L]``.
        """
        with np.errstate(invalid="ignore"):  # all values are finite, but BLAS has set the flag nevertheless
            hidden = features(confidence, still_open, self.radius) @ self.hidden_weight.T + self.hidden_bias
            logits = np.maximum(hidden, 0) @ self.output_weight + self.output_bias
        return (1 / (1 + np.exp(-np.clip(logits, -60, 60)))).astype(np.float32)


def features(confidence: np.ndarray, still_open: np.ndarray, radius: int) -> np.ndarray:
    """The network's inputs, fp32 ``[L, 4 radius + 4]``, from a block's ``confidence`` and ``still_open`` ``[L]``.

    For each position: scaled log-odds of the confidences in its window, in [-1, 1]; which of them are open; the mean
    log-odds of the block's open positions; and their share of the block.
    """
    odds, is_open = _log_odds(confidence), still_open.astype(np.float32)
    size = 2 * radius + 1
    means = np.array([odds[still_open].mean() if still_open.any() else 1.0, is_open.mean()], np.float32)
    beside = np.full(radius, 1.0, np.float32)
    windows = (
        np.lib.stride_tricks.sliding_window_view(np.concatenate([left * beside, of_block, right * beside]), size)
        for left, of_block, right in ((1, odds, -1), (0, is_open, 1))
    )
    return np.concatenate([*windows, np.broadcast_to(means, (len(odds), 2))], axis=1)


def _log_odds(confidence: np.ndarray) -> np.ndarray:
    """Scaled log-odds in [-1, 1]: the step from 0.99 to 0.999 is as large as that from 0.5 to 0.9."""
    least = 1 / (1 + np.exp(_SUREST))
    p = np.clip(confidence.astype(np.float64), least, 1 - least)
    return (np.log(p / (1 - p)) / _SUREST).astype(np.float32)


def load_filter(folder: Path) -> CommitFilter | None:
    """The filter in a model's folder; None if there is none. Raises ``ConfigError`` for an invalid file."""
    path = folder / FILTER
    if not path.is_file():
        return None
    try:
        tensors = load_file(path)
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{path} is not a readable safetensors file: {error}") from error
    names = ("hidden.weight", "hidden.bias", "output.weight", "output.bias")
    if set(tensors) != set(names):
        raise ConfigError(f"{path} must hold the tensors {', '.join(names)}, not {', '.join(sorted(tensors))}")
    shape = tensors["hidden.weight"].shape
    if len(shape) != 2 or not shape[0] or shape[1] < 4 or shape[1] % 4:
        raise ConfigError(f"{path}: hidden.weight has shape {list(shape)}, expected [H, 4 radius + 4]")
    for name, expected in zip(names, (shape, shape[:1], shape[:1], ()), strict=True):
        if tensors[name].shape != expected or tensors[name].dtype != np.float32:
            found = f"{tensors[name].dtype} {list(tensors[name].shape)}"
            raise ConfigError(f"{path}: {name} is {found}, expected float32 {list(expected)}")
        if not np.isfinite(tensors[name]).all():
            raise ConfigError(f"{path}: {name} holds numbers that are not finite")
    return CommitFilter(*(tensors[name] for name in names))


def save_filter(commit_filter: CommitFilter, path: Path, record: Mapping[str, Any]) -> None:
    """Write a filter; ``record`` (JSON): how it was trained, stored as the file's metadata ``record``."""
    tensors = {
        "hidden.weight": commit_filter.hidden_weight,
        "hidden.bias": commit_filter.hidden_bias,
        "output.weight": commit_filter.output_weight,
        "output.bias": commit_filter.output_bias,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({n: np.asarray(t, order="C") for n, t in tensors.items()}, path, metadata={"record": json.dumps(record)})
    path.chmod(0o644)  # safetensors writes through a private temporary file
