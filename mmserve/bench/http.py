"""Costs of viewers and of the HTTP server: ``mmserve bench http``, over real sockets to a server in its own process.

``viewers``: sixteen clients in a closed loop, all streaming; four of them with drafts of the canvas and four
alternatives a token, and the same without, in turn. ``slow``: a viewer that reads nothing until another has received
its whole answer. ``front``: short requests one after another, over one kept connection and over a new connection each:
the CPU time of the thread that serves HTTP, that of a bare uvicorn application which answers the same (``bare_http``),
in turn, and the client's latency beyond the engine's own time, which includes the HTTP server, the client, and other
load of the machine.
"""

from __future__ import annotations

import argparse
import json
import socket
import statistics
import threading
import time
from argparse import Namespace
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass
from http.client import HTTPConnection
from typing import Any

from mmserve.bench.bare_http import BareProcess
from mmserve.bench.measures import Figures, Progress, at_least, at_most, stated
from mmserve.bench.served import ServedProcess
from mmserve.bench.settings import named_tasks
from mmserve.client import Client
from mmserve.core.info import ModelInfo
from mmserve.errors import ConfigError
from mmserve.reference.evaluate import item

CLIENTS, VIEWERS, EACH = 16, 4, 1
#: Goals: throughput with viewers relative to without; milliseconds of the HTTP server, and its share of a short
#: request.
LEAST_THROUGHPUT, MOST_OWN_MS, MOST_OWN_SHARE = 0.98, 1.0, 0.1
TASKS = ("viewers", "slow", "front")
#: Those about drafts, which only diffusion models have.
_OF_DRAFTS = ("viewers", "slow")
_TOKENS, _SHORT_TOKENS, _LONG_TOKENS, _SHORT_REQUESTS = 64, 8, 256, 100
_CHAT = "/v1/chat/completions"
_PLAIN: dict[str, Any] = {"lowConfidence": {}, "noCache": {}}
_HEADERS = {"content-type": "application/json"}
_DRAFTS = {"drafts": True, "alternatives": 4}
#: Options for the slow viewer: answers as long as the canvas, and large drafts, most of which changes.
_LARGE: dict[str, Any] = {
    "temperature": 1,
    "logit_bias": {"1": -100, "2": -100},
    "mmserve": {"diffusion": {**_PLAIN, "blockLength": 256}, "stream": {"drafts": True, "alternatives": 20}},
}
_SLOW_BUFFER = 4 << 10


@dataclass(frozen=True)
class Streamed:
    """The result of one streamed request."""

    drafts: int
    text: str
    forwards: int
    engine_ms: float  # from admission by the engine to the end
    seconds: float  # latency at the client
    events: list[dict[str, Any]]  # without drafts


def run(arguments: argparse.Namespace, progress: Progress) -> Figures:
    """The measures of the selected tasks."""
    named_tasks(arguments, TASKS)  # an unknown one is reported before a server is started
    measures: list[Figures] = []
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    changed = {**vars(arguments), "set": [*arguments.set, f"server.http_port={port}"]}
    with ServedProcess(Namespace(**changed)) as served:
        with Client(served.address) as described:
            info = described.describe()
        tasks = _tasks(arguments, info)
        client = _Client(port, info.name)
        client.stream("What is 3 + 4?", _SHORT_TOKENS)  # warm-up
        if "viewers" in tasks:
            measures += _viewers(client, served, arguments, progress)
        if "slow" in tasks:
            measures += _slow(client, progress)
        if "front" in tasks:
            measures += _front(client, served, arguments, progress)
    settings = {"clients": CLIENTS, "viewers": VIEWERS, "rounds": arguments.repeats, "tokens": _TOKENS}
    return {"measures": measures, "settings": settings}


def _tasks(arguments: argparse.Namespace, info: ModelInfo) -> list[str]:
    """The selected tasks, by default all that the model of ``info`` supports.

    Raises ``ConfigError`` for a task about drafts if the model has none.
    """
    tasks = named_tasks(arguments, TASKS, TASKS if info.diffusion else ("front",))
    if not info.diffusion and (absent := [task for task in tasks if task in _OF_DRAFTS]):
        raise ConfigError(f"--tasks: {absent[0]!r} needs a diffusion model, and {info.name!r} has no drafts: use front")
    return tasks


class _Client:
    """Sends chat completions for ``model`` to ``port`` of this machine, by default over a new connection each."""

    def __init__(self, port: int, model: str) -> None:
        self._port, self._model = port, model

    def to(self, port: int) -> _Client:
        """A client that asks the same of ``port``."""
        return _Client(port, self._model)

    def connected(self, buffer: int = 0) -> HTTPConnection:
        """A new connection. ``buffer``: size of the client's receive buffer in bytes, 0 = the default."""
        connection = HTTPConnection("127.0.0.1", self._port)
        connection.sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # a request is two writes
        if buffer:
            connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
        connection.sock.connect(("127.0.0.1", self._port))
        return connection

    def stream(
        self,
        prompt: str,
        tokens: int,
        *,
        plain: bool = False,
        drafts: bool = False,
        large: bool = False,
        buffer: int = 0,
        kept: HTTPConnection | None = None,
        first: Callable[[], object] = lambda: None,
    ) -> Streamed:
        """Request a stream, and read it to its end.

        plain: one token a step, in one block. large: with large drafts. buffer: as in ``connected``. kept: a
        connection to use and leave open, in place of a new one. first: called before anything is read.
        """
        connection = kept or self.connected(buffer)
        headers = _HEADERS if kept else {**_HEADERS, "connection": "close"}
        body = _body(self._model, prompt, tokens, plain=plain, drafts=drafts)
        began = time.monotonic()
        connection.request("POST", _CHAT, json.dumps({**body, **_LARGE} if large else body), headers)
        first()
        response = connection.getresponse()
        data = response.read()
        seconds = time.monotonic() - began
        if kept is None:
            connection.close()
        if response.status != 200:
            raise RuntimeError(f"the server refused a request: {data[:400]!r}")
        return _streamed(data, seconds)


def _body(model: str, prompt: str, tokens: int, *, plain: bool, drafts: bool) -> dict[str, Any]:
    own: dict[str, Any] = {"stream": _DRAFTS} if drafts else {}
    if plain:
        own["diffusion"] = {**_PLAIN, "blockLength": tokens}
    messages = [{"role": "user", "content": prompt}]
    return {"model": model, "messages": messages, "max_tokens": tokens, "stream": True, "mmserve": own}


def _streamed(data: bytes, seconds: float) -> Streamed:
    """The result of the server-sent events in ``data``."""
    drafts, text, own, events = 0, "", dict[str, Any](), list[dict[str, Any]]()
    for event in data.split(b"\n\n"):
        if event.startswith(b"event: draft"):
            drafts += 1
        elif event.startswith(b"data: {"):
            found = json.loads(event[6:])
            events.append(found)
            text += found["choices"][0]["delta"].get("content") or ""
            own = found.get("mmserve") or own
    return Streamed(drafts, text, own["forwards"], own["times"]["total"], seconds, events)


def _viewers(
    client: _Client, served: ServedProcess, arguments: argparse.Namespace, progress: Progress
) -> list[Figures]:
    prompts = [item("arithmetic", index, arguments.seed)[1].text for index in range(CLIENTS * EACH)]

    def asker(number: int, drafts: bool) -> int:
        own = prompts[number * EACH : (number + 1) * EACH]
        views = drafts and number < VIEWERS
        return sum(client.stream(prompt, _TOKENS, plain=True, drafts=views).drafts for prompt in own)

    def phase(*, drafts: bool) -> tuple[float, float, int]:
        """Seconds, the server's CPU seconds, and the number of received drafts."""
        began, used = time.monotonic(), served.processor_seconds()
        seen = sum(pool.map(lambda number: asker(number, drafts), range(CLIENTS)))
        return time.monotonic() - began, served.processor_seconds() - used, seen

    pairs = []
    with ThreadPoolExecutor(CLIENTS) as pool:
        phase(drafts=True)
        for repeat in range(arguments.repeats):
            progress(f"viewers: round {repeat + 1} of {arguments.repeats}")
            order = (False, True) if repeat % 2 else (True, False)
            found = {drafts: phase(drafts=drafts) for drafts in order}
            pairs.append((found[False], found[True]))
    throughput = [without[0] / with_them[0] for without, with_them in pairs]
    processor = [without[1] / with_them[1] for without, with_them in pairs]
    return [
        at_least("throughput with 4 viewers", statistics.median(throughput), "of that without", LEAST_THROUGHPUT),
        stated("work a processor second with 4 viewers", statistics.median(processor), "of that without"),
        stated("requests a second without viewers", len(prompts) / statistics.median(a[0] for a, _b in pairs), "1/s"),
        stated("drafts a request of a viewer", statistics.mean(b[2] for _a, b in pairs) / (VIEWERS * EACH), "drafts"),
    ]


def _slow(client: _Client, progress: Progress) -> list[Figures]:
    progress("slow: a viewer that does not read")
    done = threading.Event()

    def ask(**how: Any) -> Streamed:
        return client.stream("How many shapes are there?", _LONG_TOKENS, large=True, **how)

    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(ask, buffer=_SLOW_BUFFER, first=done.wait)
        try:
            fast = ask()
        finally:
            done.set()
        slow = waiting.result()
    return [
        stated("drafts of a viewer that reads", fast.drafts / fast.forwards, "of the steps"),
        at_most("drafts of one that does not", slow.drafts / slow.forwards, "of the steps", 0.9),
        at_least("its text is that of the other", float(slow.text == fast.text), "1 = yes", 1),
    ]


def _front(client: _Client, served: ServedProcess, arguments: argparse.Namespace, progress: Progress) -> list[Figures]:
    texts = [item("arithmetic", index, arguments.seed)[1].text for index in range(_SHORT_REQUESTS)]

    def asked(
        by: _Client, process: ServedProcess | BareProcess, kept: HTTPConnection | None
    ) -> tuple[float, list[Streamed]]:
        """The HTTP thread's CPU time a request (ms), and the answers."""
        used = process.loop_seconds()
        found = [by.stream(text, _SHORT_TOKENS, kept=kept) for text in texts]
        return 1000 * (process.loop_seconds() - used) / len(found), found

    def together() -> float:
        """The HTTP thread's CPU time a request (ms), with ``CLIENTS`` clients at once."""
        used = served.loop_seconds()
        for _ in pool.map(lambda text: client.stream(text, _SHORT_TOKENS), texts):
            pass
        return 1000 * (served.loop_seconds() - used) / len(texts)

    with closing(client.connected()) as kept, ExitStack() as opened:
        usual = sorted(asked(client, served, kept)[1], key=lambda one: one.engine_ms)[_SHORT_REQUESTS // 2]
        bare = opened.enter_context(BareProcess(usual.events, usual.engine_ms / 1000))
        to_bare = client.to(bare.port)
        kept_bare = opened.enter_context(closing(to_bare.connected()))
        pool = opened.enter_context(ThreadPoolExecutor(CLIENTS))
        rounds, busy = [], []
        for repeat in range(arguments.repeats):
            progress(f"front: round {repeat + 1} of {arguments.repeats}, {_SHORT_REQUESTS} short requests each way")
            ways = (asked(client, served, kept), asked(client, served, None), asked(to_bare, bare, kept_bare))
            rounds.append(ways)
            busy.append(together())
    own, each, least = (statistics.median(one[way][0] for one in rounds) for way in range(3))
    found = [one for over_one, _each, _bare in rounds for one in over_one[1]]
    whole = 1000 * statistics.median(one.seconds for one in found)
    beside = [1000 * one.seconds - one.engine_ms for one in found]
    return [
        at_most("the front, processor time a request", own, "ms, mean", MOST_OWN_MS),
        stated("the same of a bare uvicorn application", least, "ms, mean"),
        at_most("the front, of a short request", own / whole, "of its time", MOST_OWN_SHARE),
        stated("the front, over a connection each", each, "ms, mean"),
        stated(f"the same, {CLIENTS} clients at once", statistics.median(busy), "ms, mean"),
        stated("a short request", whole, "ms, p50"),
        stated("front, client and machine beside the engine", statistics.median(beside), "ms, p50"),
        stated("front, client and machine at their quickest", min(beside), "ms"),
    ]
