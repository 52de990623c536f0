"""VideoService: connections of sessions, each a stream of requests and a stream of responses."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import ExitStack
from functools import partial
from typing import Any

from mmserve.config import Config
from mmserve.core.events import Event
from mmserve.core.options import PIXELS
from mmserve.core.session import FrameSampling, Memory
from mmserve.core.tenant import Tenant
from mmserve.errors import (
    Cancelled,
    Internal,
    InvalidArgument,
    MMServeError,
    ResourceExhausted,
    Unavailable,
)
from mmserve.observe import calls
from mmserve.observe.metrics import Metrics
from mmserve.observe.watch import Watch
from mmserve.rpc.auth import current_tenant
from mmserve.rpc.engines import EngineLike, Engines, info_with
from mmserve.rpc.fetching import Fetcher
from mmserve.rpc.quotas import Quotas
from mmserve.rpc.status import errors_to_status
from mmserve.rpc.video_messages import (
    parse_memory,
    parse_overload,
    parse_sampler,
    to_session_request,
    to_session_response,
    wrong_config,
)
from mmserve.rpc.video_questions import SessionQuestions
from mmserve.rpc.vision_messages import parse_vision, wrong_vision
from mmserve.v1 import video_pb2 as pb
from mmserve.v1 import video_pb2_grpc
from mmserve.video.base import Stream
from mmserve.video.connection import Connection
from mmserve.video.host import Hosts
from mmserve.video.overload import Overload
from mmserve.video.reading import MAX_INIT_BYTES
from mmserve.video.registry import Registry
from mmserve.video.session import Session as VideoSession
from mmserve.wire import request_id

logger = logging.getLogger("mmserve.rpc")

#: Maximum time (seconds) for the last responses of an ended connection to reach its client.
_UNREAD_SECONDS = 2.0
#: Maximum delay (seconds) after the end of a client's requests until gRPC reports that it has disconnected.
_LOST_SECONDS = 0.05
#: Bytes of a message besides those of its push.
_MESSAGE_BYTES = 1 << 10


class VideoService(video_pb2_grpc.VideoServiceServicer):
    """Opens sessions, and resumes those whose connection was lost."""

    def __init__(
        self,
        engines: Engines,
        hosts: Hosts,
        sessions: Registry,
        config: Config,
        metrics: Metrics,
        quotas: Quotas,
        fetcher: Fetcher,
    ) -> None:
        self._engines, self._hosts, self._sessions, self._fetcher = engines, hosts, sessions, fetcher
        self._config, self._metrics, self._quotas = config, metrics, quotas

    async def Session(
        self, messages: AsyncIterator[pb.SessionRequest], context: Any
    ) -> AsyncIterator[pb.SessionResponse]:
        """Serve one connection of a session."""
        label = calls.current().request_id
        async with errors_to_status(context, f"Session {label}"):
            first = await anext(messages, None)
            if first is None:
                raise InvalidArgument.of("request", "must be configure or resume: none came")
            session, configured, received = await self._begun(first)
            del first
            connection = session.attach(received)
            reading = None
            try:
                if (notice := self._sessions.notice(session)) is not None:
                    connection.go_away(notice)
                reading = asyncio.create_task(_read(messages, session, connection, self._asked(session, configured)))
                await _write(context, label, configured, connection)
            finally:
                if reading is not None:
                    reading.cancel()
                session.detach(connection)
        return
        yield  # what the interceptors expect of a method that answers with a stream; see ``context.write`` above

    async def _begun(self, first: pb.SessionRequest) -> tuple[VideoSession, pb.SessionConfigured, int | None]:
        """The session of a connection whose first request is ``first``, and its description for the client."""
        tenant = current_tenant()
        match first.WhichOneof("request"):
            case "configure":
                found = self._sessions.opened(first.configure.open_id, tenant)
                session = found or await self._open(first.configure, tenant)
                configured, received = session.greeting, None
            case "resume":
                session = self._sessions.find(first.resume.resume_handle, tenant)
                configured, received = pb.SessionConfigured(), first.received
                configured.CopyFrom(session.greeting)
                configured.resumed = True
            case _:
                raise InvalidArgument.of("request", "must be configure or resume: it is the first of its connection")
        calls.current().model = configured.model
        return session, configured, received

    async def _open(self, asked: pb.ConfigureSession, tenant: Tenant) -> VideoSession:
        self._sessions.check_capacity(tenant)
        model, adapter = self._engines.split(asked.model)
        engine = self._engines.find(model)
        wrong = [*wrong_config(asked)]
        wrong += [InvalidArgument.of(f, d).violations[0] for f, d in wrong_vision(asked.vision)]
        named = [name for name in PIXELS if asked.vision.HasField(name)]
        wrong += [InvalidArgument.of(f"vision.{n}", "is not for sessions").violations[0] for n in named]
        if wrong:
            raise InvalidArgument(*wrong)
        host = self._hosts.find(engine)
        adapter = host.streams.adapter_for(adapter)
        memory, overload = parse_memory(asked.memory), Overload(parse_overload(asked))
        around = host.session_context(
            lambda: _Question(self._metrics, self._quotas, engine, tenant), self._metrics.sessions, self._fetcher.file
        )
        vision = parse_vision(asked.vision)
        opening = asyncio.ensure_future(around.work(host.streams.open, memory, tenant, vision, MAX_INIT_BYTES))
        try:
            with self._sessions.opening():
                stream = await asyncio.shield(opening)
        except asyncio.CancelledError:  # the client has left: the stream is opened all the same
            opening.add_done_callback(_close_unused)
            raise
        try:
            session = self._sessions.open(
                tenant,
                lambda handle, ended: VideoSession(
                    handle, tenant, stream, host.reader(parse_sampler(asked.sampler)), around, overload, ended
                ),
            )
        except BaseException:
            await around.work(stream.close)
            raise
        session.owner, session.adapter, session.open_id = engine, adapter, asked.open_id
        if host.streams.stopped:
            session.end(unserved := Unavailable("the model is not served any more; open a session of another one"))
            raise unserved
        session.greeting = self._opened_message(session, engine, asked, memory)
        return session

    def _opened_message(
        self, session: VideoSession, engine: EngineLike, asked: pb.ConfigureSession, memory: Memory
    ) -> pb.SessionConfigured:
        video, largest = self._config.video, self._config.server.max_message_bytes
        configured = pb.SessionConfigured(
            resume_handle=session.handle,
            resume_seconds=video.resume_seconds,
            idle_seconds=video.idle_seconds,
            model=engine.info.name,
            config=asked,
            limits=pb.SessionLimits(
                max_request_bytes=min(video.credit_bytes, max(0, largest - _MESSAGE_BYTES)),
                max_questions=video.max_questions,
                max_watches=video.max_watches,
            ),
        )
        configured.config.memory.CopyFrom(pb.StreamMemory(**vars(memory)))
        if not asked.overload:
            configured.config.overload = pb.OVERLOAD_POLICY_BLOCK
        if not asked.sampler.HasField("rate"):
            configured.config.sampler.rate = FrameSampling.rate
        return configured

    def _asked(self, session: VideoSession, configured: pb.SessionConfigured) -> SessionQuestions:
        """The converter of questions of ``session`` to requests of the engine."""
        info, config = partial(info_with, session.owner), self._config
        return SessionQuestions(info, config.media, session.tenant, configured.config, session.adapter, config.slo)


class _Question:
    """Records one question in quotas and metrics (``session.QuestionRecorder``)."""

    def __init__(self, metrics: Metrics, quotas: Quotas, engine: EngineLike, tenant: Tenant) -> None:
        self._watch = Watch(metrics)
        self._watch.model, self._watch.tenant = engine.info.name, tenant.name
        self._quotas, self._tenant = quotas, tenant
        self._held = ExitStack()

    def begin(self) -> None:
        self._held.enter_context(self._quotas.taken(self._tenant))

    def record(self, event: Event) -> None:
        self._watch.record(event)

    def end(self, error: MMServeError | None) -> None:
        self._held.close()
        self._watch.__exit__(None if error is None else type(error), error, None)


async def _read(
    messages: AsyncIterator[pb.SessionRequest],
    session: VideoSession,
    connection: Connection,
    questions: SessionQuestions,
) -> None:
    """Read the requests of a connection; an invalid one ends the session.

    A request that can be received only later ends the connection: its client resumes the session.
    """
    try:
        async for message in messages:
            if not connection.current:
                return
            try:
                request = to_session_request(message, questions)
                session.take(message.index, message.received, request, message.ByteSize())
                del request
            except MMServeError as error:
                session.end(error)
                return
            except Exception as error:  # noqa: BLE001 - otherwise its client would wait forever
                session.end(Internal.logged(error, "a session of video", logger))
                return
            del message
        await asyncio.sleep(_LOST_SECONDS)  # of a client that is lost, gRPC reports this end first, and then cancels
        connection.close_input()
    except MMServeError as error:
        if isinstance(error, ResourceExhausted) and error.retry_after is not None:
            connection.fail(error)
        elif connection.current:
            session.end(error)


async def _write(context: Any, label: str, configured: pb.SessionConfigured, connection: Connection) -> None:
    """Send all responses of a connection; raises the error that ended it.

    A client that does not read blocks ``context.write``; its connection is then abandoned.
    """
    sending = asyncio.create_task(_send(context, label, configured, connection))
    failing = asyncio.create_task(connection.failed())
    try:
        await asyncio.wait({sending, failing}, return_when=asyncio.FIRST_COMPLETED)
        await asyncio.wait({sending}, timeout=_UNREAD_SECONDS)
        if sending.done():
            await sending
            return
    finally:
        sending.cancel()
        failing.cancel()
        await asyncio.gather(sending, failing, return_exceptions=True)
    raise connection.error or Cancelled("the session ended")


async def _send(context: Any, label: str, configured: pb.SessionConfigured, connection: Connection) -> None:
    await context.send_initial_metadata(((request_id.KEY, label),))
    await context.write(pb.SessionResponse(configured=configured))
    async for index, response in connection:
        await context.write(to_session_response(index, response))


def _close_unused(opening: asyncio.Future[Stream]) -> None:
    """Close the stream that was opened for a client that has left."""
    if not opening.cancelled() and opening.exception() is None:
        opening.result().close()
