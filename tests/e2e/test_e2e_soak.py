"""Many requests of every kind, good and bad, patient and not, from many threads: everybody hears something."""

from __future__ import annotations

import collections
import gc
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from e2e_helpers import Running, answer, draw_asks, running, settings, wait_for

from mmserve.client import Client, Finished
from mmserve.errors import Cancelled, DeadlineExceeded, InvalidArgument, MMServeError, NotFound, ResourceExhausted

REQUESTS, THREADS = 100, 16
#: Bytes that the process may have grown by; one request's canvas, pages and answer are far below a megabyte.
GROWTH = 96 << 20


def resident() -> int:
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def one(server: Running, index: int) -> str:
    """One request of a kind drawn by its number; what it came to."""
    rng = random.Random(f"soak {index}")
    ask = draw_asks(1, seed=1000 + index, canvas=(1, 4, 8, 12))[0]
    kind = rng.choice(
        ("plain",) * 5 + ("stream", "leave", "leave", "late", "late", "bad image", "bad value", "long", "media")
    )
    try:
        with Client(server.address, timeout=60) as client:
            if kind == "stream":
                events = list(client.stream(ask.prompt, images=ask.images, snapshots=True, **ask.options))
                assert isinstance(events[-1], Finished)
            elif kind == "leave":
                stream = client.stream(ask.prompt, images=ask.images, snapshots=True, **ask.options)
                for _event, _ in zip(stream, range(rng.randint(1, 4)), strict=False):
                    pass
                stream.close()
            elif kind == "late":
                ask.of(client, timeout=rng.uniform(0.001, 0.2))
            elif kind == "bad image":
                client.generate(ask.prompt, images=[rng.randbytes(100)])
            elif kind == "bad value":
                client.generate(ask.prompt, temperature=-1.0)
            elif kind == "long":
                client.generate("x" * 4000)
            elif kind == "media":
                client.generate(ask.prompt, images=["sha256:" + "0" * 64])
            else:
                first, again = ask.of(client), ask.of(client)
                assert answer(first) == answer(again)
    except MMServeError as error:
        return f"{kind}: {type(error).__name__}"
    return f"{kind}: answered"


ALLOWED = {
    "plain": {"answered"},
    "stream": {"answered"},
    "leave": {"answered"},
    "late": {"answered", DeadlineExceeded.__name__, Cancelled.__name__},
    "bad image": {InvalidArgument.__name__},
    "bad value": {InvalidArgument.__name__},
    "long": {InvalidArgument.__name__},
    "media": {NotFound.__name__},
}


def test_a_long_mixed_load_leaves_nothing_behind() -> None:
    def threads() -> set[threading.Thread]:
        return {t for t in threading.enumerate() if t.name.startswith("mmserve")}

    before = threads()
    with running(settings(engine={"max_queued": 64, "max_running": 12})) as server:
        with ThreadPoolExecutor(THREADS) as pool:
            warm = list(pool.map(lambda i: one(server, i), range(40)))
            at_first = resident()
            told = warm + list(pool.map(lambda i: one(server, i), range(40, REQUESTS)))
        server.assert_serves()
        grown = resident() - at_first
    outcomes = collections.Counter(told)
    assert sum(outcomes.values()) == REQUESTS
    for outcome in outcomes:
        kind, came_to = outcome.split(": ")
        assert came_to in ALLOWED[kind] | {ResourceExhausted.__name__}, outcomes
    assert {o.split(": ")[0] for o in outcomes} == set(ALLOWED), "every kind must have been drawn"
    assert outcomes["plain: answered"] > REQUESTS / 5
    assert grown < GROWTH, f"{grown >> 20} MiB more than after the first 40 requests"
    wait_for(f"the server's threads to end: {threads() - before}", lambda: threads() <= before)
