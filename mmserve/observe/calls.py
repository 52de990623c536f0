"""What is known of the call that is being answered: shared by the access log, other log lines and metrics."""

from __future__ import annotations

import time
from contextvars import ContextVar
from dataclasses import dataclass, field


@dataclass
class Call:
    """One call, as far as it has come. Sizes are bytes of messages as they are on the wire, before compression."""

    method: str = ""  # full name, as in /mmserve.v1.GenerationService/Generate
    peer: str = ""
    request_id: str = ""
    tenant: str = ""  # whose token it came with, if that is known
    model: str = ""
    received: int = 0
    sent: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    started: float = field(default_factory=time.monotonic)


_current: ContextVar[Call | None] = ContextVar("mmserve_call", default=None)


def current() -> Call:
    """The call that this task answers; outside of a call a fresh one that is discarded."""
    return _current.get() or Call()


def begin(call: Call) -> None:
    """Make ``call`` the one that the current task, and tasks that it starts, answer."""
    _current.set(call)
