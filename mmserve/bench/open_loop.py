"""Requests sent at their scheduled times, independent of earlier ones, and the outcome of each.

Open loop: a slow server or client does not reduce the load. All times of a request are measured from its scheduled
time, so that a late generator increases latencies instead of hiding them; its lateness is reported separately.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from mmserve.client import AsyncClient, Delta, Finished, Options
from mmserve.errors import MMServeError

#: Seconds between the call and the first scheduled time, for creating tasks and connections.
_LEAD_SECONDS = 0.25
#: ``Outcome.ended`` of an answer, and of a stream that ended without one.
ANSWERED, LOST = "answered", "lost"


@dataclass(frozen=True)
class Asked:
    """One request: its kind, prompt, media and options, and the check of its answer."""

    kind: str
    prompt: str
    images: tuple[bytes, ...]
    options: Options
    right: Callable[[str], bool] = field(repr=False, compare=False)


@dataclass
class Outcome:
    """The outcome of one request. Times are seconds from its scheduled time; None = did not happen.

    ``late``: how much later it was sent. ``ended``: ``ANSWERED``, ``LOST``, or the code of its error.
    """

    kind: str
    late: float
    ended: str = LOST
    first: float | None = None  # time of its first text
    last: float | None = None  # time of its last text
    total: float | None = None  # time of its end
    tokens: int = 0
    right: bool = False
    error: str = ""

    @property
    def per_token(self) -> float | None:
        """Seconds a token after the first text; None without an answer, 0 if it arrived in one piece."""
        if self.ended != ANSWERED or self.first is None or self.last is None:
            return None
        return (self.last - self.first) / max(1, self.tokens - 1)

    def good(self, first_token: float, per_token: float) -> bool:
        """Whether it was answered within the targets for the first text and for each token (seconds).

        For an answer without text the time of its end is compared with ``first_token``.
        """
        begun = self.total if self.first is None else self.first
        took = self.per_token or 0.0
        return self.ended == ANSWERED and begun is not None and begun <= first_token and took <= per_token


async def run_open_loop(
    clients: Sequence[AsyncClient], schedule: Sequence[tuple[float, Asked]], *, timeout: float
) -> list[Outcome]:
    """Send each request at its scheduled time (seconds from the start, ascending), by the ``clients`` in turn.

    Returns an outcome for every request of the schedule, in its order. ``clients`` must not retry by themselves: a
    rejection is an outcome.
    """
    loop = asyncio.get_running_loop()
    begin = loop.time() + _LEAD_SECONDS
    tasks: list[asyncio.Task[Outcome]] = []
    for index, (due, asked) in enumerate(schedule):
        if (left := begin + due - loop.time()) > 0:
            await asyncio.sleep(left)
        client = clients[index % len(clients)]
        tasks.append(asyncio.create_task(_ask(client, asked, begin + due, timeout)))
    return [await task for task in tasks]


async def _ask(client: AsyncClient, asked: Asked, due: float, timeout: float) -> Outcome:
    clock = asyncio.get_running_loop().time
    outcome = Outcome(asked.kind, clock() - due)
    options: dict[str, Any] = {**asked.options}
    try:
        async with aclosing(client.stream(asked.prompt, asked.images, timeout=timeout, **options)) as events:
            async for event in events:
                if isinstance(event, Delta) and event.text:
                    outcome.last = clock() - due
                    outcome.first = outcome.last if outcome.first is None else outcome.first
                elif isinstance(event, Finished):
                    outcome.ended, outcome.tokens = ANSWERED, event.usage.completion_tokens
                    outcome.right = asked.right(event.text)
    except MMServeError as error:
        outcome.ended, outcome.error = error.code, error.message
    outcome.total = clock() - due
    return outcome
