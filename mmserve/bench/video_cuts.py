"""Randomly closed connections: the section ``cuts`` of ``mmserve bench video``.

The same frames and questions twice: over one connection, and through a proxy that closes every TCP connection at random
times, ``CUTS`` times in ``--seconds``. Each frame must be processed once, and the answers must be equal.
"""

from __future__ import annotations

import argparse
import random
import socket
import threading
import time
from dataclasses import dataclass
from typing import Any, Self

from mmserve.bench.measures import Figures, Progress, at_least, at_most
from mmserve.bench.video_clips import clips_of, question_at
from mmserve.bench.video_served import PATIENCE, push, served
from mmserve.client import Client

#: Number of cuts, frames between two questions, and maximum tokens of an answer.
CUTS, ASK_EVERY, ANSWER = 50, 3, 24
#: Questions in progress at once, fewer than a session admits by default.
OPEN = 6
_PIECE = 1 << 16


class CutProxy:
    """Forwards TCP connections from ``address`` to ``target`` (``host:port``), and closes all of them on request."""

    def __init__(self, target: str) -> None:
        host, _colon, port = target.rpartition(":")
        self._target = host, int(port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._open: list[socket.socket] = []
        self._lock = threading.Lock()
        self.cuts = 0

    def __enter__(self) -> Self:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()
        self.cut()

    def cut(self) -> None:
        """Close every connection in both directions, without a closing handshake."""
        with self._lock:
            ended, self._open = self._open, []
        self.cuts += bool(ended)
        for each in ended:
            try:
                each.shutdown(socket.SHUT_RDWR)
            except OSError:  # closed by the other side
                continue

    def _accept(self) -> None:
        while True:
            try:
                near, _address = self._listener.accept()
                far = socket.create_connection(self._target)
            except OSError:  # closed
                return
            with self._lock:
                self._open += [near, far]
            for source, sink in ((near, far), (far, near)):
                threading.Thread(target=self._forward, args=(source, sink), daemon=True).start()

    def _forward(self, source: socket.socket, sink: socket.socket) -> None:
        try:
            while piece := source.recv(_PIECE):
                sink.sendall(piece)
        except OSError:  # cut
            pass
        for each in (source, sink):
            try:
                each.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue
        with self._lock:
            self._open = [each for each in self._open if each not in (source, sink)]
        source.close()


@dataclass(frozen=True)
class Played:
    """The result of a stream: frames processed, answers in order, number of resumes."""

    frames: int
    answers: list[str]
    resumes: int


def run(arguments: argparse.Namespace, progress: Progress) -> Figures:
    """Results of the stream of ``--seconds`` frames without cuts, and with ``CUTS``."""
    count = max(ASK_EVERY, int(arguments.seconds))
    with served(arguments) as server:
        progress(f"cuts: {count} frames without a cut")
        plain = _play(server.address, arguments.seed, count, 0.0)
        progress(f"cuts: {count} frames in {count} s with {CUTS} cuts")
        with CutProxy(server.address) as proxy:
            ended = threading.Event()
            cutting = threading.Thread(target=_cut, args=(proxy, arguments.seed, float(count), ended))
            cutting.start()
            try:
                cut = _play(proxy.address, arguments.seed, count, 1.0)
            finally:
                ended.set()
                cutting.join()
            cuts = proxy.cuts
    same = sum(a == b for a, b in zip(plain.answers, cut.answers, strict=False))
    row = {
        "measured": "cuts",
        "frames": count,
        "frames_taken": [plain.frames, cut.frames],
        "questions": len(plain.answers),
        "answers_equal": same,
        "cuts": cuts,
        "resumes": cut.resumes,
    }
    measures = [
        at_least("connections cut", cuts, "", 1),
        at_most("frames taken more or less than once", abs(cut.frames - count) + abs(plain.frames - count), "", 0),
        at_least("answers equal to those of an unbroken run", same / max(1, len(plain.answers)), "share", 1.0),
    ]
    return {"rows": [row], "measures": measures, "settings": {"seconds": count, "cuts": CUTS, "ask_every": ASK_EVERY}}


def _play(address: str, seed: int, count: int, pace: float) -> Played:
    """Push a frame every ``pace`` seconds, and ask questions in between, ``OPEN`` at a time."""
    clips, rng = clips_of(seed, count + 16), random.Random(f"cuts {seed}")
    with Client(address, timeout=PATIENCE) as client:
        client.wait_ready(PATIENCE)
        with client.video_session(timeout=PATIENCE) as session:
            begun = time.monotonic()
            asked: list[Any] = []
            for second in range(count):
                time.sleep(max(0.0, begun + pace * second - time.monotonic()))
                push(session, clips, second)
                if second % ASK_EVERY == ASK_EVERY - 1:
                    text = question_at(clips, second, rng)
                    if len(asked) >= OPEN:
                        asked[-OPEN].result()
                    asked.append(session.stream(text, max_new_tokens=ANSWER, timeout=PATIENCE))
            answers = [each.result().text for each in asked]
            return Played(session.statistics(PATIENCE).frames_taken, answers, session.resumes)


def _cut(proxy: CutProxy, seed: int, seconds: float, ended: threading.Event) -> None:
    """Cut ``CUTS`` times within ``seconds``, at times drawn in advance."""
    begun, rng = time.monotonic(), random.Random(f"cuts at {seed}")
    for moment in sorted(rng.uniform(0, seconds) for _ in range(CUTS)):
        if ended.wait(max(0.0, begun + moment - time.monotonic())):
            return
        proxy.cut()
