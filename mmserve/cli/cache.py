"""List, pin, unpin and drop cached prompts and images of a server, or prefill a prompt in advance."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict

from mmserve.cli.options import add_common, connected, print_json, requested_model
from mmserve.client import Client
from mmserve.core.cached import KINDS, TIERS, CacheEntry
from mmserve.errors import ConfigError, NotFound


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``mmserve cache``."""
    parser.add_argument("what", choices=("list", "pin", "unpin", "drop", "warm"), help="what to do")
    parser.add_argument(
        "names",
        nargs="*",
        metavar="ID",
        help="with pin, unpin, drop: ids of entries, or enough of their first characters; with warm: the prompt",
    )
    parser.add_argument(
        "--image",
        action="append",
        default=[],
        metavar="FILE",
        help="with warm: an image of the prompt; may be repeated",
    )
    parser.add_argument("--kind", choices=KINDS, help="with list: only entries of this kind")
    parser.add_argument("--pin", action="store_true", help="with warm: also pin the entry of the prompt")
    add_common(parser)


def run(arguments: argparse.Namespace) -> int:
    """List, pin, unpin, drop or prefill, and print the result."""
    if arguments.what == "warm" and not (arguments.names or arguments.image):
        raise ConfigError("warm needs a prompt")
    if arguments.what not in ("list", "warm") and not (arguments.names and all(arguments.names)):  # "" begins every id
        raise ConfigError(f"{arguments.what} needs ids of entries, which `mmserve cache list` lists")
    with connected(arguments) as client:
        if arguments.what == "list":
            return _list(arguments, client)
        if arguments.what == "warm":
            return _warm(arguments, client)
        act = {"pin": client.cache.pin, "unpin": client.cache.unpin, "drop": client.cache.drop}[arguments.what]
        model = requested_model(arguments)
        entries = client.cache.list(model).entries
        chosen = _chosen(entries, arguments.names)
        if not chosen:
            raise NotFound(f"no entry begins with {' or '.join(arguments.names)}; `mmserve cache list` lists them")
        found = act(chosen, model=model)
    print_json({"blocks": found}) if arguments.json else print(f"{arguments.what}: {found} blocks")
    return 0 if found else 1


def _list(arguments: argparse.Namespace, client: Client) -> int:
    found = client.cache.list(requested_model(arguments), kind=arguments.kind)
    if arguments.json:
        print_json(asdict(found))
        return 0
    for each in found.entries:
        sizes = ", ".join(f"{tier} {each.sizes[tier] / 1e6:.2f} MB" for tier in TIERS if each.sizes.get(tier))
        notes = "".join(
            [", pinned" * each.pinned, ", stale" * each.stale, f", of {each.tenant}" if each.tenant else ""]
        )
        notes += f", on {', '.join(each.workers)}" if each.workers else ""
        print(f"{each.id[:16]} {each.kind} of {each.model}: {each.tokens} tokens, {sizes}, {each.hits} hits{notes}")
    total = ", ".join(f"{tier} {found.sizes[tier] / 1e6:.2f} MB" for tier in TIERS if found.sizes.get(tier))
    print(f"{len(found.entries)} entries{f': {total}' if total else ''}")
    return 0


def _warm(arguments: argparse.Namespace, client: Client) -> int:
    prompt, model = " ".join(arguments.names), requested_model(arguments)
    done = client.cache.warm(prompt, arguments.image, pin=arguments.pin, model=model or None)
    if arguments.json:
        print_json(asdict(done))
    else:
        print(f"{done.id[:16] or 'nothing to share'}: {done.prompt_tokens} tokens, {done.cached_tokens} were there")
    return 0


def _chosen(entries: Sequence[CacheEntry], names: Sequence[str]) -> list[str]:
    """The ids that begin with one of ``names``; raises ``ConfigError`` if several ids begin with the same name."""
    chosen: dict[str, None] = {}
    for name in names:
        found = dict.fromkeys(entry.id for entry in entries if entry.id.startswith(name))
        if len(found) > 1 and name not in found:
            raise ConfigError(f"several entries begin with {name}: {', '.join(each[:16] for each in found)}")
        chosen |= {name: None} if name in found else found
    return list(chosen)
