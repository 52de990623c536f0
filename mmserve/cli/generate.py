"""Ask one question, about images, videos or nothing, and print the answer."""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict
from pathlib import Path

from mmserve.cli.options import add_config, add_json, add_server, connected, print_json
from mmserve.cli.screen import CanvasLine
from mmserve.client import Finished, Options, Snapshot


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``mmserve generate``."""
    parser.add_argument("prompt", help="the question; '-' reads it from stdin")
    parser.add_argument("--image", action="append", default=[], type=Path, metavar="FILE", help="an image to show")
    parser.add_argument("--video", action="append", default=[], type=Path, metavar="FILE", help="a video to show")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--recompute", help="cache policy; `mmserve models` lists them (default the model's)")
    parser.add_argument("--commit", default="low_confidence", help="commit policy; `mmserve models` lists them")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds")
    add_server(parser)
    add_config(parser)
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Stream the answer, showing the canvas on a terminal while it fills."""
    prompt = sys.stdin.read() if arguments.prompt == "-" else arguments.prompt
    options: Options = {
        "max_new_tokens": arguments.max_new_tokens,
        "temperature": arguments.temperature,
        "seed": arguments.seed,
        "recompute": arguments.recompute,
        "commit": arguments.commit,
        "videos": arguments.video,
    }
    screen = CanvasLine()
    with connected(arguments) as client:
        events = client.stream(
            prompt, images=arguments.image, snapshots=screen.live, timeout=arguments.timeout, **options
        )
        for event in events:
            if isinstance(event, Snapshot):
                screen.show(event.text)
            elif isinstance(event, Finished):
                screen.clear()
                if arguments.json:
                    print_json({**asdict(event), "tokens_per_forward": event.tokens_per_forward})
                else:
                    print(event.text)
    return 0
