"""List the models of a server with their capabilities and limits; load and unload models."""

from __future__ import annotations

import argparse
from dataclasses import asdict

from mmserve.cli.options import add_common, connected, print_json, requested_model
from mmserve.client import Measured, ModelInfo
from mmserve.core.tuning import QUALITIES


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``mmserve models``."""
    add_common(parser)
    parser.add_argument(
        "--load",
        metavar="PATH[=NAME]",
        action="append",
        default=[],
        help="load this model from [server] model_folder; may be repeated",
    )
    parser.add_argument(
        "--unload", metavar="NAME", action="append", default=[], help="unload this model; may be repeated"
    )


def run(arguments: argparse.Namespace) -> int:
    """Unload and load the given models, then list the models of the server, one paragraph each."""
    with connected(arguments) as client:
        for name in arguments.unload:
            client.unload_model(name)
        for path in arguments.load:
            folder, _, name = path.partition("=")
            client.load_model(folder, name)
        name = requested_model(arguments)
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
            *([f"  checkpoint format: {m.stored}, dequantised when loaded"] if m.stored else []),
            f"  takes {m.max_tokens} tokens, {sees}, {watches}",
            *(["  takes sessions of streaming video"] if m.sessions else []),
            f"  recompute policies: {', '.join(m.recompute_policies)} (default {m.recompute_policy})",
            f"  commit policies: {', '.join(m.commit_policies)} (default {m.commit_policy})",
            *_defaults(m),
            *([f"  pruners: {', '.join(m.pruners)}"] if m.pruners else []),
            *([f"  K/V reductions: {', '.join(m.kv_reductions)}"] if m.kv_reductions else []),
            *([f"  image reuse: {', '.join(m.image_reuses)}"] if m.image_reuses else []),
        )
    )


def _defaults(m: ModelInfo) -> list[str]:
    """The default policies of each quality and their source, with the measured speed and agreement if there are any."""
    if m.tuning is None:
        return []
    from_where = {
        "policy.json": "policy.json, measured on this model",
        "literature": "the literature; `mmserve tune` measures what is best for this model",
        "plain": "plain decoding, the only way known for this model",
    }
    lines = [f"  default policies from {from_where.get(m.tuning.source, m.tuning.source)}"]
    for quality in QUALITIES:
        pair = m.tuning.pair(quality)
        lines.append(f"    {quality}: {pair}{_figures(m.tuning.figures(pair))}")
    return lines


def _figures(row: Measured | None) -> str:
    if row is None:
        return ""
    accuracy = "" if row.accuracy is None else f", accuracy {row.accuracy:.1%}"
    return f" (quality {row.quality:.3f}{accuracy}, {1 / row.time_ratio:.1f} x as fast, {row.forwards:.1f} forwards)"
