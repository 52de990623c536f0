"""``[[models]]`` and ``[schedulers.NAME]``: the served models, and the schedulers available to requests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mmserve.core.values import at_least, value

#: The path of the diffusion model included in the package.
BUNDLED = "bundled"


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """One model to serve."""

    path: str = value(
        BUNDLED,
        meaning="'bundled', 'bundled-causal', a checkpoint directory, or 'hub:owner/name', which downloads it",
    )
    companion: str = value(
        "",
        meaning="autoregressive model with the same tokenizer, for the commit policies 'guided' and 'draft_model'",
    )
    name: str = value("", meaning="name in requests; empty = the name of the directory")
    dtype: str = value(
        "auto",
        meaning="auto = the checkpoint's on a GPU, float32 on a CPU; 'int8', 'int4' = quantised weights, CPU only",
    )
    device: str = value("auto", meaning="auto = the first GPU, or the CPU where there is none")
    policies: str = value(
        "", meaning="file written by `mmserve tune --out`; empty = policy.json in the checkpoint, if any; 'off' = none"
    )
    positions: int = value(0, at_least(0), "longest sequence; 0 = the checkpoint's; a longer one needs rope_scaling")
    rope_scaling: str = value("", meaning="'ntk' or 'yarn': method to extend positions beyond the checkpoint's")
    unused_tensors: tuple[str, ...] = value(
        (), meaning="tensors of the checkpoint to ignore (* and ? match any); other unknown tensors are an error"
    )


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """One entry of ``[schedulers.NAME]``: a discrete scheduler that requests may name as their commit policy.

    ``kind`` (the key ``class``) is a class of diffusers, or ``module.Class``; ``numbers``: the other keys, which are
    passed to its constructor.
    """

    name: str
    kind: str
    numbers: Mapping[str, Any] = field(default_factory=dict)
