"""Supervision of Ray's head: workers and requests continue without it, but no worker can be started."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable

logger = logging.getLogger("mmserve.cluster")

#: Interval of checks, and timeout of a check (seconds).
_EVERY, _PATIENCE = 1.0, 2.0
#: Number of consecutive checks that must fail.
_CHECKS = 2


class HeadWatch:
    """Regularly connects to ``address`` (host:port); ``changed`` is called, on a thread of this object, with whether
    the head is lost, each time that changes."""

    def __init__(self, address: str, changed: Callable[[bool], None]) -> None:
        self._address, self._changed = address, changed
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="mmserve-head", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread."""
        self._stopped.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        failed, lost = 0, False
        while not self._stopped.wait(_EVERY):
            failed = 0 if self._answers() else failed + 1
            if lost != (failed >= _CHECKS):
                lost = not lost
                if lost:
                    logger.error(
                        "Ray's head at %s does not answer: requests go on, and spares take the places of lost workers, "
                        "but no worker can be started. Restart this server, on a cluster whose head runs",
                        self._address,
                    )
                else:
                    logger.warning("Ray's head at %s answers again", self._address)
                self._changed(lost)

    def _answers(self) -> bool:
        host, _, port = self._address.rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), _PATIENCE).close()
        except OSError:
            return False
        return True
