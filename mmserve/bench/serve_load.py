"""The section ``load`` of ``mmserve bench serve``: a mixed open-loop load at several rates, and its outcomes."""

from __future__ import annotations

import argparse
import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass

from mmserve.bench.measures import Figures, Progress, at_most, percentile, stated
from mmserve.bench.open_loop import ANSWERED, LOST, Outcome, run_open_loop
from mmserve.bench.serve_mix import TASKS, arrival_times, kinds, mix_of, requests, weights_text
from mmserve.bench.served import ServedProcess
from mmserve.cli.options import Reached, reached
from mmserve.client import AsyncClient, Options
from mmserve.errors import ConfigError

#: Number of connections of the generator, used in turn.
CONNECTIONS = 4
#: Lateness in seconds above which the generator did not offer the reported load.
LATE_SECONDS = 0.05
#: Minimum share of good requests for a rate to count as served.
SERVED_SHARE = 0.9
_START_SECONDS = 120.0


@dataclass(frozen=True)
class Targets:
    """Latency targets of a good answer (seconds): of its first text, and of each later token on average."""

    first_token: float
    per_token: float


def run(arguments: argparse.Namespace, progress: Progress) -> Figures:
    """A row for all requests of each rate and one for each kind, and the measures."""
    rates, targets = _rates(arguments.rates), Targets(arguments.first_token, arguments.per_token)
    for name in ("seconds", "burst", "first_token", "per_token", "timeout"):
        if not getattr(arguments, name) > 0:
            raise ConfigError(f"--{name.replace('_', '-')} must be above 0, not {getattr(arguments, name)}")
    with ExitStack() as stack:
        served = None if arguments.server else stack.enter_context(ServedProcess(arguments))
        at = reached(arguments) if served is None else Reached(served.address)
        measured, mix = asyncio.run(_measure(arguments, rates, at, served, progress))
    rows = [
        row for rate, outcomes, cores in measured for row in _rows(rate, outcomes, arguments.seconds, targets, cores)
    ]
    return {
        "rows": rows,
        "measures": [m for rate, outcomes, _cores in measured for m in _measures(rate, outcomes, arguments, targets)]
        + [stated(f"highest rate with {SERVED_SHARE:.0%} good", _highest(measured, targets), "requests/s")],
        "settings": {
            "server": arguments.server or "a process of this command",
            "mix": weights_text(mix),
            "seconds": arguments.seconds,
            "arrivals": "Poisson" if arguments.burst == 1 else f"Poisson, {arguments.burst} at once",
            "first_token_seconds": targets.first_token,
            "per_token_seconds": targets.per_token,
            "seed": arguments.seed,
            "tasks": {kind: TASKS[kind] for kind in mix},
        },
    }


def _rates(text: str) -> list[float]:
    try:
        rates = [float(part) for part in text.split(",")]
    except ValueError:
        rates = [0.0]
    if not all(0 < rate < float("inf") for rate in rates):
        raise ConfigError(f"--rates takes numbers above 0, separated by commas, not {text!r}")
    return rates


_Measured = list[tuple[float, list[Outcome], float | None]]


async def _measure(
    arguments: argparse.Namespace, rates: Sequence[float], at: Reached, served: ServedProcess | None, progress: Progress
) -> tuple[_Measured, dict[str, float]]:
    measured: _Measured = []
    async with AsyncExitStack() as stack:
        clients = [
            await stack.enter_async_context(
                AsyncClient(at.target, token=at.token, tls=at.tls, timeout=arguments.timeout, retries=False)
            )
            for _ in range(CONNECTIONS)
        ]
        for client in clients:
            await client.wait_ready(_START_SECONDS)
        mix = mix_of(arguments.mix, await clients[0].describe(at.model))
        options: Options = {
            "model": at.model or None,
            "recompute": arguments.recompute,
            "commit": arguments.commit,
            "slo_class": arguments.slo_class or None,
        }
        warm = requests(list(mix), arguments.seed + 1, options)  # other items, so that none is cached
        await run_open_loop(clients, [(0.0, asked) for asked in warm], timeout=arguments.timeout)
        for number, rate in enumerate(rates):
            seed = arguments.seed + number
            due = arrival_times(rate, arguments.seconds, seed=seed, burst=arguments.burst)
            asked = requests(kinds(len(due), mix, seed=seed), arguments.seed + 2 + number, options)
            progress(f"{len(asked)} requests, {rate:g} a second for {arguments.seconds:g} s")
            begun, used = time.monotonic(), 0.0 if served is None else served.processor_seconds()
            outcomes = await run_open_loop(clients, list(zip(due, asked, strict=True)), timeout=arguments.timeout)
            seconds = time.monotonic() - begun
            cores = None if served is None else (served.processor_seconds() - used) / seconds
            measured.append((rate, outcomes, cores))
    return measured, mix


def _rows(
    rate: float, outcomes: Sequence[Outcome], seconds: float, targets: Targets, cores: float | None
) -> list[Figures]:
    rows = [_row(f"{rate:g}/s", outcomes, seconds, targets)]
    if cores is not None:
        rows[0]["server_cores"] = round(cores, 2)
    present = [kind for kind in TASKS if any(o.kind == kind for o in outcomes)]
    if len(present) > 1:
        rows += [
            _row(f"{rate:g}/s {kind}", [o for o in outcomes if o.kind == kind], seconds, targets) for kind in present
        ]
    return rows


def _row(name: str, outcomes: Sequence[Outcome], seconds: float, targets: Targets) -> Figures:
    ended = Counter(o.ended for o in outcomes)
    good = sum(o.good(targets.first_token, targets.per_token) for o in outcomes)
    row: Figures = {
        "measured": name,
        "requests": len(outcomes),
        "offered_per_second": round(len(outcomes) / seconds, 2),
        "answered": ended[ANSWERED],
        "errors": {code: count for code, count in sorted(ended.items()) if code != ANSWERED},
        "right": sum(o.right for o in outcomes),
        "good": good,
        "goodput_per_second": round(good / seconds, 3),
    }
    for name, values in (
        ("first_token_ms", [o.first for o in outcomes]),
        ("per_token_ms", [o.per_token for o in outcomes]),
        ("latency_ms", [o.total for o in outcomes if o.ended == ANSWERED]),
        ("late_ms", [o.late for o in outcomes]),
    ):
        known = [1000 * value for value in values if value is not None]
        for label, share in (("p50", 0.5), ("p99", 0.99)):
            row[f"{name}_{label}"] = round(percentile(known, share), 2) if known else None
    return row


def _measures(
    rate: float, outcomes: Sequence[Outcome], arguments: argparse.Namespace, targets: Targets
) -> list[Figures]:
    good, ended = _good(outcomes, targets), Counter(o.ended for o in outcomes)
    at = f"at {rate:g}/s"
    found = [
        at_most(f"requests without an answer or an error {at}", ended[LOST], "requests", 0),
        at_most(f"internal errors {at}", ended["INTERNAL"], "requests", 0),
        stated(f"goodput {at}", good / arguments.seconds, "requests/s"),
        stated(f"share of good requests {at}", good / max(1, len(outcomes)), "share"),
    ]
    if outcomes:
        late = percentile([o.late for o in outcomes], 0.99)
        found.append(at_most(f"lateness of the generator p99 {at}", late, "s", LATE_SECONDS))
    return found


def _highest(measured: _Measured, targets: Targets) -> float:
    """The highest rate that is served within the targets; 0 = none."""
    served = [rate for rate, outcomes, _ in measured if _good(outcomes, targets) >= SERVED_SHARE * len(outcomes) > 0]
    return max(served, default=0.0)


def _good(outcomes: Sequence[Outcome], targets: Targets) -> int:
    return sum(o.good(targets.first_token, targets.per_token) for o in outcomes)
