"""Requests to an engine in this process, their results, and the number of torch threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar, overload

import torch

from mmserve.core.events import Delta, Failed, Finished
from mmserve.core.request import Request
from mmserve.errors import MMServeError


class Serves(Protocol):
    """An engine, or a coordinator."""

    def submit(self, request: Request, sink: Any) -> None:
        """As in ``Engine.submit``."""


class Answer:
    """The result of one request; times are on the monotonic clock (seconds)."""

    def __init__(self) -> None:
        self.begun = time.monotonic()
        self.ended = 0.0
        self.finished: Finished | None = None
        self.error: MMServeError | None = None
        self.endings = 0
        self.text = ""
        self.deltas: list[float] = []
        self.over = threading.Event()

    def sink(self, event: Any) -> None:
        """Record an event."""
        match event:
            case Delta(text):
                self.text += text
                self.deltas.append(time.monotonic())
            case Finished():
                self.finished = event
                self._end()
            case Failed(error):
                self.error = error
                self._end()

    def whole(self) -> Finished:
        """The finish event; raises the error of the request, ``TimeoutError`` if it did not end in time."""
        if self.error is not None:
            raise self.error
        if self.finished is None:
            raise TimeoutError("the request never ended")
        return self.finished

    def _end(self) -> None:
        self.ended = time.monotonic()
        self.endings += 1
        self.over.set()


A = TypeVar("A", bound=Answer)


@overload
def ask_all(engine: Serves, requests: Sequence[Request], *, patience: float = ...) -> list[Answer]: ...


@overload
def ask_all(engine: Serves, requests: Sequence[Request], kind: type[A], *, patience: float = ...) -> list[A]: ...


def ask_all(
    engine: Serves, requests: Sequence[Request], kind: type[Any] = Answer, *, patience: float = 600.0
) -> list[Any]:
    """Submit all requests at once, and wait up to ``patience`` seconds for them; each answer is of type ``kind``."""
    answers = []
    for request in requests:
        answer = kind()
        engine.submit(request, answer.sink)
        answers.append(answer)
    end = time.monotonic() + patience
    for answer in answers:
        answer.over.wait(max(0.0, end - time.monotonic()))
    return answers


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Set torch's number of threads to ``count`` within the context."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
