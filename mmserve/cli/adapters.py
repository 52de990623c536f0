"""List, load and unload adapters (LoRA) of a model."""

from __future__ import annotations

import argparse
from dataclasses import asdict

from mmserve.cli.options import add_common, connected, print_json, requested_model


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``mmserve adapters``."""
    add_common(parser)
    parser.add_argument(
        "--load",
        action="append",
        default=[],
        metavar="NAME",
        help="load this adapter from [engine] adapter_folder; may be repeated",
    )
    parser.add_argument(
        "--drop", action="append", default=[], metavar="NAME", help="drop this adapter; may be repeated"
    )


def run(arguments: argparse.Namespace) -> int:
    """Unload and load the given adapters, then print the adapters that are loaded."""
    with connected(arguments) as client:
        model = requested_model(arguments)
        for name in arguments.drop:
            client.drop_adapter(name, model=model)
        for name in arguments.load:
            client.load_adapter(name, model=model)
        found = client.adapters(model)
    if arguments.json:
        print_json({"adapters": [asdict(adapter) for adapter in found]})
    elif not found:
        print("no adapter is loaded")
    for adapter in found if not arguments.json else ():
        print(f"{adapter.name}: rank {adapter.rank}, {adapter.bytes / 1e6:.1f} MB, {adapter.digest}")
    return 0
