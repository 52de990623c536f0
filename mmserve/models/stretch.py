"""Contexts longer than those of a checkpoint: its rotary embedding is scaled when it is loaded.

By a larger base (NTK-aware scaling, for LLaDA in LongLLaDA, arXiv 2506.14429), or by YaRN (arXiv 2309.00071).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from mmserve.errors import ConfigError
from mmserve.models.decoder_config import DecoderConfig
from mmserve.models.rope_scaling import YarnScaling

NTK, YARN = "ntk", "yarn"
METHODS = (NTK, YARN)


@dataclass(frozen=True)
class Stretch:
    """The maximum ``positions`` (0 = the checkpoint's), and the ``method``, one of ``METHODS`` (empty = none)."""

    positions: int = 0
    method: str = ""

    def __post_init__(self) -> None:
        if self.method not in ("", *METHODS):
            raise ConfigError(f"[[models]] rope_scaling {self.method!r} is not known; it can be {_listed()} or empty")
        if self.method and not self.positions:
            raise ConfigError("[[models]] rope_scaling needs positions: of how many a sequence may be")

    def applied(self, config: DecoderConfig, path: Path) -> DecoderConfig:
        """``config`` scaled to these positions; raises ``ConfigError`` naming a missing setting, or a conflict with the
        checkpoint."""
        known, factor = config.max_positions, self.positions / config.max_positions
        if not self.positions:
            return config
        if factor <= 1:
            return replace(config, max_positions=self.positions)
        if not self.method:
            raise ConfigError(
                f"{path}: the checkpoint was made for {known} positions, and [[models]] positions is {self.positions}: "
                f"set rope_scaling to {_listed()}, too"
            )
        if config.rope_scaling is not None or config.rope_axes or config.local_theta:
            what = "positions of several axes" if config.rope_axes else "a scaling or a second base of its own"
            raise ConfigError(
                f"{path}: the checkpoint has {what}: rope_scaling under [[models]] changes plain ones only"
            )
        if self.method == NTK:
            width = config.rotary_width or config.head_dim
            if width < 4:
                raise ConfigError(f"{path}: rope_scaling 'ntk' takes heads of 4 rotated dimensions or more")
            theta = config.rope_theta * factor ** (width / (width - 2))
            return replace(config, rope_theta=theta, max_positions=self.positions)
        usual = YarnScaling.usual_amplitude(factor)
        scaling = YarnScaling(factor=factor, original_positions=known, amplitude=usual)
        return replace(config, rope_scaling=scaling, max_positions=self.positions)


def _listed() -> str:
    return " or ".join(map(repr, METHODS))
