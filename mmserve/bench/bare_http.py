"""The least that an HTTP server on uvicorn does for a streamed request: what the front end's processor time is compared
with.

``python -m mmserve.bench.bare_http SECONDS`` reads a JSON array of events on standard input and prints its port. It
answers each request with these events, after ``SECONDS`` of computing in another thread: a processor that computed for
a while, or was idle, runs the same code several times slower than in a tight loop.
"""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any, Self

import torch

from mmserve.bench.served import processor_seconds


class BareProcess:
    """The application in a process of its own; ``port`` is its port on this machine."""

    def __init__(self, events: Sequence[dict[str, Any]], seconds: float) -> None:
        self._events = json.dumps(events)
        self._command = [sys.executable, "-m", "mmserve.bench.bare_http", str(seconds)]
        self.port = 0

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(self._events)
        self._process.stdin.close()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{' '.join(self._command)} ended with {self._process.wait()}")
        self.port = int(line)
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()

    def loop_seconds(self) -> float:
        """CPU time used by the thread of the event loop, in seconds."""
        return processor_seconds(self._process.pid, self._process.pid)


def _compute(seconds: float) -> None:
    ended, matrix = time.monotonic() + seconds, torch.ones(512, 512)
    while time.monotonic() < ended:
        matrix @ matrix


def main() -> None:
    """Serve until the process is killed."""
    import uvicorn
    from starlette.requests import Request
    from starlette.responses import StreamingResponse
    from starlette.types import Receive, Scope, Send

    events, seconds = json.load(sys.stdin), float(sys.argv[1])

    async def lines() -> AsyncIterator[str]:
        await asyncio.get_running_loop().run_in_executor(None, _compute, seconds)
        for event in events:
            yield f"data: {json.dumps(event)}\n\n"

    async def asgi(scope: Scope, receive: Receive, send: Send) -> None:
        json.loads(await Request(scope, receive).body())
        await StreamingResponse(lines(), media_type="text/event-stream")(scope, receive, send)

    listener = socket.create_server(("127.0.0.1", 0))
    print(listener.getsockname()[1], flush=True)
    config = uvicorn.Config(asgi, log_level="error", lifespan="off", access_log=False, timeout_keep_alive=3600)
    uvicorn.Server(config).run([listener])


if __name__ == "__main__":
    main()
