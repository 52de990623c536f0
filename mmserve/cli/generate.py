"""Send one prompt, with or without images and videos, and print the answer."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from mmserve.cli.options import add_common, connected, print_json, requested_model
from mmserve.cli.request import add_request, by_flags, request_images, request_options, request_prompt, request_schema
from mmserve.cli.screen import CanvasLine, empty_note
from mmserve.client import Finished, Prefilled, Snapshot
from mmserve.errors import InvalidArgument


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``mmserve generate``."""
    parser.add_argument("prompt", help="the question; '-' reads it from stdin")
    add_request(parser)
    parser.add_argument("--timeout", type=float, default=120.0, metavar="S", help="deadline in seconds (default 120)")
    add_common(parser)


def run(arguments: argparse.Namespace) -> int:
    """Stream the answer; on a terminal, show the canvas while it is denoised."""
    try:
        return _run(arguments)
    except InvalidArgument as error:
        raise by_flags(error) from error


def _run(arguments: argparse.Namespace) -> int:
    prompt = sys.stdin.read() if arguments.prompt == "-" else arguments.prompt
    options = request_options(arguments)
    options["model"] = requested_model(arguments) or None
    _check_shown(arguments)
    schema = request_schema(arguments)
    messages = request_prompt(arguments, prompt)
    images = request_images(arguments)  # before a server is started
    screen = CanvasLine()
    done: list[Finished] = []
    prompts: dict[int, Prefilled] = {}
    with connected(arguments) as client:
        events = client.stream(
            messages, images, schema=schema, snapshots=screen.live, timeout=arguments.timeout, **options
        )
        for event in events:
            if isinstance(event, Snapshot) and event.sample == 0:
                screen.show(event.text)
            elif isinstance(event, Prefilled):
                prompts[event.sample] = event
            elif isinstance(event, Finished):
                done.append(event)
    screen.clear()
    _print(sorted(done, key=lambda event: event.sample), prompts, as_json=arguments.json)
    if arguments.json or arguments.max_new_tokens == 0:
        return 0
    for event in done:
        if not _shown(event):
            which = f"sample {event.sample}: " if len(done) > 1 else ""
            print(f"{which}{empty_note(event.reason)}", file=sys.stderr)
    if any(event.reason == "length" for event in done):
        used = f"all of --max-new-tokens {arguments.max_new_tokens} were used"
        print(f"mmserve generate: {used}, and the answer may be cut off", file=sys.stderr)
    return 0


def _check_shown(arguments: argparse.Namespace) -> None:
    """Raises ``InvalidArgument`` for options whose results only JSON has."""
    if arguments.json:
        return
    for name in ("tokens", "return_prompt", "prompt_tokens"):
        if getattr(arguments, name):
            raise InvalidArgument.of(name, "is printed with --json only: add it")


def _row(event: Finished, prompt: Prefilled | None) -> dict[str, Any]:
    """An answer as a JSON object, with its prompt if requested; an infinite ``log_weight`` (a zero weight) is a string,
    as JSON has no infinities."""
    row = {**asdict(event), "tokens_per_forward": event.tokens_per_forward}
    row |= {} if prompt is None else {"prompt": asdict(prompt)}
    return {**row, "log_weight": "-Infinity"} if event.log_weight == -math.inf else row


def _print(done: list[Finished], prompts: Mapping[int, Prefilled], *, as_json: bool) -> None:
    """Print one answer alone, several with their numbers."""
    if as_json:
        rows = [_row(event, prompts.get(event.sample)) for event in done]
        print_json(rows[0] if len(rows) == 1 else {"samples": rows})
    elif len(done) == 1:
        print(_shown(done[0]))
    else:
        for event in done:
            print(f"[{event.sample}] {_shown(event)}")


def _shown(event: Finished) -> str:
    """The text of an answer, followed by one line for each tool call; one that was cut ends with ``…``."""
    calls = [f"{call.name}({call.arguments})" for call in event.tool_calls]
    cut = [] if event.cut_call is None else [f"{event.cut_call.name}({event.cut_call.arguments}…"]
    return "\n".join(filter(None, [event.text, *calls, *cut]))
