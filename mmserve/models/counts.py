"""Counts in a ``config.json`` that are checked before anything is created so many times."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mmserve.errors import ConfigError

#: Keys of decoders and towers: numbers of layers, each of which has a tensor at least, and of experts.
_LAYERS = frozenset({"depth", "n_layers", "num_hidden_layers", "num_layers"})
_EXPERTS = frozenset({"moe_num_experts", "n_routed_experts", "num_experts", "num_local_experts"})
_MOST_EXPERTS = 4096


def check_counts(config: Mapping[str, Any], path: Path, tensors: int) -> None:
    """Raises ``ConfigError`` if ``config``, the contents of ``path``, has more layers than the files have ``tensors``,
    or thousands of experts."""
    for name, value in _numbers(config):
        if name in _LAYERS and value > tensors:
            raise ConfigError(f"{path}: {name} = {value}, but the model's files have only {tensors} tensors")
        if name in _EXPERTS and value > _MOST_EXPERTS:
            raise ConfigError(f"{path}: {name} = {value} is not supported; it can be up to {_MOST_EXPERTS}")


def _numbers(values: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _numbers(value)
        elif isinstance(value, int):
            yield name, value
