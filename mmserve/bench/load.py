"""A mixed load from many concurrent clients over real sockets: ``mmserve bench load``.

Text, pictures, schemas and streams of the canvas, from 1, 4, 16, 64 and 200 clients in a closed loop, each with its own
connection. The server runs in a separate process. Every answer is compared with the answer to the same question without
load: with greedy decoding they must be equal.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from mmserve.bench.measures import Figures, Progress, figure, percentile
from mmserve.bench.served import ServedProcess
from mmserve.client import AsyncClient, Finished, Options
from mmserve.errors import ConfigError, MMServeError
from mmserve.reference.evaluate import canvas, item, media_files
from mmserve.reference.images import schema_asked
from mmserve.reference.items import Question
from mmserve.reference.tasks import correct

CLIENTS = (1, 4, 16, 64, 200)
#: Tasks of the requests, in turn; a task appears twice if it is requested in two ways.
MIX = ("arithmetic", "count", "json", "color", "json", "what", "arithmetic", "position")
#: Requests at each number of clients: per client, and the minimum in total.
ASKED_EACH, ASKED_LEAST = 2, 48
#: Timeout of a request in seconds.
PATIENCE = 600.0


@dataclass(frozen=True)
class Ask:
    """One request of the mix, and its options."""

    question: Question
    images: list[bytes]
    options: Options
    schema: dict[str, Any] | None
    streamed: bool


@dataclass
class Outcome:
    """Outcomes of the requests at one number of clients; times in seconds."""

    latencies: list[float] = field(default_factory=list)
    right: int = 0
    changed: int = 0  # answers that differ from those without load
    failures: list[str] = field(default_factory=list)


def mix(limit: int, seed: int, policies: Options) -> list[Ask]:
    """``limit`` requests of the mix, in turn, with the decode policies ``policies``."""
    asks = []
    for index in range(limit):
        task = MIX[index % len(MIX)]
        thing, question = item(task, index, seed)
        options: Options = {"max_new_tokens": canvas(task), **policies}
        constrained = task == "json" and index % len(MIX) == MIX.index("json")
        schema = schema_asked(question.text) if constrained else None
        asks.append(Ask(question, media_files(task, thing)["images"], options, schema=schema, streamed=index % 2 == 1))
    return asks


def run(arguments: argparse.Namespace, progress: Progress) -> Figures:
    """A row for each number of clients; latencies in milliseconds, None if no request was answered."""
    counts = _counts(arguments.clients)
    policies: Options = {}
    if arguments.recompute:
        policies["recompute"] = arguments.recompute
    if arguments.commit:
        policies["commit"] = arguments.commit
    asks = mix(arguments.limit, arguments.seed, policies)
    with ServedProcess(arguments) as served:
        rows = asyncio.run(_measure(served, asks, counts, progress))
    return {
        "rows": rows,
        "settings": {
            "mix": MIX,
            "requests": arguments.limit,
            "recompute": arguments.recompute or "the model's default",
            "commit": arguments.commit or "the model's default",
        },
    }


def _counts(text: str) -> Sequence[int]:
    if not text:
        return CLIENTS
    try:
        counts = [int(part) for part in text.split(",")]
    except ValueError:
        counts = [0]
    if min(counts) < 1:
        raise ConfigError(f"--clients takes whole numbers of at least 1, separated by commas, not {text!r}")
    return counts


async def _measure(
    served: ServedProcess, asks: Sequence[Ask], counts: Sequence[int], progress: Progress
) -> list[Figures]:
    async with AsyncClient(served.address, timeout=PATIENCE) as client:
        await client.wait_ready(PATIENCE)
        progress(f"each of {len(asks)} requests alone")
        alone = [await _ask(client, ask) for ask in asks]
    rows = []
    for count in counts:
        total = max(ASKED_LEAST, ASKED_EACH * count)
        progress(f"{total} requests from {count} clients")
        began, used = time.monotonic(), served.processor_seconds()
        outcome = await _load(served.address, asks, alone, count, total)
        seconds = time.monotonic() - began
        rows.append(_row(outcome, count, total, seconds, served.processor_seconds() - used))
    return rows


async def _load(address: str, asks: Sequence[Ask], alone: Sequence[str], count: int, total: int) -> Outcome:
    outcome = Outcome()
    numbers = iter(range(total))

    async def client_loop() -> None:
        async with AsyncClient(address, timeout=PATIENCE) as client:
            for number in numbers:  # shared by all clients: an idle one takes the next
                which = number % len(asks)
                began = time.monotonic()
                try:
                    text = await _ask(client, asks[which])
                except MMServeError as error:
                    outcome.failures.append(error.code)
                    continue
                outcome.latencies.append(time.monotonic() - began)
                outcome.right += correct(asks[which].question, text)
                outcome.changed += text != alone[which]

    await asyncio.gather(*(client_loop() for _ in range(count)))
    return outcome


async def _ask(client: AsyncClient, ask: Ask) -> str:
    if not ask.streamed:
        return (await client.generate(ask.question.text, ask.images, schema=ask.schema, **ask.options)).text
    text = ""
    async for event in client.stream(ask.question.text, ask.images, schema=ask.schema, snapshots=True, **ask.options):
        if isinstance(event, Finished):
            text = event.text
    return text


def _row(outcome: Outcome, count: int, total: int, seconds: float, used: float) -> Figures:
    answered = len(outcome.latencies)
    took = [1000 * latency for latency in outcome.latencies]
    return {
        "measured": f"{count} clients",
        "requests": total,
        "answers_per_second": round(answered / seconds, 2),
        "latency_ms_p50": figure(took, statistics.median, 1),
        "latency_ms_p99": figure(took, partial(percentile, share=0.99), 1),
        "accuracy": round(outcome.right / answered, 4) if answered else None,
        "changed": outcome.changed,
        "failed": len(outcome.failures),
        "failures": sorted(set(outcome.failures)),
        "server_cores": round(used / seconds, 2),
    }
