"""Ask one question, about images, videos or nothing, and print the answer."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mmserve.cli.options import add_config, add_json, add_server, asked_model, connected, print_json
from mmserve.cli.screen import CanvasLine, empty_note
from mmserve.client import (
    Blend,
    ExpectedAttention,
    Finished,
    HeavyHitters,
    Hole,
    KvShare,
    LegoLink,
    Options,
    RandomReuse,
    SinkWindow,
    Snapshot,
    Template,
    VisualCache,
)
from mmserve.errors import InvalidArgument
from mmserve.rpc.policies import ImageReuse, KvReduction, Quality

KV_REDUCTIONS: dict[str, Callable[[int], KvReduction]] = {
    "heavy_hitters": HeavyHitters,
    "expected_attention": ExpectedAttention,
    "sink_window": SinkWindow,
    "visual_cache": VisualCache,
}
IMAGE_REUSES: dict[str, Callable[..., ImageReuse]] = {
    "blend": Blend,
    "kv_share": KvShare,
    "lego_link": LegoLink,
    "random_reuse": RandomReuse,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``mmserve generate``."""
    parser.add_argument("prompt", help="the question; '-' reads it from stdin")
    parser.add_argument("--image", action="append", default=[], type=Path, metavar="FILE", help="an image to show")
    parser.add_argument("--video", action="append", default=[], type=Path, metavar="FILE", help="a video to show")
    parser.add_argument(
        "--max-new-tokens", type=int, default=64, metavar="N", help="tokens that the answer may take (default 64)"
    )
    parser.add_argument("--temperature", type=float, default=0.0, help="0 (the default) = the likeliest tokens")
    parser.add_argument("--seed", type=int, default=0, help="what is drawn at a temperature above 0 (default 0)")
    parser.add_argument("--n", type=int, default=1, metavar="N", help="samples of the answer (default 1)")
    parser.add_argument("--recompute", help="cache policy; `mmserve models` lists them (default the model's)")
    parser.add_argument("--commit", help="commit policy; `mmserve models` lists them (default the model's)")
    parser.add_argument(
        "--quality",
        type=_quality,
        metavar="exact|balanced|fast|NUMBER",
        help="choose both policies by how close to plain decoding they were measured; a number is the least wanted, "
        "plain decoding being 1 (default balanced)",
    )
    parser.add_argument("--pruner", help="pruner of visual tokens; `mmserve models` lists them (default none)")
    amounts = parser.add_mutually_exclusive_group()
    amounts.add_argument("--keep-ratio", type=float, help="share of the visual tokens that --pruner keeps, in (0, 1]")
    amounts.add_argument("--token-budget", type=int, metavar="N", help="visual tokens kept of an image or video")
    amounts.add_argument("--attention-mass", type=float, help="share of the attention that those kept draw, in (0, 1]")
    parser.add_argument(
        "--kv-reduction",
        choices=sorted(KV_REDUCTIONS),
        help="which K/V an autoregressive model keeps while it decodes (default all); with --kv-budget",
    )
    parser.add_argument("--kv-budget", type=int, metavar="N", help="K/V positions that --kv-reduction keeps")
    parser.add_argument(
        "--image-reuse",
        choices=sorted(IMAGE_REUSES),
        help="take images' K/V from where they stood alone, but for positions that this rule has run again",
    )
    parser.add_argument(
        "--reuse-recompute", type=float, metavar="SHARE", help="share of them that is run again (default 0.15)"
    )
    kinds = parser.add_mutually_exclusive_group()
    kinds.add_argument("--schema", type=Path, metavar="FILE", help="a JSON schema that the answer must satisfy")
    kinds.add_argument("--regex", help="a regular expression that all of the answer must match")
    kinds.add_argument("--choice", action="append", metavar="TEXT", help="an answer to choose from; give several")
    parser.add_argument(
        "--constraint-sampling",
        choices=("mask", "awrs", "asap"),
        help="what constrained samples are drawn from; 'awrs' and 'asap' are true to the model, and weighted",
    )
    kinds.add_argument("--template", type=Path, metavar="FILE", help="a JSON array of texts and holes (objects)")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds until it is given up (default 120)")
    add_server(parser)
    add_config(parser)
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Stream the answer, showing the canvas on a terminal while it fills."""
    prompt = sys.stdin.read() if arguments.prompt == "-" else arguments.prompt
    options: Options = {
        "model": asked_model(arguments) or None,
        "max_new_tokens": arguments.max_new_tokens,
        "temperature": arguments.temperature,
        "seed": arguments.seed,
        "n": arguments.n,
        "recompute": arguments.recompute,
        "commit": arguments.commit,
        "quality": arguments.quality,
        "videos": [path.read_bytes() for path in arguments.video],
        "schema": _schema(arguments.schema),
        "regex": arguments.regex,
        "choices": arguments.choice,
        "constraint_sampling": arguments.constraint_sampling,
        "pruner": arguments.pruner,
        "keep_ratio": arguments.keep_ratio,
        "token_budget": arguments.token_budget,
        "attention_mass": arguments.attention_mass,
        "kv_reduction": _reduction(arguments),
        "image_reuse": _reuse(arguments),
        "template": _template(arguments.template),
    }
    images = [path.read_bytes() for path in arguments.image]  # before a server is started for nothing
    screen = CanvasLine()
    done: list[Finished] = []
    with connected(arguments) as client:
        events = client.stream(prompt, images=images, snapshots=screen.live, timeout=arguments.timeout, **options)
        for event in events:
            if isinstance(event, Snapshot) and event.sample == 0:
                screen.show(event.text)
            elif isinstance(event, Finished):
                done.append(event)
    screen.clear()
    _tell(sorted(done, key=lambda event: event.sample), as_json=arguments.json)
    for event in done if not arguments.json else ():
        if not event.text:
            which = f"sample {event.sample}: " if len(done) > 1 else ""
            print(f"{which}{empty_note(event.reason)}", file=sys.stderr)
    if any(event.reason == "length" for event in done) and not arguments.json:
        used = f"all of --max-new-tokens {arguments.max_new_tokens} were used"
        print(f"mmserve generate: {used}, and the answer may be cut off", file=sys.stderr)
    return 0


def _quality(text: str) -> Quality:
    """The number in ``text``, or the name that it is."""
    try:
        return float(text)
    except ValueError:
        names: dict[str, Quality] = {"exact": "exact", "balanced": "balanced", "fast": "fast"}
        if text not in names:
            raise argparse.ArgumentTypeError(f"must be {', '.join(names)} or a number, not {text!r}") from None
        return names[text]


def _reduction(arguments: argparse.Namespace) -> KvReduction | None:
    """The reduction that ``--kv-reduction`` and ``--kv-budget`` name together."""
    if (arguments.kv_reduction is None) != (arguments.kv_budget is None):
        raise InvalidArgument.of("kv_reduction", "--kv-reduction and --kv-budget go together: set both")
    if arguments.kv_reduction is None:
        return None
    return KV_REDUCTIONS[arguments.kv_reduction](arguments.kv_budget)


def _reuse(arguments: argparse.Namespace) -> ImageReuse | None:
    """The rule that ``--image-reuse`` names, with the share of ``--reuse-recompute``."""
    if arguments.image_reuse is None:
        if arguments.reuse_recompute is not None:
            raise InvalidArgument.of("image_reuse", "--reuse-recompute is a number of --image-reuse: set both")
        return None
    share = () if arguments.reuse_recompute is None else (arguments.reuse_recompute,)
    return IMAGE_REUSES[arguments.image_reuse](*share)


def _schema(path: Path | None) -> dict[str, Any] | None:
    """The JSON schema in the file at ``path``."""
    schema: dict[str, Any] | None = None if path is None else _read("schema", path)
    return schema


def _template(path: Path | None) -> Template | None:
    """The template in the file at ``path``: strings, and for each hole an object of ``Hole``'s fields."""
    if path is None:
        return None
    parts = _read("template", path)
    try:
        return [Hole(**part) if isinstance(part, dict) else part for part in parts]
    except TypeError as error:
        raise InvalidArgument.of("template", f"{path} holds no template: {error}") from error


def _read(name: str, path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InvalidArgument.of(name, f"{path} is no JSON: {error}") from error


def _row(event: Finished) -> dict[str, Any]:
    """What JSON says of an answer; a weight of zero has no finite logarithm, and JSON no other number."""
    row = {**asdict(event), "tokens_per_forward": event.tokens_per_forward}
    return {**row, "log_weight": "-Infinity"} if event.log_weight == -math.inf else row


def _tell(done: list[Finished], *, as_json: bool) -> None:
    """One answer as it is; several with their numbers."""
    if as_json:
        rows = [_row(event) for event in done]
        print_json(rows[0] if len(rows) == 1 else {"samples": rows})
    elif len(done) == 1:
        print(done[0].text)
    else:
        for event in done:
            print(f"[{event.sample}] {event.text}")
