"""All sessions of a server: looked up by their handle, limited in number, and ended if no client resumes them."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from prometheus_client import Gauge

from mmserve.config import VideoConfig
from mmserve.core.tenant import Tenant
from mmserve.errors import DeadlineExceeded, NotFound, ResourceExhausted, Unavailable
from mmserve.video.messages import GoAway
from mmserve.video.session import Session

logger = logging.getLogger("mmserve.video")

_HANDLE_BYTES = 32
#: Interval (seconds) of checks for unused sessions.
_SWEEP_SECONDS = 0.25
#: Retry delay (seconds) for a client refused because of too many sessions.
_RETRY_AFTER = 5.0


class Registry:
    """Sessions by their handles; used on one event loop."""

    def __init__(self, config: VideoConfig, count: Gauge | None = None) -> None:
        self._config, self._count = config, count
        self._sessions: dict[str, Session] = {}
        self._opening = 0
        self._changed = asyncio.Event()  # a session ended, or another drain began
        self._sweeping: asyncio.Task[None] | None = None
        #: End times of drains on the monotonic clock (seconds), by the engine that is drained; None = all.
        self._ends: dict[object, float] = {}

    def __len__(self) -> int:
        return len(self._sessions)

    def check_capacity(self, tenant: Tenant) -> None:
        """Raises ``ResourceExhausted`` if ``tenant`` cannot open another session, ``Unavailable`` in a drain."""
        if None in self._ends:
            raise Unavailable("the server is shutting down; open the session on another one")
        if len(self._sessions) + self._opening >= self._config.max_sessions:
            raise ResourceExhausted(
                f"there are {len(self._sessions)} sessions, as many as [video] max_sessions allows; try again later",
                retry_after=_RETRY_AFTER,
            )
        most = self._config.sessions_per_tenant
        if most and sum(session.tenant.name == tenant.name for session in self._sessions.values()) >= most:
            raise ResourceExhausted(
                f"this tenant has {most} sessions, as many as [video] sessions_per_tenant allows; close one",
                retry_after=_RETRY_AFTER,
            )

    @contextmanager
    def opening(self) -> Iterator[None]:
        """Context that counts a session while it is being opened."""
        self._opening += 1
        try:
            yield
        finally:
            self._opening -= 1

    def open(self, tenant: Tenant, make: Callable[[str, Callable[[Session], None]], Session]) -> Session:
        """A new session; ``make`` creates it from its handle and a callback for its end.

        Raises as ``check_capacity``.
        """
        self.check_capacity(tenant)
        session = make(secrets.token_urlsafe(_HANDLE_BYTES), self._ended)
        self._sessions[session.handle] = session
        self._counted()
        if self._sweeping is None or self._sweeping.done():
            self._sweeping = asyncio.create_task(self._sweep())
        return session

    def find(self, handle: str, tenant: Tenant) -> Session:
        """The session of ``tenant`` with this handle.

        Raises ``NotFound`` for an unknown one, one that has ended, and one of another tenant.
        """
        session = self._sessions.get(handle)
        if session is None or session.tenant.name != tenant.name:
            raise NotFound("no session can be resumed with this handle: there is none, or it has ended; open a new one")
        return session

    def opened(self, open_id: str, tenant: Tenant) -> Session | None:
        """The session that ``tenant`` opened under ``open_id``, if its client has not sent anything since."""
        own = (session for session in self._sessions.values() if session.tenant.name == tenant.name)
        return next((s for s in own if open_id and s.open_id == open_id and s.untouched), None)

    def notice(self, session: Session) -> GoAway | None:
        """The notice for a new connection of ``session``, if a drain is in progress."""
        ends = [self._ends[owner] for owner in (None, session.owner) if owner in self._ends]
        if not ends:
            return None
        reason = "the server is shutting down" if None in self._ends else "the session's model is being replaced"
        return GoAway(max(0.0, min(ends) - time.monotonic()), reason)

    async def drain(self, seconds: float, owner: object = None) -> None:
        """Announce the end to all sessions, or to those of the engine ``owner``; end those left after ``seconds``.

        Returns when none are left. May be called again, with a shorter time, while the first call waits.
        """
        self._ends[owner] = time.monotonic() + seconds
        for session in self._of(owner):
            if (notice := self.notice(session)) is not None:
                session.go_away(notice)
        self._changed.set()
        while self._of(owner) and (seconds := self._ends[owner] - time.monotonic()) > 0:
            self._changed.clear()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), seconds)
        reason = "the server is shutting down" if owner is None else "the session's model is not served any more"
        if left := self._of(owner):
            logger.info("%d sessions are ended: %s", len(left), reason)
        for session in left:
            session.end(Unavailable(f"{reason}; open a new session" + (" on another server" if owner is None else "")))
        if owner is not None:
            self._ends.pop(owner, None)  # another call may have ended first
        elif self._sweeping is not None:
            self._sweeping.cancel()

    def _of(self, owner: object) -> list[Session]:
        return [session for session in self._sessions.values() if owner is None or session.owner is owner]

    def _ended(self, session: Session) -> None:
        self._sessions.pop(session.handle, None)
        self._changed.set()
        self._counted()

    def _counted(self) -> None:
        if self._count is not None:
            self._count.set(len(self._sessions))

    async def _sweep(self) -> None:
        """End sessions without a connection after ``resume_seconds``, and inactive ones after ``idle_seconds``."""
        while self._sessions:
            await asyncio.sleep(_SWEEP_SECONDS)
            now = time.monotonic()
            for session in list(self._sessions.values()):
                if session.detached is not None and now - session.detached > self._config.resume_seconds:
                    logger.info("a session without a connection ended after %g s", self._config.resume_seconds)
                    session.end(None)
                elif now - session.last_request > self._config.idle_seconds and session.idle:
                    reason = f"no request came for {self._config.idle_seconds:g} seconds ([video] idle_seconds)"
                    session.end(DeadlineExceeded(f"{reason}, and nothing was in progress; open a new session"))
