"""A video stream as a worker has it: the messages to that worker, and the frames that it has not reported."""

from __future__ import annotations

import uuid
from typing import Any

from mmserve.cluster.journal import GivenFrame
from mmserve.cluster.messages import Order
from mmserve.cluster.workers import Worker
from mmserve.core.session import Asked
from mmserve.video.base import Scope


class OpenedStream:
    """A stream of ``model`` that is opened at ``owner`` with ``open``. Not thread-safe, except ``open``, ``ask`` and
    ``question``, which wait for the worker."""

    def __init__(self, model: str, owner: Worker) -> None:
        self._model, self._owner = model, owner
        self.worker = owner.name  # when the stream was opened there: a successor has another name
        self.name = uuid.uuid4().hex  # the stream's name there, different each time it is opened
        self.unreported: set[int] = set()  # frames sent there that the worker has not reported

    def has(self, frame: int | None) -> bool:
        """Whether the worker has reported ``frame`` (None = all frames sent there)."""
        return not self.unreported if frame is None else frame not in self.unreported

    def open(self, *given: Any) -> int:
        """Open it. Returns the bytes reserved for it."""
        held: int = self.question("stream.open", *given)
        return held

    def append(self, frame: GivenFrame) -> None:
        """Send a frame."""
        self.unreported.add(frame.number)
        self._post("stream.append", frame.number, frame.seconds, *frame.pixels)

    def save(self) -> None:
        """Request a checkpoint."""
        self._post("stream.save")

    def close(self) -> None:
        """Close it."""
        self._post("stream.close")

    def ask(self, scope: Scope | None, order: Order) -> Asked:
        """Ask a question about the frames sent so far."""
        asked: Asked = self._owner.ask(self._model, "stream.ask", (self.name, order, scope))
        return asked

    def question(self, question: str, *arguments: Any) -> Any:
        """The worker's reply."""
        return self._owner.ask(self._model, question, (self.name, *arguments))

    def _post(self, message: str, *arguments: Any) -> None:
        self._owner.post(self._model, message, (self.name, *arguments))
