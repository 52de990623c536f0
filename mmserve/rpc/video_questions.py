"""Questions of a session, free and typed, as the requests that its engine gets."""

from __future__ import annotations

import math
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from mmserve.config import MediaConfig
from mmserve.core.info import ModelInfo
from mmserve.core.request import Request
from mmserve.core.slo import SLO
from mmserve.core.tenant import Tenant
from mmserve.errors import FieldViolation, InvalidArgument, NotFound
from mmserve.rpc.decision_messages import generation_of, parse_decisions
from mmserve.rpc.request_messages import to_request
from mmserve.rpc.tool_events import tool_events
from mmserve.v1 import decision_pb2
from mmserve.v1 import generation_pb2 as gen
from mmserve.v1 import video_pb2 as pb
from mmserve.video import messages as m

#: Longer times (seconds) are as good as none, and clocks would overflow.
_LONGEST = 365 * 86_400.0


class SessionQuestions:
    """Makes requests of the questions of one session; ``adapter``: of those that name none (empty = none).

    ``info``: the description of the model with an adapter; ``config``: the session's own; ``slo``: the classes that
    questions may name.
    """

    def __init__(
        self,
        info: Callable[[str], ModelInfo],
        limits: MediaConfig,
        tenant: Tenant,
        config: pb.ConfigureSession,
        adapter: str,
        slo: Sequence[SLO] = (),
    ) -> None:
        self._info, self._limits, self._tenant, self._config, self._adapter = info, limits, tenant, config, adapter
        self._slo = {each.name: each for each in slo}

    def free(self, ask: pb.Ask) -> Request:
        """The request of a question; raises ``InvalidArgument``, or ``Unimplemented``."""
        return self._request(question_message(ask, self._config), ask, "ask")

    def converted(self, request: Request) -> m.Converted:
        """As ``video.messages.Ask.converted``."""
        return tool_events(request, self._info(request.adapter))

    def typed(self, asked: pb.Decide) -> m.Typed:
        """The request of typed questions; raises as ``free`` does."""
        if wrong := _not_text(asked.messages, "decide"):
            raise InvalidArgument(*wrong)
        message = decision_pb2.DecideRequest(messages=asked.messages, questions=asked.questions)
        ids, questions = parse_decisions(message)
        request = self._request(generation_of(message, self._info(self._adapter)), asked, "decide")
        request = replace(request, decisions=questions, streaming=replace(request.streaming, deltas=False))
        return m.Typed(ids, questions, request)

    def _request(self, message: gen.GenerateRequest, asked: pb.Ask | pb.Decide, path: str) -> Request:
        late = asked.timeout_seconds if asked.HasField("timeout_seconds") else None
        if late is not None and not 0 < late < math.inf:
            raise InvalidArgument.of(f"{path}.timeout_seconds", f"must be finite and above 0, not {late}")
        return to_request(
            message,
            request_id=uuid.uuid4().hex,
            info=self._info(message.adapter or self._adapter),
            adapter=self._adapter,
            limits=self._limits,
            media=_no_media,
            deadline=None if late is None else time.monotonic() + min(late, _LONGEST),
            tenant=self._tenant,
            slo=self._slo,
        )


def question_message(ask: pb.Ask, config: pb.ConfigureSession) -> gen.GenerateRequest:
    """The request of a question, with defaults from the session's configuration.

    Raises ``InvalidArgument`` where it names a model, or holds media.
    """
    request = gen.GenerateRequest()
    request.CopyFrom(ask.request)
    wrong = []
    if request.model:
        wrong.append(FieldViolation("ask.request.model", "must be empty: the session's model answers"))
    wrong += _not_text(request.messages, "ask.request")
    if request.HasField("vision"):
        wrong.append(FieldViolation("ask.request.vision", "must not be set: `configure.vision` is about all frames"))
    if wrong:
        raise InvalidArgument(*wrong)
    for field in ("sampling", "diffusion"):
        if not request.HasField(field) and config.HasField(field):
            getattr(request, field).CopyFrom(getattr(config, field))
    return request


def _not_text(messages: Sequence[Any], path: str) -> list[FieldViolation]:
    """The messages of a question at ``path`` that hold media."""
    why = "must hold texts: the video is put before them"
    return [
        FieldViolation(f"{path}.messages[{i}]", why)
        for i, chat in enumerate(messages)
        if any(part.WhichOneof("part") != "text" for part in chat.parts)
    ]


def _no_media(media_id: str) -> bytes:
    raise NotFound(f"a question has no media, and so no {media_id!r}")
