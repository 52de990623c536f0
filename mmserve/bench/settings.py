"""The configuration that benchmarks run with."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any

from mmserve.cli.options import any_port, read_config
from mmserve.config import Config, EncoderCacheConfig
from mmserve.core.info import ModelInfo


def measured_config(arguments: argparse.Namespace) -> Config:
    """The arguments' configuration on a port of its own and without the caches of prompts and media.

    Two may run at once. Benchmarks ask the same items again and again: only the first round would run its prompts.
    """
    config = any_port(read_config(arguments))
    return replace(
        config,
        engine=replace(config.engine, prefix_cache=False),
        encoder_cache=EncoderCacheConfig(token_bytes=0, pixel_bytes=0),
    )


def measured_policies(arguments: argparse.Namespace, model: ModelInfo) -> tuple[Any, Any]:
    """The policies that a benchmark decodes by: those of ``--recompute`` and ``--commit``, else plain decoding's."""
    plain = model.policies.plain
    return arguments.recompute or plain.recompute.name, arguments.commit or plain.commit.name
