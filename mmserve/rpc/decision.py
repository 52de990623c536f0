"""DecisionService: typed questions about a context, answered with probabilities."""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Mapping
from contextlib import ExitStack, aclosing
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from mmserve.core.decisions import Decision
from mmserve.core.events import Finished
from mmserve.core.request import Request
from mmserve.core.tenant import Tenant
from mmserve.errors import Internal
from mmserve.models.adapters import DECISIONS
from mmserve.observe import calls
from mmserve.observe.watch import Watch
from mmserve.rpc.auth import current_tenant
from mmserve.rpc.decision_messages import generation_of, parse_decisions, response_of
from mmserve.rpc.engines import EngineLike, Engines, own_adapter
from mmserve.rpc.generation import Generations, answered, deadline_of, logged
from mmserve.rpc.status import errors_to_status
from mmserve.v1 import decision_pb2 as pb
from mmserve.v1 import decision_pb2_grpc
from mmserve.wire import request_id

logger = logging.getLogger("mmserve.rpc")


@dataclass(frozen=True)
class _Asked:
    """A valid request: its engine, and its questions by id."""

    engine: EngineLike
    request: Request
    ids: tuple[str, ...]
    questions: tuple[Decision, ...]


class Deciding:
    """Sends typed questions to the engine that answers them, for all protocols."""

    def __init__(self, engines: Engines, generations: Generations) -> None:
        self._engines, self._generations = engines, generations

    async def decide(
        self,
        own: str,
        message: list[pb.DecideRequest],
        tenant: Tenant,
        deadline: float | None,
        held: ExitStack,
        fields: Mapping[str, str] = MappingProxyType({}),
    ) -> pb.DecideResponse:
        """The answers to the single request in ``message``, which is removed from the list; its bytes are counted until
        ``held`` is closed.

        ``own``: the engine's id of the request. ``deadline``: monotonic clock (seconds). ``fields``: the client's field
        of each URL, for errors. The forward pass is cancelled with the call. Raises ``MMServeError``.
        """
        with self._generations.watch() as watch:
            begun = time.monotonic()
            asked = await self._accepted(own, message.pop(), tenant, deadline, held, watch, fields)
            logger.info("request %s for %s: %d questions", own, asked.request.model, len(asked.questions))
            finished = await _finished(asked.engine, asked.request, watch)
        total = 1000 * (time.monotonic() - begun)
        return response_of(asked.request.model, asked.ids, asked.questions, finished, total)

    async def _accepted(
        self,
        own: str,
        message: pb.DecideRequest,
        tenant: Tenant,
        deadline: float | None,
        held: ExitStack,
        watch: Watch,
        fields: Mapping[str, str],
    ) -> _Asked:
        watch.tenant = tenant.name
        ids, questions = parse_decisions(message)
        model, adapter = self._engines.split(message.model)
        asked = self._engines.find(model)
        made = generation_of(message, asked.info)
        made.adapter = adapter or own_adapter(asked, DECISIONS)
        files = await self._generations.fetched(made, fields)
        engine, request = self._generations.accepted(own, made, tenant, deadline, held, watch, files)
        request = replace(request, decisions=questions, streaming=replace(request.streaming, deltas=False))
        return _Asked(engine, request, ids, questions)


class DecisionService(decision_pb2_grpc.DecisionServiceServicer):
    """Answers ``Decide`` with the engine of the requested model."""

    def __init__(self, deciding: Deciding) -> None:
        self._deciding = deciding

    async def Decide(self, message: pb.DecideRequest, context: Any) -> pb.DecideResponse:
        """Answer the questions of one request; cancelled if the client disconnects."""
        label, own = calls.current().request_id, uuid.uuid4().hex
        given = [message]
        del message  # its media are copied, and freed by the reader
        with ExitStack() as held:
            async with errors_to_status(context, f"Decide {label}"):
                await context.send_initial_metadata(((request_id.KEY, label),))
                with logged(own, label):
                    return await self._deciding.decide(own, given, current_tenant(), deadline_of(context), held)
        raise AssertionError("unreachable: an error ends the call")


async def _finished(engine: EngineLike, request: Request, watch: Watch) -> Finished:
    async with aclosing(answered(engine, request, watch)) as events:
        async for event in events:
            if isinstance(event, Finished):
                return event
    raise Internal("the engine ended a request without an answer", error_id=request.id)
