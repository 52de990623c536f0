"""Spare workers with loaded models but no role: each can replace a worker that exited, immediately."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection
from dataclasses import dataclass

from mmserve.cluster.messages import Described
from mmserve.cluster.ray_actors import Actor
from mmserve.errors import MMServeError

logger = logging.getLogger("mmserve.cluster")

#: Delay (seconds) after a spare failed to start; doubled each time, up to the second value.
_RETRY_SECONDS, _MAX_RETRY_SECONDS = 1.0, 60.0


@dataclass(frozen=True)
class Loaded:
    """An actor with loaded models."""

    actor: Actor
    described: Described


class Spares:
    """``count`` spares for each of ``kinds`` (number of torch threads), created by ``load`` on a thread of this object,
    one after another; thread-safe."""

    def __init__(self, kinds: Collection[int], count: int, load: Callable[[int], Loaded]) -> None:
        self._load, self._count = load, count
        self._ready: dict[int, list[Loaded]] = {kind: [] for kind in kinds}
        self._changed = threading.Condition()
        self._stopping = False
        self._thread = threading.Thread(target=self._fill, name="mmserve-spares", daemon=True)

    def start(self) -> None:
        """Start loading."""
        self._thread.start()

    def take(self, kind: int) -> Loaded | None:
        """Removes and returns a spare, if one is ready; another is created in its place."""
        with self._changed:
            ready = self._ready.get(kind)
            if not ready:
                return None
            self._changed.notify_all()
            return ready.pop(0)

    @property
    def ready(self) -> int:
        """Number of ready spares, of all kinds."""
        return sum(map(len, self._ready.values()))

    def stop(self) -> None:
        """Stop all spares."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        if self._thread.ident is not None:
            self._thread.join(10.0)
        for spare in (each for ready in self._ready.values() for each in ready):
            spare.actor.kill()

    def _fill(self) -> None:
        pause = _RETRY_SECONDS
        while (kind := self._missing()) is not None:
            try:
                made = self._load(kind)
            except Exception as error:
                traceback = None if isinstance(error, MMServeError) else error
                logger.error("a spare worker could not start: %s", error, exc_info=traceback)
                with self._changed:
                    self._changed.wait_for(lambda: self._stopping, pause)
                pause = min(2 * pause, _MAX_RETRY_SECONDS)
                continue
            pause = _RETRY_SECONDS
            with self._changed:
                self._ready[kind].append(made)
                if self._stopping:
                    made.actor.kill()

    def _missing(self) -> int | None:
        """The next kind to load, once one is missing; None at the end."""

        def lacks() -> list[int]:
            return [kind for kind, ready in self._ready.items() if len(ready) < self._count]

        with self._changed:
            self._changed.wait_for(lambda: self._stopping or lacks())
            return None if self._stopping else lacks()[0]
