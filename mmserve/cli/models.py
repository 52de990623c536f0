"""List the models of a server, with what they can do and their limits."""

from __future__ import annotations

import argparse
from dataclasses import asdict

from mmserve.cli.options import add_config, add_json, add_server, asked_model, connected, print_json
from mmserve.client import ModelInfo


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``mmserve models``."""
    add_server(parser)
    add_config(parser)
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Ask the server and print one model a paragraph."""
    with connected(arguments) as client:
        name = asked_model(arguments)
        models = [client.describe(name)] if name else client.models()
    if arguments.json:
        print_json({"models": [asdict(m) for m in models]})
    else:
        print("\n\n".join(map(_paragraph, models)))
    return 0


def _paragraph(m: ModelInfo) -> str:
    sees = (
        f"up to {m.max_images} images of {m.visual_tokens_per_image or 'varying'} tokens" if m.images else "no images"
    )
    watches = (
        f"up to {m.max_videos} videos of {m.max_video_seconds:g} s, {m.frames_per_video} frames each"
        if m.videos
        else "no videos"
    )
    return "\n".join(
        (
            f"{m.name}: {m.architecture}, {m.parameters / 1e6:.1f} M parameters, {m.dtype} on {m.device}",
            f"  takes {m.max_tokens} tokens, {sees}, {watches}",
            f"  recompute policies: {', '.join(m.recompute_policies)} (default {m.recompute_policy})",
            f"  commit policies: {', '.join(m.commit_policies)} (default {m.commit_policy})",
            *([f"  pruners: {', '.join(m.pruners)}"] if m.pruners else []),
            *([f"  K/V reductions: {', '.join(m.kv_reductions)}"] if m.kv_reductions else []),
            *([f"  image reuse: {', '.join(m.image_reuses)}"] if m.image_reuses else []),
        )
    )
