"""Cancellation of the work for a client that disconnects."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Self

from starlette.types import Receive

from mmserve.errors import Cancelled


class Present:
    """A context of the task that handles a request, whose body was already read with ``receive``.

    If the client disconnects, the task is cancelled, and the context raises ``Cancelled``.
    """

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._left = False

    def __enter__(self) -> Self:
        task = asyncio.current_task()
        assert task is not None
        self._task, self._before = task, task.cancelling()
        self._watch = asyncio.get_running_loop().create_task(self._wait())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._watch.cancel()
        if self._left and self._task.uncancel() <= self._before and kind is asyncio.CancelledError:
            raise Cancelled("the client disconnected") from None

    async def _wait(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._left = True
        self._task.cancel()
