"""``[[models]]`` and ``[schedulers.NAME]``: what is served, and the schedulers that requests may name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mmserve.core.values import at_least, value

#: The path that names the diffusion model shipped with the package.
BUNDLED = "bundled"


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """One model to serve."""

    path: str = value(
        BUNDLED,
        meaning="'bundled', 'bundled-causal', a checkpoint directory, or 'hub:owner/name' (the only way to a network)",
    )
    companion: str = value(
        "",
        meaning="autoregressive model with the same tokenizer, for the commit policies 'guided' and 'draft_model'",
    )
    name: str = value("", meaning="name in requests; empty = the directory's")
    dtype: str = value(
        "auto", meaning="auto = the checkpoint's on a GPU, float32 on a CPU; 'int8', 'int4': weights of few bits, CPU"
    )
    device: str = value("auto", meaning="auto = the first GPU if there is one")
    policies: str = value(
        "", meaning="file of `mmserve tune --out`; empty = policy.json beside the checkpoint, if any; 'off' = none"
    )
    positions: int = value(0, at_least(0), "of a sequence; 0 = the checkpoint's; more than those need rope_scaling")
    rope_scaling: str = value("", meaning="'ntk' or 'yarn': how positions are extended beyond the checkpoint's")
    unused_tensors: tuple[str, ...] = value(
        (), meaning="tensors of the checkpoint that the model does not need, with * and ?; others are errors"
    )


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """One entry of ``[schedulers.NAME]``: a discrete scheduler that requests may name as their commit policy.

    ``kind`` (the key ``class``) is a class of diffusers, or another with its module in front; ``numbers`` are the
    other keys, and go to its constructor.
    """

    name: str
    kind: str
    numbers: Mapping[str, Any] = field(default_factory=dict)
