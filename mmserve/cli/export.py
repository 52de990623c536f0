"""Write a model as a GGUF file for llama.cpp."""

from __future__ import annotations

import argparse
from importlib.util import find_spec
from pathlib import Path

from mmserve.cli.options import show_progress
from mmserve.errors import ConfigError

#: The keys of ``mmserve.export.gguf.TYPES``, repeated because that module imports torch.
_TYPES = ("f32", "q8_0")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``mmserve export``."""
    parser.add_argument("format", choices=("gguf",), help="format of the file")
    parser.add_argument("--model", required=True, help="checkpoint directory of a text model, or 'hub:owner/name'")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="file to write")
    parser.add_argument("--type", choices=_TYPES, default="f32", help="type of the weights (default f32)")


def run(arguments: argparse.Namespace) -> int:
    """Load the model in fp32, and write the GGUF file."""
    if not arguments.out.parent.is_dir():
        raise ConfigError(f"--out: there is no folder {arguments.out.parent}")
    if find_spec("gguf") is None:  # before a large model is loaded
        raise ConfigError("GGUF files need the package gguf: pip install 'mmserve[gguf]'")
    show_progress(f"Loading {arguments.model}")
    from mmserve.config import ModelConfig
    from mmserve.export.gguf import write_gguf
    from mmserve.models.base import LoadedModel
    from mmserve.models.registry import load_model

    model = load_model(ModelConfig(path=arguments.model, dtype="float32", device="cpu"))
    if not isinstance(model, LoadedModel):
        raise ConfigError(f"{model.spec.architecture!r} is not written as GGUF")
    write_gguf(model, arguments.out, arguments.type)
    print(f"{arguments.out}: {arguments.out.stat().st_size} bytes")
    return 0
