"""Time limits of child processes, enforced by signals whose default action ends the process."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager

#: The signal that each timer sends: CPU time, CPU time without that of the kernel, and wall time.
_SIGNALS = {
    signal.ITIMER_PROF: signal.SIGPROF,
    signal.ITIMER_VIRTUAL: signal.SIGVTALRM,
    signal.ITIMER_REAL: signal.SIGALRM,
}


def accept_timers() -> None:
    """Let the signals of all timers end this process; ignored and blocked signals are inherited from whatever started
    the server."""
    for number in _SIGNALS.values():
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS.values())


@contextmanager
def limited(seconds: float, patience: float = 0.0) -> Iterator[None]:
    """This process ends within the context after ``seconds`` of CPU time or ``patience`` seconds of wall time (0 = no
    limit). Requires ``accept_timers``."""
    signal.setitimer(signal.ITIMER_PROF, seconds)
    signal.setitimer(signal.ITIMER_REAL, patience)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
