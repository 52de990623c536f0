"""Sliding windows of a checkpoint's layers, from its ``config.json``."""

from __future__ import annotations

from dataclasses import replace

from mmserve.errors import ConfigError
from mmserve.models.decoder_config import DecoderConfig
from mmserve.models.keys import Keys

SLIDING, FULL = "sliding_attention", "full_attention"
_MAX_WINDOW_LAYERS = 28


def layer_windows(
    keys: Keys, config: DecoderConfig, *, switch: str = "", everywhere: bool = False, pattern: int = 0
) -> DecoderConfig:
    """``config`` with the windows of its layers from ``sliding_window`` and ``layer_types``; none without a size.

    ``switch``: the key that must be set for ``sliding_window`` to have an effect; without it, transformers cannot run
    layers that ``layer_types`` gives a window. If ``layer_types`` is not set, all layers have the window
    (``everywhere``), all except for every ``pattern``-th, or, as in Qwen2, those from ``max_window_layers`` on. Raises
    ``ConfigError``.
    """
    kinds = _kinds(keys, config.num_layers)
    if switch and not keys.flag(switch):
        if SLIDING in (kinds or ()):
            raise ConfigError(f"{keys.path}: layer_types has {SLIDING!r}, but {switch} is not set: set it to true")
        return config
    if keys.values.get("sliding_window") is None and not config.local_theta:  # else windowed layers have another base
        return config
    window = keys.integer("sliding_window", default=config.max_positions)
    if kinds is None and everywhere:
        kinds = [SLIDING] * config.num_layers
    elif kinds is None and pattern:
        kinds = [SLIDING if (layer + 1) % pattern else FULL for layer in range(config.num_layers)]
    elif kinds is None:
        first = _first_windowed(keys)
        kinds = [SLIDING if layer >= first else FULL for layer in range(config.num_layers)]
    if SLIDING not in kinds:
        return config
    return replace(config, windows=tuple(window if kind == SLIDING else 0 for kind in kinds))


def _first_windowed(keys: Keys) -> int:
    """``max_window_layers``: the first layer with a window; by default 28, as in transformers."""
    first = keys.values.get("max_window_layers")
    if first is None:
        return _MAX_WINDOW_LAYERS
    if type(first) is not int or first < 0:
        raise ConfigError(f"{keys.path}: max_window_layers must be a number of layers, not {first!r}")
    return first


def _kinds(keys: Keys, layers: int) -> list[str] | None:
    kinds = keys.words("layer_types")
    if kinds is None:
        return None
    unknown = sorted({*kinds} - {SLIDING, FULL})
    if unknown:
        raise ConfigError(f"{keys.path}: layer_types {unknown} are not supported")
    if SLIDING in kinds and len(kinds) != layers:
        raise ConfigError(f"{keys.path}: layer_types names {len(kinds)} layers, and num_hidden_layers is {layers}")
    return kinds
