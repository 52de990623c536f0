"""The configuration and policies of benchmarks, from their arguments."""

from __future__ import annotations

import argparse
from collections.abc import Collection, Iterable
from dataclasses import replace
from typing import Any

from mmserve.cli.options import any_port, read_config
from mmserve.client import Options
from mmserve.config import Config, EncoderCacheConfig
from mmserve.core.info import ModelInfo
from mmserve.errors import ConfigError


def named_tasks(arguments: argparse.Namespace, known: Collection[str], default: Iterable[str] = ()) -> list[str]:
    """The names in ``--tasks``, by default ``default`` or all of ``known``. Raises ``ConfigError`` for unknown
    names."""
    names = [name for name in arguments.tasks.split(",") if name] or list(default) or list(known)
    if unknown := [name for name in names if name not in known]:
        raise ConfigError(f"--tasks: {unknown[0]!r} is not one of {', '.join(known)}")
    return names


def measured_config(arguments: argparse.Namespace) -> Config:
    """The arguments' configuration with a free port and with the caches of prompts and media disabled.

    A free port, as two benchmarks may run at once; no caches, as items repeat in every round and only the first would
    be prefilled.
    """
    config = any_port(read_config(arguments))
    return replace(
        config,
        engine=replace(config.engine, prefix_cache=False),
        encoder_cache=EncoderCacheConfig(token_bytes=0, pixel_bytes=0),
    )


def measured_policies(arguments: argparse.Namespace, model: ModelInfo) -> Options:
    """The policies of a benchmark: those of ``--recompute`` and ``--commit``, else those of plain decoding."""
    plain = model.policies.plain
    recompute: Any = arguments.recompute or plain.recompute.name
    commit: Any = arguments.commit or plain.commit.name
    return {"recompute": recompute, "commit": commit}
