"""The end of an engine: it drains, then its threads end."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from itertools import islice

from mmserve.engine.live import LiveRequests
from mmserve.engine.prefixes import Prefixes
from mmserve.engine.waiting import WaitingQueue
from mmserve.engine.workers import Workers
from mmserve.errors import Unavailable
from mmserve.stages import Stages

logger = logging.getLogger("mmserve.engine")

#: Seconds within which requests that a drain failed must have ended, and how many of those left are logged.
ENDING_SECONDS, _LISTED = 30.0, 16
#: Seconds for which ``stop`` waits for passes that a drain has waited for already.
_SECOND_WAIT_SECONDS = 1.0


class Shutdown:
    """Drains and stops the engine of the model ``name``; from any thread.

    ``post`` runs a callable on the engine's ``thread``, which must end once ``stopping`` is set.
    """

    def __init__(
        self,
        name: str,
        thread: threading.Thread,
        post: Callable[[Callable[[], None]], None],
        queue: WaitingQueue,
        live: LiveRequests,
        workers: Workers,
        prefixes: Prefixes,
        stages: Stages,
    ) -> None:
        self._name, self._thread, self._post = name, thread, post
        self._queue, self._live, self._workers, self._prefixes, self._stages = queue, live, workers, prefixes, stages
        self._abandoned = False  # a drain gave up waiting for requests that it failed
        self.stopping = False

    def drain(self, timeout: float) -> bool:
        """Refuse new requests and wait for the live ones; after ``timeout`` seconds, fail those that are left, and wait
        for the passes in progress.

        Returns whether all of them ended by themselves. Questions of open sessions are still accepted until ``stop``:
        they end with their sessions.
        """
        queue = self._queue
        with queue.lock:
            queue.refusal = (
                "the server is shutting down, or unloads the model; send the request again, or to another one"
            )
            queue.draining = timeout > 0
        in_time = queue.idle.wait(timeout)
        if not in_time:
            with queue.lock:
                queue.draining = False
            self._post(
                lambda: self._live.fail_all(
                    Unavailable("the server shut down, or unloaded the model, before the request finished")
                )
            )
            self._stages.encoding.close()  # else a child process without progress would hold its request for a minute
            if not self._abandoned and not queue.idle.wait(ENDING_SECONDS):
                self._abandoned = True
                left = ", ".join(islice(self._live.described(), _LISTED)) or "none is known"
                logger.error(
                    "requests did not end within %g s after they were failed, and are not waited for (%d samples): %s",
                    ENDING_SECONDS,
                    queue.admitted,
                    left,
                )
        return in_time

    def stop(self) -> None:
        """End all remaining requests, then the threads; those whose pass does not return in time are left."""
        if self._thread.is_alive():
            self.drain(0.0)
            self._post(self._end_loop)
            self._thread.join(self._patience)
        self._stages.encoding.close()
        left = self._workers.stop(self._patience)
        if self._thread.is_alive():  # it runs passes itself, and owns the page pool
            left.append("engine")
        else:
            self._prefixes.flush()
        if left:
            logger.error(
                "stopped while a pass of %s did not return (threads: %s): they are left, and the model's memory is not "
                "freed before the process ends",
                self._name,
                ", ".join(left),
            )
        self._stages.decoders.close()

    def _end_loop(self) -> None:
        self.stopping = True

    @property
    def _patience(self) -> float:
        """Seconds to wait for a thread when the engine stops."""
        return _SECOND_WAIT_SECONDS if self._abandoned else ENDING_SECONDS
